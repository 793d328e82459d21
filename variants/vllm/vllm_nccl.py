"""Hands weights over from GPU to GPU, by vLLM's own transfer: --vllm_transfer nccl.

NOT RUN: no GPU was available. Written from the code of vLLM 0.32
(vllm/distributed/weight_transfer, backend "nccl", rendezvous by a unique id). vLLM has the sender's
side as well, but this process has no vLLM. The tests replace NCCL with a stand-in, and check the
order of requests and broadcasts.

    rank 0                                      vLLM's workers
    /init_weight_transfer_engine, unique id --> join the group, as ranks 1, 2, ...
    joins as rank 0; one all_reduce         <-> the same, as vLLM asks of a foreign sender
    for each hand-over:
    /start_weight_update                    --> get ready
    /update_weights: names, dtypes, shapes  --> receive tensor by tensor, and process whole layers
    broadcasts each tensor, in this order   <->
    /finish_weight_update                   --> process what is left

NCCL waits for ever for a missing rank. Its calls therefore run in daemon threads, which do not keep
the process alive, while vLLM's answer is watched for errors.
"""

import base64
import ctypes
import threading
from concurrent import futures
from contextlib import suppress

import torch

GRACE = 30  # seconds longer than vLLM's answers: these have the better words
SUM, TYPES = 0, {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # of nccl.h


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Nccl:
    """The four functions of NCCL that are needed, from the library that PyTorch has loaded.

    By ctypes: torch.cuda.nccl cannot join a group in Python 3.10 to 3.12 (pytorch issue 38019).
    """

    def __init__(self):
        self.library, self.comm = ctypes.CDLL("libnccl.so.2"), ctypes.c_void_p()

    def call(self, name, *args):
        """Calls a function. Raises RuntimeError with NCCL's number of the error."""
        if status := getattr(self.library, name)(*args):
            raise RuntimeError(f"{name} gives NCCL's error {status}; NCCL_DEBUG=INFO says more")

    def unique_id(self):
        """Returns the 128 bytes by which ranks find each other."""
        unique = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique))
        return ctypes.string_at(ctypes.byref(unique), ctypes.sizeof(unique))

    def join(self, size, unique):
        """Joins a group of `size` ranks, as rank 0. Waits until all have joined."""
        given = ctypes.c_int(size), UniqueId.from_buffer_copy(unique), ctypes.c_int(0)
        self.call("ncclCommInitRank", ctypes.byref(self.comm), *given)

    def all_reduce(self, tensor, stream):
        """Sums an fp32 tensor over all ranks, in place."""
        self.call("ncclAllReduce", *self.given(tensor), ctypes.c_int(SUM), *self.on(stream))

    def broadcast(self, tensor, stream):
        """Sends a tensor from rank 0 to all others."""
        self.call("ncclBroadcast", *self.given(tensor), ctypes.c_int(0), *self.on(stream))

    def given(self, tensor):
        """Returns the arguments that name a tensor: where it comes from and goes, size and type."""
        at = ctypes.c_void_p(tensor.data_ptr())
        return at, at, ctypes.c_size_t(tensor.numel()), ctypes.c_int(TYPES[tensor.dtype])

    def on(self, stream):
        return self.comm, ctypes.c_void_p(stream.cuda_stream)


class Sender:
    """Rank 0's end of the group. ask: Vllm.ask, which raises after `timeout` seconds."""

    def __init__(self, ask, device, timeout):
        self.ask, self.device, self.limit = ask, device, timeout + GRACE
        self.nccl, self.stream = Nccl(), torch.cuda.Stream(device)
        size = 1 + ask("/get_world_size")["world_size"]
        unique = self.nccl.unique_id()
        info = {"nccl_unique_id_b64": base64.b64encode(unique).decode(), "rank_offset": 1}
        info |= {"world_size": size, "packed": False}
        ask("/shutdown_weight_transfer_engine", {})  # a group that an earlier run has left
        joins = in_background(self.join, size, unique)
        asked = in_background(ask, "/init_weight_transfer_engine", {"init_info": info})
        wait_for([asked, joins], self.limit)

    def join(self, size, unique):
        """Joins, and sums a number over all ranks."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.nccl.join(size, unique)
            one = torch.ones(1, dtype=torch.float32, device=self.device)
            self.nccl.all_reduce(one, self.stream)
            self.stream.synchronize()

    def send(self, tensors):
        """Sends {name: tensor on the CPU} to vLLM's workers."""
        for name, one in tensors.items():
            if one.dtype not in TYPES:
                raise RuntimeError(f"{name}: not fp32, fp16 or bf16, but {one.dtype}")
        info = {"names": [*tensors]}
        info["dtype_names"] = [str(one.dtype).removeprefix("torch.") for one in tensors.values()]
        info["shapes"] = [[*one.shape] for one in tensors.values()]
        self.ask("/start_weight_update", {})
        asked = in_background(self.ask, "/update_weights", {"update_info": info})
        sends = in_background(self.broadcast, tensors)
        wait_for([asked, sends], self.limit)
        self.ask("/finish_weight_update", {})

    def broadcast(self, tensors):
        """Sends the tensors one by one. Each is kept until it is sent."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            for tensor in tensors.values():
                sent = tensor.to(self.device).contiguous()
                self.nccl.broadcast(sent, self.stream)
                self.stream.synchronize()


def in_background(work, *given):
    """Returns the Future of work(*given), in a daemon thread: no process stays alive for it."""
    future = futures.Future()

    def run():
        with suppress(futures.InvalidStateError):  # nobody waits any more
            try:
                future.set_result(work(*given))
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_for(running, limit):
    """Waits for all Futures. Raises their first error, or TimeoutError after `limit` seconds."""
    done, waiting = futures.wait(running, limit, return_when=futures.FIRST_EXCEPTION)
    for one in done:
        one.result()
    if waiting:
        raise TimeoutError("NCCL: rank 0 waits for vLLM's workers, or they for it")
