"""Two "hosts" on one machine, for test_hosts.py: what changes when ranks sit on different machines
is the road that the bytes take, and nothing else.

A host is a network namespace of Linux: it sees its own interfaces, addresses and loopback, and none
of the machine's. A veth pair is the cable between the two. `torchrun --nnodes 2` runs in each, as
it would on two machines. Making namespaces needs root, or a kernel that lets users have them
(`unshare -rn`).

    namespace rlhf0                        namespace rlhf1
    torchrun --node_rank 0                 torchrun --node_rank 1
      rank 0   10.77.0.1 [veth0] ------- [veth1] 10.77.0.2   rank 1
"""

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
