"""Two "hosts" on one machine, for test_hosts.py: what changes when ranks sit on different machines
is the road that the bytes take, and nothing else.

A host is a network namespace of Linux: it sees its own interfaces, addresses and loopback, and none
of the machine's. A veth pair is the cable between the two. `torchrun --nnodes 2` runs in each, as
it would on two machines. Making namespaces needs root, or a kernel that lets users have them
(`unshare -rn`).

    namespace rlhf0                        namespace rlhf1
    torchrun --node_rank 0                 torchrun --node_rank 1
      rank 0   10.77.0.1 [veth0] ------- [veth1] 10.77.0.2   rank 1

This file is also the program that counts bytes, a rank in each host: `hosts.py FILE`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CABLE = "type veth peer name veth1"


def run(command, **options):
    """Runs a command, given as one text."""
    return subprocess.run(command.split(), capture_output=True, text=True, **options)


def can_namespace():
    """Are we allowed to make a network namespace with a cable in it?"""
    return not run(f"unshare -n ip link add veth0 {CABLE}").returncode


class Hosts:
    """`with Hosts() as hosts: hosts.launch(...)`: two namespaces joined by a cable, gone
    afterwards."""

    def __enter__(self):
        self.names = [f"rlhf{os.getpid()}{i}" for i in (0, 1)]
        for name in self.names:
            run(f"ip netns add {name}", check=True)
        first, second = self.names
        run(f"ip link add veth0 netns {first} {CABLE} netns {second}", check=True)
        for i, name in enumerate(self.names):
            run(f"ip -n {name} addr add 10.77.0.{i + 1}/24 dev veth{i}", check=True)
            run(f"ip -n {name} link set veth{i} up", check=True)
            run(f"ip -n {name} link set lo up", check=True)
        return self

    def __exit__(self, *_):
        for name in self.names:
            run(f"ip netns del {name}")

    def sent(self, host):
        """Bytes that have left a host over the cable so far, as the kernel counts them."""
        file = f"/sys/class/net/veth{host}/statistics/tx_bytes"
        return int(run(f"ip netns exec {self.names[host]} cat {file}").stdout)

    def launch(self, program, *flags):
        """Runs torchrun on both hosts at once; returns their outputs, and raises if one fails."""
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
        own = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
        hosts = []
        for i, name in enumerate(self.names):
            start = f"ip netns exec {name} {sys.executable} -m torch.distributed.run --nnodes 2 "
            start += f"--nproc_per_node 1 --node_rank {i} --master_addr 10.77.0.1 "
            start += "--master_port 29577"
            process = subprocess.Popen(
                [*start.split(), program, *flags],
                env={**own, "GLOO_SOCKET_IFNAME": f"veth{i}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            hosts.append(process)
        outputs = [host.communicate()[0] for host in hosts]
        if any(host.returncode for host in hosts):
            raise RuntimeError("\n".join(outputs)[-6000:])
        return outputs


# --------------------------------------------------------------------------------------------------
# Bytes that a step sends
# --------------------------------------------------------------------------------------------------
STAGES = {  # stage, and what its config has otherwise
    "0": (0, {}),
    "1": (1, {}),
    "2": (2, {}),
    "2, one root a bucket": (2, {"use_multi_rank_bucket_allreduce": False}),
    "3": (3, {}),
}
ZERO = {
    "reduce_scatter": True,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": 1e6,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 1e6,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 5e5,
}
# Bytes that one of two ranks sends for a collective, over those that DeepSpeed's log notes, if it
# is done as a ring, as NCCL does.  [Thakur 2005]  The log notes what a rank puts in: for an
# all-gather its own part, else the whole vector. With N ranks these are 2 (N - 1) / N, N - 1,
# (N - 1) / N, and (N - 1) / N as each rank but one sends all, and they take turns.
RING = {
    "all_reduce": 1.0,
    "all_gather_into_tensor": 1.0,
    "all_gather": 1.0,
    "reduce_scatter_tensor": 0.5,
    "reduce": 0.5,
    "barrier": 0.0,
}


def count_bytes(file, steps=4):
    """In each rank: trains a model at each of STAGES. Rank 0 writes {name: (by the log, on the
    cable)}, bytes of a step over those of the weights."""
    import deepspeed
    import deepspeed.comm as dist
    import torch

    # shared memory between ranks of one machine: no bytes to count
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    cable = next(Path("/sys/class/net").glob("veth*/statistics/tx_bytes"))
    found = {}
    for name, (stage, changes) in STAGES.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(16)))
        weights = 4 * 16 * 512**2
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "comms_logger": {"enabled": True, "prof_all": True, "verbose": False},
            "zero_optimization": {"stage": stage, **ZERO, **changes},
        }
        adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
        engine = deepspeed.initialize(model=model, optimizer=adam, config=config)[0]
        for step in range(2 * steps):
            if step == steps:  # stage 3 has learned the order of its layers
                dist.barrier()
                dist.comms_logger.comms_dict.clear()
                before = int(cable.read_text())
            engine.backward(engine(torch.randn(1, 512)).square().mean())
            engine.step()
        dist.barrier()
        wire, log = int(cable.read_text()) - before, 0
        for operation, sizes in dist.comms_logger.get_raw_data().items():
            ring = RING[operation.split(" |")[0]]
            log += ring * sum(size * count for size, (count, *_) in sizes.items())
        found[name] = log / steps / weights, wire / steps / weights
        engine.destroy()
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    count_bytes(sys.argv[1])
