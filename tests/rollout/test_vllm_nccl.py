"""variants/vllm/vllm_nccl.py: what rank 0 says and sends, and when. With stand-ins for NCCL."""

import base64
import ctypes
import queue
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests import kit

sys.path.append(str(kit.ROOT / "variants/vllm"))
import vllm_nccl  # noqa: E402

UNIQUE = bytes(range(128))  # as long as NCCL's
TENSORS = {
    "embed.weight": torch.arange(6.0).view(2, 3),
    "norm.weight": torch.ones(4, dtype=torch.bfloat16),
    "down.weight": torch.arange(6.0).view(2, 3).T,  # not contiguous
}


class Worker:
    """One of vLLM's workers, with its end of the group. It notes what it is asked, in order.

    breaks: it ends after its first tensor. absent: it never joins. fails: rank 0 cannot join.
    """

    def __init__(self, fault=""):
        self.asked, self.fault, self.received = [], fault, {}
        self.joined, self.over, self.wire = threading.Event(), threading.Event(), queue.Queue()

    # The group, as vllm_nccl.Nccl has it
    def unique_id(self):
        return UNIQUE

    def join(self, size, unique):
        assert (size, unique) == (3, UNIQUE)
        if self.fault == "fails":
            raise RuntimeError("ncclCommInitRank gives NCCL's error 5")
        if self.fault == "absent":
            self.over.wait()

    def all_reduce(self, tensor, stream):
        assert tensor.dtype == torch.float32 and tensor.numel() == 1
        self.joined.set()

    def broadcast(self, tensor, stream):
        assert tensor.is_contiguous() and self.joined.is_set()
        taken = threading.Event()
        self.wire.put((tensor.clone(), taken))
        while not taken.wait(0.01) and not self.over.is_set():
            pass  # as NCCL, it waits for ever

    # The server
    def ask(self, path, body=None):
        self.asked.append(path)
        if path == "/get_world_size":
            return {"world_size": 2}
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            assert base64.b64decode(info.pop("nccl_unique_id_b64")) == UNIQUE
            assert info == {"rank_offset": 1, "world_size": 3, "packed": False}
            if self.fault == "absent":
                raise RuntimeError("vLLM has ended with code 1")
            self.joined.wait(20)  # vLLM answers once rank 0 has joined
        if path == "/update_weights":
            self.receive(**body["update_info"])

    def receive(self, names, dtype_names, shapes):
        for name, dtype, shape in zip(names, dtype_names, shapes):
            if self.fault == "breaks" and self.received:
                raise RuntimeError("vLLM has ended with code -9")
            tensor, taken = self.wire.get(timeout=20)
            assert (tensor.dtype, [*tensor.shape]) == (getattr(torch, dtype), shape)
            self.received[name] = tensor
            taken.set()


@pytest.fixture
def sender(monkeypatch):
    workers = []

    def made(worker):
        workers.append(worker)
        stream = SimpleNamespace(synchronize=lambda: None)
        monkeypatch.setattr(vllm_nccl, "Nccl", lambda: worker)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
        for name in "stream", "device":
            monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
        return vllm_nccl.Sender(worker.ask, "cpu", 20)

    yield made
    for worker in workers:
        worker.over.set()


def test_weights_arrive_by_name_in_the_order_that_was_announced(sender):
    worker = Worker()
    ours = sender(worker)
    for factor in 1, 2:
        worker.received = {}
        ours.send({name: factor * tensor for name, tensor in TENSORS.items()})
        assert [*worker.received] == [*TENSORS]
        for name, tensor in TENSORS.items():
            assert torch.equal(worker.received[name], factor * tensor)
    joins = ["/get_world_size", "/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"]
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert worker.asked == joins + update + update


@pytest.mark.parametrize(
    ("fault", "words"),
    [("breaks", "code -9"), ("absent", "code 1"), ("fails", "NCCL's error 5")],
)
def test_nobody_waits_for_who_does_not_come(fault, words, sender):
    """NCCL itself would, for ever. The first of both sides to fail is heard."""
    worker = Worker(fault)
    with pytest.raises(RuntimeError, match=words):
        sender(worker).send(TENSORS)
    worker.joined.set()
    assert "/finish_weight_update" not in worker.asked


def test_the_library_is_called_as_nccl_h_declares_it(monkeypatch):
    """The id by value, 64 bits of size and pointers, in its order. An error that it returns is
    raised."""
    asked, pointer, number = [], ctypes.c_void_p, ctypes.c_int

    class Library:
        def __getattr__(self, name):
            def function(*given):
                asked.append([name, *given])
                if name == "ncclGetUniqueId":
                    ctypes.memmove(given[0], UNIQUE, 128)
                return 5 if name == "ncclCommInitRank" and given[1].value == 1 else 0

            return function

    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libnccl.so.2": Library()}[name])
    nccl, stream = vllm_nccl.Nccl(), SimpleNamespace(cuda_stream=0x7F0000000456)
    nccl.comm.value = 0x7F0000000123
    assert nccl.unique_id() == UNIQUE
    nccl.join(3, UNIQUE)
    name, comm, *given = asked[-1]
    assert name == "ncclCommInitRank" and comm._obj is nccl.comm
    assert [*map(type, given)] == [number, vllm_nccl.UniqueId, number]
    assert (given[0].value, bytes(given[1]), given[2].value) == (3, UNIQUE, 0)
    for expected, send, dtype, kind in (
        ("ncclAllReduce", nccl.all_reduce, torch.float32, 7),
        ("ncclBroadcast", nccl.broadcast, torch.bfloat16, 9),
        ("ncclBroadcast", nccl.broadcast, torch.float16, 6),
    ):
        send(tensor := torch.ones(3, dtype=dtype), stream)
        name, *given = asked[-1]
        types = pointer, pointer, ctypes.c_size_t, number, number, pointer, pointer
        assert (name, *map(type, given)) == (expected, *types)
        ends = [nccl.comm.value, stream.cuda_stream]
        assert [x.value for x in given] == [*[tensor.data_ptr()] * 2, 3, kind, 0, *ends]
    with pytest.raises(RuntimeError, match="ncclCommInitRank gives NCCL's error 5"):
        nccl.join(1, UNIQUE)
