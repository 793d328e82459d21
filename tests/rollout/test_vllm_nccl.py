"""variants/vllm/vllm_nccl.py: what rank 0 says and sends, and when. With stand-ins for NCCL."""

import base64
import ctypes
import queue
import shutil
import subprocess
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


STAND_IN = """
#include <string.h>
typedef struct { char internal[128]; } Id;
long seen[9];
int ncclGetUniqueId(Id *id) { for (int i = 0; i < 128; i++) id->internal[i] = i; return 0; }
int ncclCommInitRank(void **comm, int size, Id id, int rank) {
  long sum = 0;
  for (int i = 0; i < 128; i++) sum += id.internal[i];
  seen[0] = size; seen[1] = rank; seen[2] = sum;
  *comm = (void *)0x7f0000000123;
  return size == 1 ? 5 : 0;
}
static int noted(const void *from, void *to, size_t count, int type, int arg, void *comm, void *s) {
  seen[3] = from == to; seen[4] = ((char *)from)[0]; seen[5] = count; seen[6] = type;
  seen[7] = arg; seen[8] = comm == (void *)0x7f0000000123 && s == (void *)0x7f0000000456;
  return 0;
}
int ncclAllReduce(const void *a, void *b, size_t n, int t, int op, void *c, void *s)
{ return noted(a, b, n, t, op, c, s); }
int ncclBroadcast(const void *a, void *b, size_t n, int t, int root, void *c, void *s)
{ return noted(a, b, n, t, root, c, s); }
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="it takes a C compiler")
def test_the_library_is_called_as_nccl_h_declares_it(tmp_path, monkeypatch):
    """With a library of the same declarations: the id by value, 64 bits of size and pointers."""
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text(STAND_IN)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    real = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: real(str(tmp_path / name)))
    nccl, stream = vllm_nccl.Nccl(), SimpleNamespace(cuda_stream=0x7F0000000456)
    seen = (ctypes.c_long * 9).in_dll(nccl.library, "seen")
    assert nccl.unique_id() == UNIQUE
    nccl.join(3, UNIQUE)
    assert [*seen][:3] == [3, 0, sum(UNIQUE)]
    for send, dtype, number in (
        (nccl.all_reduce, torch.float32, 7),
        (nccl.broadcast, torch.bfloat16, 9),
        (nccl.broadcast, torch.float16, 6),
    ):
        tensor = torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
        send(tensor, stream)
        assert [*seen][3:] == [1, tensor.view(torch.int8)[0], 3, number, 0, 1]
    with pytest.raises(RuntimeError, match="ncclCommInitRank gives NCCL's error 5"):
        nccl.join(1, UNIQUE)
