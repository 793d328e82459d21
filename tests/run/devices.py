"""What test_18_devices.py looks at: many ranks, and what two cores can show of a GPU's mistakes.

One Python imports torch, DeepSpeed and our scripts once. Then it forks the ranks of each group, one
group after the other: a rank starts in a second, so that even eight of them are cheap. Each rank
does the jobs of its group in order and leaves facts/<group>-<job>-<rank>.json. By hand:

    OMP_NUM_THREADS=1 python tests/devices.py FOLDER detail bare
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import workers

IDS = torch.arange(2, 20).view(2, 9)
MUON = "deepspeed.runtime.zero.muon.muon_optimizer"
TIMEOUT = 600  # seconds of a group
TINY = {
    "reduce_bucket_size": 600,  # a matrix has 1,024 to 16,896 weights
    "allgather_bucket_size": 700,
    "stage3_prefetch_bucket_size": 800,
    "stage3_max_reuse_distance": 900,
    "stage3_max_live_parameters": 25000,  # so many that gathers run ahead, and not all fit
}


# --------------------------------------------------------------------------------------------------
# Jobs: each returns what this rank found, as JSON
# --------------------------------------------------------------------------------------------------
def knobs(base, name, **zero):
    """Writes a ds_config.json with other knobs beside the common one, and returns its path."""
    config = json.loads((base / "ds_config.json").read_text())
    config["zero_optimization"].update(zero)
    file = base / f"{name}.json"
    scratch = base / f"{name}.json.{os.getpid()}"  # all ranks write the same
    scratch.write_text(json.dumps(config))
    scratch.rename(file)
    return str(file)


def make_run(base, script, stage, config):
    """One run: three steps, of which the last leaves the third rank with filler rows only."""
    flags = ["--ds_config", knobs(base, config, **(TINY if config == "tiny" else {}))]
    flags += ["--max_steps", 2, "--eval_steps", 2]
    if script == "ppo":
        flags += ["--num_eval_prompts", 5]
    run = workers.run(script, *flags, zero=stage, rows=5, accumulation=1)
    return workers.make_run(base, f"{config}_{script}{stage}", **run)


def lost_tensors(base, stage, **zero):
    """Two steps of two micro-batches on the asynchronous accelerator; what was freed too early."""
    from tests import asynchronous

    names = {}

    def name_of(tensor):
        """The weight whose gradient (or itself) lies in this memory, else a shape."""
        place = tensor.untyped_storage()._cdata
        for name, parameter in names.items():
            for kind in ("grad", "grad_accum"):
                own = getattr(parameter, kind, None)
                if own is not None and own.untyped_storage()._cdata == place:
                    return f"{name}.{kind}"
        return str(list(tensor.shape))

    torch.manual_seed(0)
    with asynchronous.watch(name_of) as found:
        config = knobs(base, f"lost{stage}{len(zero)}", **{**TINY, **zero})
        engine = workers.tiny_engine(base, stage, options=["--ds_config", config])
        names.update(engine.module.named_parameters())
        for step in range(4):
            workers.train_one_step(engine, step)
    return sorted(found)


def sampled_after_evaluation(base):
    """An evaluation at stage 3, whose gathers run ahead; then sampling, and saving."""
    from machinery.engine import zero3
    from machinery.models import model_folders, saving

    engine = workers.tiny_engine(base, 3, options=["--ds_config", knobs(base, "tiny", **TINY)])
    tokenizer = model_folders.load_tokenizer(workers.TOKENIZER)
    ahead = []
    for step in range(2):
        workers.train_one_step(engine, step)
        with torch.no_grad():
            engine(IDS)
        ahead.append(any(p.ds_status.name == "INFLIGHT" for p in engine.module.parameters()))
        with zero3.gather_for_generation(engine) as (model, _):
            whole = [name for name, p in model.named_parameters() if p.shape != p.ds_shape]
        with torch.no_grad():
            engine(IDS)
        saving.save_model(engine, tokenizer, base / "saved_ahead")
    return {"ahead": ahead[-1], "missing": whole}


def partitions(base):
    """Stages 0 to 3 on so many ranks: what each rank holds, the value head, two steps, and the EMA.

    The model is so small that some ranks hold nothing, and others parts of two weights.
    """
    from machinery.models import model_folders
    from machinery.rollout import ema

    tokenizer, found = model_folders.load_tokenizer(workers.TOKENIZER), {}
    options = ["--ds_config", knobs(base, "few", reduce_bucket_size=6, allgather_bucket_size=6)]
    head = dict(tokenizer=tokenizer, value_head="score")
    for stage in (0, 1, 2, 3):
        engine = workers.tiny_engine(base, stage, "speck", options, **head)
        average = ema.Ema(argparse.Namespace(enable_ema=1, ema_decay=0.9), engine.module, {})
        numbers = dict(
            head=whole_numbers(engine)["model.score.weight"], held=held_by(engine, stage)
        )
        for step in range(2):
            ids = workers.rows_of_rank(step, 23)
            engine.backward(engine(ids, torch.ones_like(ids)).square().mean())
            engine.step()
            average.update(engine)
        whole = {n: average.full_tensor(n, p) for n, p in engine.module.named_parameters()}
        numbers["ema"] = {n: w.flatten().tolist() for n, w in whole.items() if w is not None}
        found[f"zero{stage}"] = {**numbers, "weights": whole_numbers(engine)}
    return found


def whole_numbers(engine):
    return {name: w.flatten().tolist() for name, w in workers.whole_weights(engine).items()}


def held_by(engine, stage):
    """This rank's share of each weight (stage 3), or of each group of weights (1, 2): [numbers that
    are weights, numbers that pad]."""
    if stage == 0:
        return []
    optimizer = engine.optimizer
    if stage == 3:
        sizes = [(p.ds_numel, p.ds_tensor.numel()) for p in engine.module.parameters()]
    else:  # in bf16 stage 1 is an optimizer of its own, with other names
        bf16 = hasattr(optimizer, "bf16_groups")
        groups = optimizer.bf16_groups if bf16 else optimizer.bit16_groups
        own = optimizer.fp32_groups_flat_partition if bf16 else None
        own = own or optimizer.single_partition_of_fp32_groups
        sizes = [(sum(p.numel() for p in ps), part.numel()) for ps, part in zip(groups, own)]
    real = [min(max(whole - engine.global_rank * own, 0), own) for whole, own in sizes]
    return [[count, own - count] for count, (_, own) in zip(real, sizes)]


class Bytes(TorchDispatchMode):
    """Adds up the bytes of all tensors that live, and keeps the largest sum."""

    def __init__(self, tensors):
        super().__init__()
        self.living, self.peak = {}, 0
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.living:
            self.living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def now(self):
        self.living = {k: v for k, v in self.living.items() if not v[0].expired()}
        return sum(size for _, size in self.living.values())

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **kwargs or {})
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.add(tensor)
        self.peak = max(self.peak, self.now())
        return out


def reduced(engine, count, found):
    """Reduces the gradients of a step, and notes how many bytes live meanwhile. Where stage 1 does
    it in chunks (in bf16), a chunk is less than the model, as DeepSpeed's 5e8 is less than a real
    one."""
    count.peak = 0
    type(engine).allreduce_gradients(engine, 2000)
    found["reduction"] = count.peak


def memory_of_rank(base, dtype, stage):
    """This rank of 64: its shares of the weights, and its bytes beside those of the estimate."""
    import common
    import sft
    from tools import estimate_memory as memory

    names = dict(zip(("reduce_bucket_size", "allgather_bucket_size"), (2000, 2000)))
    options = ["--ds_config", knobs(base, "small_buckets", **names), "--dtype", dtype]
    options += ["--model_name_or_path", f"{base}/models/actor", "--zero_stage", stage]
    args = sft.get_args([*workers.base_flags("sft", base), *map(str, options)])
    model = common.load_model(args)
    with Bytes(model.parameters()) as count:
        engine = common.train_engine(model, args, 2, 1, 10)
        found = {"held": held_by(engine, stage)}
        for _ in range(2):
            loss = -common.last_logprobs(
                engine, IDS, torch.ones_like(IDS), torch.ones(len(IDS), 8)
            ).mean()
            engine.allreduce_gradients = functools.partial(reduced, engine, count, found)
            engine.backward(loss)
            del loss
            found["before"] = count.now()
            count.peak = 0
            engine.step()
            found["update"], found["after"] = count.peak, count.now()
    one = memory.Model(args, 2)
    found["estimate"] = memory.count(args, [one], 64)["update"]
    found["weights"] = one.sizes().weights
    return found


class Counter(TorchDispatchMode):
    """Counts operators, and what makes the host wait for a device: each number that it reads."""

    WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}

    def __init__(self):
        super().__init__()
        self.operators = self.waits = 0
        self.own = {name: getattr(torch.Tensor, name) for name in ("tolist", "cpu", "numpy")}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.operators += 1
        self.waits += operator.overloadpacket.__name__ in self.WAITS
        return operator(*args, **kwargs or {})

    def __enter__(self):
        for name, function in self.own.items():
            setattr(torch.Tensor, name, self.counting(function))
        return super().__enter__()

    def __exit__(self, *error):
        for name, function in self.own.items():
            setattr(torch.Tensor, name, function)
        return super().__exit__(*error)

    def counting(self, function):
        def counted(tensor, *args, **options):
            self.waits += 1
            return function(tensor, *args, **options)

        return counted


def step_counted(base, script):
    """[operators, waits] of one more step: a run of three steps less a run of two."""
    found = []
    for steps in (2, 3):
        flags = ["--max_steps", steps, "--num_samples", 0] if script == "sft" else []
        flags = flags or ["--max_steps", steps]
        if script == "ppo":
            flags += ["--min_new_tokens", 9, "--num_eval_prompts", 1]
        run = workers.run(script, *flags, zero=2, rows=2, accumulation=2)
        with Counter() as count:
            facts = workers.make_run(base, f"count_{script}{steps}", **run)
        assert facts["code"] == 0, facts
        found.append([count.operators, count.waits])
    return [more - less for less, more in zip(*found)]


def runs(scripts, configs):
    return {
        f"{config}_{script}{stage}": functools.partial(
            make_run, script=script, stage=stage, config=config
        )
        for script in scripts
        for stage in (1, 2, 3)
        for config in configs
    }


GROUPS = {
    "detail": dict(
        ranks=3,
        environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        jobs=runs(("sft", "reward", "ppo"), ("default", "tiny")),
    ),
    "asynchronous": dict(
        ranks=3,
        jobs={
            **{
                f"shipped{stage}": functools.partial(lost_tensors, stage=stage)
                for stage in (0, 1, 2, 3)
            },
            "overlap": functools.partial(
                lost_tensors, stage=2, overlap_comm=True, reduce_bucket_size=1000
            ),
        },
    ),
    "ahead": dict(ranks=2, jobs={"sampled": sampled_after_evaluation}),
    "alone": dict(
        ranks=1,
        jobs={
            script: functools.partial(step_counted, script=script)
            for script in ("sft", "reward", "ppo")
        },
    ),
    **{
        f"fake{rank}": dict(
            ranks=1,
            rank_of_64=rank,
            jobs={
                f"{dtype}_{stage}": functools.partial(memory_of_rank, dtype=dtype, stage=stage)
                for dtype in ("fp32", "bf16")
                for stage in (1, 2)
            },
        )
        for rank in (0, 63)
    },
    "four": dict(ranks=4, jobs={"partitions": partitions}),
    "eight": dict(ranks=8, jobs={"partitions": partitions}),
}


# --------------------------------------------------------------------------------------------------
# The worker
# --------------------------------------------------------------------------------------------------
def be_rank(base, group, rank, port):
    """Meets the other ranks of the group and does its jobs."""
    options = GROUPS[group]
    os.environ.update(options.get("environment", {}))
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options["ranks"]),
        LOCAL_WORLD_SIZE=str(options["ranks"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    log = os.open(base / f"{group}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import deepspeed

    if "rank_of_64" in options:  # the other 63 are not there, and no collective does anything
        from torch.testing._internal.distributed.fake_pg import FakeStore

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        torch.distributed.init_process_group(
            "fake", rank=options["rank_of_64"], world_size=64, store=FakeStore()
        )
    deepspeed.init_distributed(verbose=False)
    for name, job in options["jobs"].items():
        began = time.time()
        file = base / f"facts/{group}-{name}-{rank}"
        try:
            found = job(base)
        except BaseException:
            file.with_suffix(".failed").write_text(traceback.format_exc())
            os._exit(1)
        file.with_suffix(".json").write_text(json.dumps(found))
        print(f"{group} {name} rank {rank}: {time.time() - began:.1f} s", flush=True)
    deepspeed.comm.barrier()
    os._exit(0)


def main():
    from deepspeed.accelerator import get_accelerator

    import common  # noqa: F401
    import ppo  # noqa: F401
    import reward  # noqa: F401
    import sft  # noqa: F401
    from machinery.run import crash, logs

    base, groups = Path(sys.argv[1]), sys.argv[2:]
    for operator in ("FusedAdamBuilder", "CPUAdamBuilder", "ShareMemCommBuilder"):
        get_accelerator().get_op_builder(operator)().load()
    for late in ("peft", "deepspeed.module_inject.auto_ep_comm", MUON):
        with contextlib.suppress(ImportError):  # seconds in each rank, if they were left to it
            importlib.import_module(late)
    crash.finish = lambda args, code=0: sys.exit(code)  # the group of ranks lives on
    logs.draw_curves = lambda args: None
    make_speck(base)
    for group in groups:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(GROUPS[group]["ranks"]):
            child = os.fork()
            if not child:
                be_rank(base, group, rank, port)
            children.append(child)
        wait_for(children, time.time() + TIMEOUT)


def make_speck(base):
    """A value model of 2 numbers wide: eight ranks cannot each have a part of each weight."""
    from transformers import LlamaConfig

    shape = dict(hidden_size=2, intermediate_size=3, num_hidden_layers=1, num_attention_heads=1)
    LlamaConfig(**shape, vocab_size=23, pad_token_id=0).save_pretrained(base / "models/speck")


def wait_for(children, deadline):
    """Waits until all have ended. If one fails, or time is over, the others are ended, too."""
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            children.remove(child)
        if (child and status) or time.time() > deadline:
            deadline = float("inf")
            time.sleep(1)  # the others may write what they have seen
            for other in children:
                os.kill(other, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
