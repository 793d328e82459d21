"""variants/vllm/vllm_nccl.py: what rank 0 says and sends, and when. With a stand-in for NCCL."""

import base64
import queue
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from kit import ROOT

sys.path.append(str(ROOT / "variants/vllm"))
import vllm_nccl  # noqa: E402

UNIQUE = bytes(range(128))  # as long as NCCL's
TENSORS = {
    "embed.weight": torch.arange(6.0).view(2, 3),
    "norm.weight": torch.ones(4, dtype=torch.bfloat16),
    "down.weight": torch.arange(6.0).view(2, 3).T,  # not contiguous
}


class Stream:
    """A CUDA stream: all that NCCL was given on it is done once `done` says so."""

    def __init__(self, device=None):
        self.done = lambda: True

    def wait_stream(self, other):
        pass

    def synchronize(self):
        assert self.done()

    def record_event(self):
        return SimpleNamespace(query=self.done)


class Worker:
    """One of vLLM's workers, with its end of the group. It notes what it is asked, in order."""

    def __init__(self, breaks=False):
        self.asked, self.joined, self.breaks = [], threading.Event(), breaks
        self.wire, self.taken, self.sent, self.received = queue.Queue(), 0, 0, {}

    # The group, as torch.cuda.nccl has it
    def unique_id(self):
        return UNIQUE

    def init_rank(self, size, unique, rank):
        assert (size, unique, rank) == (3, UNIQUE, 0)
        return "comm"

    def all_reduce(self, tensors, streams, comms):
        assert comms == ["comm"] and [one.numel() for one in tensors] == [1]
        self.joined.set()

    def broadcast(self, tensors, streams, comms):
        assert comms == ["comm"] and tensors[0].is_contiguous() and self.joined.is_set()
        self.wire.put(tensors[0].clone())
        self.sent += 1
        streams[0].done = lambda: self.taken == self.sent

    # The server
    def ask(self, path, body=None):
        self.asked.append(path)
        if path == "/get_world_size":
            return {"world_size": 2}
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            assert base64.b64decode(info.pop("nccl_unique_id_b64")) == UNIQUE
            assert info == {"rank_offset": 1, "world_size": 3, "packed": False}
            assert self.joined.wait(10), "vLLM answers once the sender has joined"
        if path == "/update_weights":
            self.receive(**body["update_info"])

    def receive(self, names, dtype_names, shapes):
        for name, dtype, shape in zip(names, dtype_names, shapes):
            if self.breaks and self.received:
                raise RuntimeError("vLLM has ended")
            tensor = self.wire.get(timeout=10)
            assert (tensor.dtype, [*tensor.shape]) == (getattr(torch, dtype), shape)
            self.received[name] = tensor
            self.taken += 1


@pytest.fixture
def sender(monkeypatch):
    def made(worker):
        monkeypatch.setattr(vllm_nccl, "nccl", worker)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
        monkeypatch.setattr(torch.cuda, "device", lambda device: torch.device("cpu"))
        return vllm_nccl.Sender(worker.ask, "cpu")

    return made


def test_weights_arrive_by_name_in_the_order_that_was_announced(sender):
    worker = Worker()
    ours = sender(worker)
    for factor in 1, 2:
        worker.received = {}
        ours.send({name: factor * tensor for name, tensor in TENSORS.items()})
        assert [*worker.received] == [*TENSORS]
        for name, tensor in TENSORS.items():
            assert torch.equal(worker.received[name], factor * tensor)
    joins = ["/get_world_size", "/init_weight_transfer_engine"]
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert worker.asked == joins + update + update


def test_workers_that_end_in_the_midst_do_not_make_the_sender_wait_for_ever(sender):
    """Their broadcasts never end; vLLM's answer says so."""
    worker = Worker(breaks=True)
    with pytest.raises(RuntimeError, match="vLLM has ended"):
        sender(worker).send(TENSORS)
    assert worker.asked[-1] == "/update_weights"  # nothing is finished
