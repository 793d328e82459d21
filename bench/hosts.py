"""Two "hosts" on one machine: what changes when ranks sit on different machines?  Nothing but the
road the bytes take.

    python bench/hosts.py           both parts below, 4 minutes on 2 cores; prints the tables of
                                    docs/deepspeed.md
    python bench/hosts.py losses    sft.py under ZeRO-3: two hosts with a rank each, against one
                                    host with two ranks
    python bench/hosts.py bytes     bytes sent per step and rank for ZeRO 0-3, by DeepSpeed's log
                                    and by the kernel's count

A host is a network namespace of Linux: it sees its own interfaces, addresses and loopback, and none
of the machine's. A veth pair is the cable between the two. `torchrun --nnodes 2` runs in each, as
it would on two machines. Making namespaces needs root, or a kernel that lets users have them
(`unshare -rn`); where neither holds, the hosts are two node ranks on loopback.

    namespace rlhf0                        namespace rlhf1
    torchrun --node_rank 0                 torchrun --node_rank 1
      rank 0   10.77.0.1 [veth0] ------- [veth1] 10.77.0.2   rank 1
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def run(*command, **options):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)


def can_namespace():
    """Are we allowed to make a network namespace with a cable in it?"""
    return not run(
        "unshare", "-n", "ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1"
    ).returncode


class Hosts:
    """`with Hosts() as hosts: hosts.launch(...)`: two namespaces joined by a cable, gone
    afterwards."""

    def __enter__(self):
        self.names, self.real = [f"rlhf{os.getpid()}{i}" for i in (0, 1)], can_namespace()
        if self.real:
            for name in self.names:
                run("ip", "netns", "add", name, check=True)
            run(
                "ip",
                "link",
                "add",
                "veth0",
                "netns",
                self.names[0],
                "type",
                "veth",
                "peer",
                "name",
                "veth1",
                "netns",
                self.names[1],
                check=True,
            )
            for i, name in enumerate(self.names):
                for command in (
                    f"addr add 10.77.0.{i + 1}/24 dev veth{i}",
                    f"link set veth{i} up",
                    "link set lo up",
                ):
                    run("ip", "-n", name, *command.split(), check=True)
        return self

    def __exit__(self, *_):
        for name in self.names if self.real else ():
            run("ip", "netns", "del", name)

    def sent(self, host):
        """Bytes that left a host over the cable so far, as the kernel counts them (None on
        loopback)."""
        if self.real:
            return int(
                run(
                    "ip",
                    "netns",
                    "exec",
                    self.names[host],
                    "cat",
                    f"/sys/class/net/veth{host}/statistics/tx_bytes",
                ).stdout
            )

    def launch(self, script, *flags, env=()):
        """Runs torchrun on both hosts at once; returns their outputs, and raises if one fails."""
        address, hosts = ("10.77.0.1" if self.real else "127.0.0.1"), []
        for i, name in enumerate(self.names):
            inside = ["ip", "netns", "exec", name] if self.real else []
            own = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "DS_ACCELERATOR": "cpu",
                "PYTHONPATH": str(ROOT),
                **({"GLOO_SOCKET_IFNAME": f"veth{i}"} if self.real else {}),
                **dict(env),
            }
            command = [
                *inside,
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                2,
                "--nproc_per_node",
                1,
                "--node_rank",
                i,
                "--master_addr",
                address,
                "--master_port",
                29577,
                script,
                *flags,
            ]
            hosts.append(
                subprocess.Popen(
                    [str(c) for c in command],
                    env=own,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [host.communicate()[0] for host in hosts]
        if any(host.returncode for host in hosts):
            raise RuntimeError("\n".join(outputs)[-6000:])
        return outputs


# ---- Losses --------------------------------------------------------------------------------------
def losses(folder):
    """Returns the losses of 5 steps under ZeRO-3 on two hosts, those on one host with two ranks,
    and where the two hosts are."""
    flags = [
        "--preset",
        "toy",
        "--zero_stage",
        3,
        "--max_steps",
        5,
        "--log_steps",
        1,
        "--num_warmup_steps",
        0,
        "--num_samples",
        0,
        "--per_device_train_batch_size",
        4,
        "--overwrite",
    ]
    with Hosts() as hosts:
        hosts.launch(ROOT / "sft.py", *flags, "--output_dir", folder / "two")
        where = (
            "two network namespaces, 10.77.0.1 and 10.77.0.2"
            if hosts.real
            else "two node ranks on loopback"
        )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    one = run(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        2,
        ROOT / "sft.py",
        *flags,
        "--output_dir",
        folder / "one",
        env=env,
    )
    if one.returncode:
        raise RuntimeError(one.stdout[-3000:] + one.stderr[-3000:])

    def read(name):
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        return [x["loss"] for x in map(json.loads, lines) if "loss" in x]

    return read("two"), read("one"), where


# ---- Bytes ---------------------------------------------------------------------------------------
STAGES = [
    ("0", 0, {}),
    ("1", 1, {}),
    ("2", 2, {}),
    ("2, one root a bucket", 2, {"use_multi_rank_bucket_allreduce": False}),
    ("3", 3, {}),
]
# bytes sent, as a multiple of psi (N - 1) / N   [Rajbhandari 2020, section 7]
THEORY = {"0": 2, "1": 2, "2": 2, "2, one root a bucket": 2, "3": 3}


def rank_main(out, steps=4):
    """In each rank: train a model under each ZeRO stage, and note what DeepSpeed's communication
    log says of the later steps."""
    import deepspeed
    import deepspeed.comm as dist
    import torch

    os.environ.setdefault("LOCAL_RANK", "0")
    # shared memory between ranks of one machine: no bytes to count
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    tx = next((p for p in Path("/sys/class/net").glob("veth*/statistics/tx_bytes")), None)
    found = {}
    for name, stage, extra in STAGES:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(16)))
        psi = 4 * sum(p.numel() for p in model.parameters())
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "comms_logger": {"enabled": True, "prof_all": True, "verbose": False},
            "zero_optimization": {
                "stage": stage,
                "reduce_scatter": True,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_bucket_size": 1e6,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 1e6,
                "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": 5e5,
                **extra,
            },
        }
        engine = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), config=config
        )[0]
        for step in range(2 * steps):  # stage 3 learns the order of its layers first
            if step == steps:
                dist.barrier()
                dist.comms_logger.comms_dict.clear()
                before = int(tx.read_text()) if tx else 0
            engine.backward(engine(torch.randn(1, 512)).square().mean())
            engine.step()
        dist.barrier()
        wire = (int(tx.read_text()) - before) / steps if tx else 0
        ops = {}
        for op, sizes in dist.comms_logger.get_raw_data().items():
            for size, (count, *_) in sizes.items():
                kind = op.split(" |")[0]
                ops.setdefault(kind, [0, 0])
                ops[kind] = [ops[kind][0] + count / steps, ops[kind][1] + count * size / steps]
        found[name] = {"psi": psi, "wire": wire, "ops": ops}
        engine.destroy()
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.barrier()


def count_bytes(folder):
    """Returns what each rank counted, [{stage: {psi, wire, ops}}, ...]."""
    with Hosts() as hosts:
        hosts.launch(__file__, "--rank", folder / "bytes")
    return [json.loads((folder / f"bytes.{rank}").read_text()) for rank in (0, 1)]


def sent_by_log(ops, ranks=2):
    """Bytes that a rank sends for the collectives in DeepSpeed's log, each done as a ring, as NCCL
    does.  [Thakur 2005]

    N ranks, M bytes in the log, which notes what a rank puts in: for an all-gather its own part,
    else the whole vector.
        all_reduce       2 M (N - 1) / N
        reduce_scatter   M (N - 1) / N
        all_gather       M (N - 1)
        reduce           M (N - 1) / N: every rank but the one that collects sends M, and they take
                         turns
    """
    share = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "reduce_scatter_tensor": (ranks - 1) / ranks,
        "all_gather_into_tensor": ranks - 1,
        "all_gather": ranks - 1,
        "reduce": (ranks - 1) / ranks,
        "barrier": 0,
    }
    return sum(size * share[name] for name, (count, size) in ops.items())


def main(what=("losses", "bytes")):
    with tempfile.TemporaryDirectory() as folder:
        if "losses" in what:
            two, one, where = losses(Path(folder))
            print(
                f"sft.py, ZeRO-3, loss of each step\n  two hosts ({where}): {two}\n"
                f"  one host, two ranks: {one}\n"
                f"  largest difference: {max(abs(a - b) for a, b in zip(two, one)):.1e}"
            )
        if "bytes" in what:
            print(
                f"{'ZeRO stage':24}{'theory':>8}{'log':>8}{'wire':>8}   "
                "bytes a rank sends per step / bytes of the weights; calls in the log"
            )
            for name, f in count_bytes(Path(folder))[0].items():
                calls = ", ".join(
                    f"{count:g} {op}" for op, (count, size) in f["ops"].items() if size
                )
                print(
                    f"{name:24}{THEORY[name] / 2:8.2f}{sent_by_log(f['ops']) / f['psi']:8.2f}"
                    f"{f['wire'] / f['psi']:8.2f}   {calls}"
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2])
    else:
        main(sys.argv[1:] or ("losses", "bytes"))
