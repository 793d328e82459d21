"""Hands weights over from GPU to GPU, by vLLM's own transfer: --vllm_transfer nccl. NOT RUN.

No GPU was to be had. Written from the code and the documentation of vLLM 0.32
(vllm/distributed/weight_transfer, backend "nccl", rendezvous by a unique id). vLLM ships the
sender's side as well, but this process has no vLLM, so it speaks NCCL through torch. The tests have
a stand-in for NCCL, and hold the order of requests and broadcasts.

    rank 0                                      vLLM's workers
    /init_weight_transfer_engine, unique id --> join the group, as ranks 1, 2, ...
    joins as rank 0; one all_reduce         <-> the same, as vLLM asks of a foreign sender
    for each hand-over:
    /start_weight_update                    --> get ready
    /update_weights: names, dtypes, shapes  --> receive tensor by tensor, in this order
    broadcasts each tensor                  <->
    /finish_weight_update                   --> process what came: packed or quantised weights
"""

import base64
import threading
import time

import torch
from torch.cuda import nccl

POLL = 1e-3  # seconds between two looks at a broadcast


class Sender:
    """Rank 0's end of the group. ask(path, body) is Vllm.ask, which raises Fault after a while."""

    def __init__(self, ask, device):
        self.ask, self.device, self.stream = ask, device, torch.cuda.Stream(device)
        size = 1 + ask("/get_world_size")["world_size"]
        unique = nccl.unique_id()
        info = {"nccl_unique_id_b64": base64.b64encode(unique).decode(), "rank_offset": 1}
        joined = Answer(lambda: self.join(size, unique))  # it waits for ever; the request does not
        info |= {"world_size": size, "packed": False}
        ask("/init_weight_transfer_engine", {"init_info": info})
        self.comm = joined.wait()

    def join(self, size, unique):
        """Returns this rank's communicator, once all have it and have reduced a number with it."""
        with torch.cuda.device(self.device):
            comm = nccl.init_rank(size, unique, 0)
            one = torch.ones(1, device=self.device)
            self.stream.wait_stream(torch.cuda.current_stream())
            nccl.all_reduce([one], streams=[self.stream], comms=[comm])
            self.stream.synchronize()
        return comm

    def send(self, tensors):
        """Hands {name: tensor on the CPU} over."""
        info = {"names": [*tensors]}
        info["dtype_names"] = [str(one.dtype).removeprefix("torch.") for one in tensors.values()]
        info["shapes"] = [[*one.shape] for one in tensors.values()]
        self.ask("/start_weight_update", {})
        answer = Answer(lambda: self.ask("/update_weights", {"update_info": info}))
        with torch.cuda.device(self.device):
            for tensor in tensors.values():
                self.broadcast(tensor.to(self.device), answer)
        answer.wait()
        self.ask("/finish_weight_update", {})

    def broadcast(self, tensor, answer):
        """Sends a tensor, and waits until it is there, or until vLLM's answer says why it is not.

        Without workers a broadcast would never end. So nothing here waits for the stream itself.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        nccl.broadcast([tensor.contiguous()], streams=[self.stream], comms=[self.comm])
        sent = self.stream.record_event()
        while not sent.query():
            answer.look()
            time.sleep(POLL)


class Answer:
    """What a function returns that runs in a thread, which does not keep the process alive."""

    def __init__(self, function):
        self.value = self.error = None
        self.thread = threading.Thread(target=self.run, args=[function], daemon=True)
        self.thread.start()

    def run(self, function):
        try:
            self.value = function()
        except Exception as error:
            self.error = error

    def look(self):
        """Raises what the function has raised by now."""
        if self.error:
            raise self.error

    def wait(self):
        """Returns what the function returns, or raises what it raises."""
        self.thread.join()
        self.look()
        return self.value
