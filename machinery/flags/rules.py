"""The rules that flags keep, each with its name, whether it is broken, and what to say then.

A rule stands here if breaking it would be silently wrong, or an error from deep inside a library
after minutes. In the words {seed} becomes "--seed 7": the flag as it was given. `declaring.parse`
checks the rules of all scripts; those of PPO alone are in ppo_rules.py.
"""

from deepspeed.accelerator import get_accelerator

from machinery.base import ranks
from machinery.base.refused import Refused
from machinery.engine.adam import lacks_nvcc
from machinery.engine.old_deepspeed import older_than


def refuse_broken(args, rules):
    """Raises Refused if the flags break one of the rules, such as `of_all`."""
    for name, broken, words in rules(args):
        if broken:
            shown = {flag: f"--{flag} {value}" for flag, value in vars(args).items()}
            raise Refused(name, words.format(**shown))


def stages_of(args, role=""):
    """Returns the set of ZeRO stages of the models that train, or of that of one role."""
    of_roles = [value for name, value in vars(args).items() if name.endswith(f"{role}_zero_stage")]
    return {args.zero_stage if stage is None else stage for stage in of_roles or [None]}


def of_all(args):
    """Yields the rules of all scripts."""
    stages = stages_of(args)
    lora = any(value for name, value in vars(args).items() if name.endswith("lora_dim"))
    split = args.tensor_parallel_size > 1  # ranks share layers

    counts = len(args.data_split), len(args.adam_betas)
    yield "how-many", counts != (3, 2), "--data_split has 3 numbers, --adam_betas 2."
    needs_gpu = args.dtype == "fp16" or args.deepcompile
    on_cpu = get_accelerator().device_name() == "cpu"
    words = "--dtype fp16 and --deepcompile need a GPU, the latter with nvcc in $CUDA_HOME/bin."
    yield "gpu-only", needs_gpu and on_cpu or args.deepcompile and lacks_nvcc(), words
    needs_zero = (args.adam_offload or args.deepcompile) and 0 in stages
    words = "--adam_offload and --deepcompile need --zero_stage 1, 2 or 3, --offload needs 3."
    yield "zero-only", needs_zero or args.offload and 3 not in stages, words
    words = "{tensor_parallel_size} must divide the ranks, and works in bf16, without --lora_dim."
    uneven = ranks.launched() % args.tensor_parallel_size
    broken = split and (lora or args.dtype != "bf16" or uneven)
    yield "tensor-parallel", broken, words
    # of the first 0.18.5 gave a gradient norm of 8.7 for 6.1
    needs_0_19 = args.adam_offload and args.dtype == "bf16" and 1 in stages
    needs_0_19 |= split or lora and args.gradient_checkpointing and 3 in stages
    words = (
        "--tensor_parallel_size, --lora_dim with --gradient_checkpointing at stage 3, and "
        "--adam_offload in bf16 at stage 1 need DeepSpeed 0.19."
    )
    yield "old-deepspeed", needs_0_19 and older_than("0.19"), words
