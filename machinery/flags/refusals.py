"""Refuses, in words, what this machine, this DeepSpeed, or two flags together cannot do."""

import importlib.util
import itertools
import math
import os
from pathlib import Path

import deepspeed
from deepspeed.accelerator import get_accelerator

from machinery.base import ranks
from machinery.engine import old_deepspeed


def refusal(args):
    """Returns why a run with these flags cannot work; None if it can."""
    stages = stages_of(args)
    rules = itertools.chain(engine_rules(args, stages), layer_rules(args, stages))
    return next(rules, None)


def stages_of(args):
    """Returns the ZeRO stages of the models that train."""
    of_roles = [value for name, value in vars(args).items() if name.endswith("_zero_stage")]
    return [args.zero_stage if stage is None else stage for stage in of_roles or [None]]


def warn_of_stages(args):
    """Warns of a ZeRO stage that is not the preset's."""
    usual = args._preset.get("zero_stage", args.zero_stage)
    if other := sorted({*stages_of(args)} - {usual}):
        ranks.say(
            f"warning: ZeRO stage {', '.join(map(str, other))}; the preset {args.preset} has "
            f"{usual}. A lower one runs out of memory sooner, a higher one communicates more."
        )


def needs_newer(what, number, instead):
    """Yields a message if the DeepSpeed that is installed is older than `number`."""
    if old_deepspeed.older_than(number):
        installed = f"{deepspeed.__version__} is installed"
        yield f"{what} needs DeepSpeed {number}, and {installed}.\n  Upgrade, or {instead}."


def cpu_has_bf16():
    """Returns whether this CPU multiplies in bf16. DeepSpeed says yes of every CPU."""
    known = Path("/proc/cpuinfo").read_text().split()
    return "avx512_bf16" in known or "amx_bf16" in known


def engine_rules(args, stages):
    """Yields what is wrong with kernels, compilation, offloading."""
    on_cpu = get_accelerator().device_name() == "cpu"
    if on_cpu and args.dtype == "fp16":
        yield "--dtype fp16 needs a GPU: CPUs have no fast kernels for it.\n  Use bf16 or fp32."
    if on_cpu and args.deepcompile:
        yield "--deepcompile needs a GPU: its passes are written in CUDA.\n  Leave it out."
    if args.deepcompile and 0 in stages:
        why = "works on ZeRO's communication, and --zero_stage 0 has none"
        yield f"--deepcompile {why}.\n  Use --zero_stage 1, 2 or 3."
    if (args.offload and 3 not in stages) or (args.adam_offload and 0 in stages):
        weights = "--offload moves sharded weights and needs --zero_stage 3"
        yield f"{weights}; --adam_offload, sharded optimizer states: 1, 2 or 3."
    if args.adam_offload and 1 in stages and args.dtype == "bf16":
        # 0.18.5 gave a gradient norm of 8.7 for 6.1
        what = "--adam_offload with --zero_stage 1 in bf16"
        yield from needs_newer(what, "0.19", "take --zero_stage 2")


def layer_rules(args, stages):
    """Yields what is wrong with LoRA and tensor parallelism."""
    adapted = any(value for name, value in vars(args).items() if name.endswith("lora_dim"))
    if adapted and not importlib.util.find_spec("peft"):
        yield "--lora_dim needs the package peft.\n  pip install peft, or take --lora_dim 0."
    if adapted and args.gradient_checkpointing and 3 in stages:
        what = "LoRA with --gradient_checkpointing and --zero_stage 3"
        yield from needs_newer(what, "0.19", "leave one of them out")
    size = args.tensor_parallel_size
    split = f"--tensor_parallel_size {size}"
    count = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1)))
    if size > 1 and args.dtype != "bf16":
        yield f"{split} works in bf16 only, not in {args.dtype}.\n  Leave it out, or --dtype bf16."
    if count % size:
        divisor = math.gcd(count, size)
        yield f"{split} must divide the number of ranks, {count}.\n  Take {divisor}."
    if size > 1 and adapted:
        whole = "--lora_dim 0 (PPO: --actor_lora_dim 0, --critic_lora_dim 0) trains all weights"
        yield f"{split} and LoRA do not go together.\n  Leave {split} out, or {whole}."
    if size > 1:
        yield from needs_newer(split, "0.16.4", "leave it out")
    if size > 1 and 3 in stages:
        yield from needs_newer(f"{split} with --zero_stage 3", "0.19", "take --zero_stage 2")
