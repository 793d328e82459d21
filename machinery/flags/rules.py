"""The rules that flags keep: a table of (name, when it is broken, what to say of it).

A rule stands here if breaking it would be silently wrong, or an error from deep inside a library
after minutes. In the words {seed} becomes "--seed 7": the flag as it was given. `declaring.parse`
checks COMMON, `ppo_flags.resolve` SAMPLING and PPO. Warnings have the same form.
"""

import os

from deepspeed.accelerator import get_accelerator

from machinery.base import ranks
from machinery.base.refused import Refused
from machinery.engine.old_deepspeed import older_than


def check(args, table):
    """Raises Refused if the flags break a rule of the table."""
    for name, words in broken(args, table):
        raise Refused(name, words)


def warn(args, table):
    """Prints a warning for each rule of the table that the flags break."""
    for _, words in broken(args, table):
        ranks.say(f"warning: {words}")


def broken(args, table):
    """Yields the name and the words of each rule of the table that the flags break."""
    shown = {
        name: f"--{name}" if value is True else f"--{name} {value}"
        for name, value in vars(args).items()
    }
    for name, is_broken, words in table:
        if is_broken(args):
            yield name, words.format(**shown)


# ---- What the rules ask for ----
def on_cpu(args):
    """Returns whether the models train on CPUs."""
    return get_accelerator().device_name() == "cpu"


def stages(args):
    """Returns the set of ZeRO stages of the models that train."""
    of_roles = [value for name, value in vars(args).items() if name.endswith("_zero_stage")]
    return {args.zero_stage if stage is None else stage for stage in of_roles or [None]}


def has_lora(args):
    """Returns whether a model trains adapters only."""
    return any(value for name, value in vars(args).items() if name.endswith("lora_dim"))


def splits(args):
    """Returns whether ranks share layers."""
    return args.tensor_parallel_size > 1


def odd_ranks(args):
    """Returns how many ranks are left over when all share layers."""
    count = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1)))
    return count % args.tensor_parallel_size


def is_stable(args):
    """Returns whether DeepSpeed-Chat's constraints hold for these flags."""
    return not args.allow_unstable


# ---- All scripts ----
COMMON = [
    (
        "empty-split",
        lambda args: not any(args.data_split),
        "--data_split: one of its numbers must be above 0.",
    ),
    (
        "fp16-on-cpu",
        lambda args: args.dtype == "fp16" and on_cpu(args),
        "--dtype fp16 needs a GPU: CPUs have no fast kernels for it.\n  Use bf16 or fp32.",
    ),
    (
        "deepcompile-on-cpu",
        lambda args: args.deepcompile and on_cpu(args),
        "--deepcompile needs a GPU: its passes are written in CUDA.",
    ),
    (
        "deepcompile-stage-0",
        lambda args: args.deepcompile and 0 in stages(args),
        "--deepcompile works on ZeRO's communication.\n  Use --zero_stage 1, 2 or 3.",
    ),
    (
        "offload-stage",
        lambda args: args.offload and 3 not in stages(args),
        "--offload moves sharded weights.\n  Use --zero_stage 3, or --adam_offload alone.",
    ),
    (
        "adam-offload-stage-0",
        lambda args: args.adam_offload and 0 in stages(args),
        "--adam_offload moves sharded optimizer states.\n  Use --zero_stage 1, 2 or 3.",
    ),
    (  # 0.18.5 gave a gradient norm of 8.7 for 6.1
        "adam-offload-old-deepspeed",
        lambda args: (
            args.adam_offload and args.dtype == "bf16" and 1 in stages(args) and older_than("0.19")
        ),
        "--adam_offload with --zero_stage 1 in bf16 needs DeepSpeed 0.19.\n"
        "  Upgrade, or use --zero_stage 2.",
    ),
    (
        "lora-checkpointing-old-deepspeed",
        lambda args: (
            has_lora(args)
            and args.gradient_checkpointing
            and 3 in stages(args)
            and older_than("0.19")
        ),
        "LoRA with --gradient_checkpointing and --zero_stage 3 needs DeepSpeed 0.19.\n"
        "  Upgrade, or leave one of them out.",
    ),
    (
        "tensor-parallel-old-deepspeed",
        lambda args: splits(args) and older_than("0.16.4"),
        "{tensor_parallel_size} needs DeepSpeed 0.16.4: upgrade.",
    ),
    (
        "tensor-parallel-stage-3-old-deepspeed",
        lambda args: splits(args) and 3 in stages(args) and older_than("0.19"),
        "{tensor_parallel_size} with --zero_stage 3 needs DeepSpeed 0.19.\n"
        "  Upgrade, or use --zero_stage 2.",
    ),
    (
        "tensor-parallel-dtype",
        lambda args: splits(args) and args.dtype != "bf16",
        "{tensor_parallel_size} works in bf16 only, not with {dtype}.",
    ),
    (
        "tensor-parallel-ranks",
        odd_ranks,
        "{tensor_parallel_size} must divide the number of ranks.",
    ),
    (
        "tensor-parallel-lora",
        lambda args: splits(args) and has_lora(args),
        "--tensor_parallel_size and LoRA do not go together.\n  Leave it out, or train all weights "
        "(--lora_dim 0; PPO: --actor_lora_dim 0 --critic_lora_dim 0).",
    ),
]
WARNINGS = [
    (
        "other-zero-stage",
        lambda args: stages(args) != {args.declared.preset.get("zero_stage", args.zero_stage)},
        "the ZeRO stage is not that of {preset}. A lower one runs out of memory sooner, "
        "a higher one communicates more.",
    ),
]

# ---- PPO ----
SAMPLING = [
    (
        "empty-stop",
        lambda args: not all(args.stop),
        '--stop "": an empty text ends every response at once.',
    ),
    (
        "min-new-tokens",
        lambda args: args.min_new_tokens >= args.max_answer_seq_len,
        "{min_new_tokens} must be below {max_answer_seq_len}, else EOS never comes.",
    ),
]
MORE = "Use --gradient_accumulation_steps for a larger batch; --allow_unstable 1 lifts this."
PPO = [
    (
        "training-batch-divides",
        lambda args: (
            args.per_device_generation_batch_size
            * args.generation_batches
            % args.per_device_training_batch_size
        ),
        "{per_device_training_batch_size} must divide the product of "
        "{per_device_generation_batch_size} and {generation_batches}.",
    ),
    (
        "samples-divide",
        lambda args: args.per_device_generation_batch_size % args.samples_per_prompt,
        "{samples_per_prompt} must divide {per_device_generation_batch_size}.",
    ),
    (
        "group-of-one",
        lambda args: args.compares_groups and args.samples_per_prompt < 2,
        "{advantage} compares the responses to a prompt.\n"
        "  Use --samples_per_prompt 4, for example.",
    ),
    # DeepSpeed-Chat reports divergence where one of the next three is broken, and leaves open why.
    # While they hold, the weights that train are those that sampled: the ratio is 1, clipping never
    # acts, and this is a policy gradient with a baseline. labs/stability.md tries them.
    (
        "unequal-batches",
        lambda args: (
            args.per_device_generation_batch_size != args.per_device_training_batch_size
            and is_stable(args)
        ),
        "{per_device_generation_batch_size} and {per_device_training_batch_size} differ: "
        f"DeepSpeed-Chat reports divergence then.\n  Set both to the same number. {MORE}",
    ),
    (
        "several-epochs",
        lambda args: args.ppo_epochs != 1 and is_stable(args),
        f"{{ppo_epochs}}: DeepSpeed-Chat reports divergence above 1.\n  {MORE}",
    ),
    (
        "several-generation-batches",
        lambda args: args.generation_batches != 1 and is_stable(args),
        f"{{generation_batches}}: DeepSpeed-Chat reports divergence above 1.\n  {MORE}",
    ),
    (
        "k1-in-loss",
        lambda args: args.kl_in == "loss" and args.kl_estimator == "k1",
        "{kl_in} {kl_estimator}: its expected gradient is 0.\n  Use k2 or k3.",
    ),
    (
        "kl-target-without-kl",
        lambda args: args.kl_target is not None and args.kl_target * args.kl_coef <= 0,
        "{kl_target} and {kl_coef} must be above 0.",
    ),
    (
        "normalize-reward",
        lambda args: (
            args.normalize_reward and (args.reward_fn or len(args.reward_model_name_or_path) > 1)
        ),
        "--normalize_reward scales the scores of one reward model, not of several, nor of "
        "--reward_fn.",
    ),
    (
        "warmup-without-critic",
        lambda args: args.critic_warmup_steps and not args.has_critic,
        "--critic_warmup_steps: {advantage} has no critic; gae has.",
    ),
    (
        "eval-ema-without-ema",
        lambda args: args.eval_ema and not args.enable_ema,
        "--eval_ema 1 needs --enable_ema 1.",
    ),
    (
        "deepcompile-in-ppo",
        lambda args: args.deepcompile,
        "--deepcompile: DeepSpeed keeps one compilation for the whole process, and actor and "
        "critic need two.\n  sft.py and reward.py take it.",
    ),
    (
        "compile-decoding-shards",
        lambda args: args.compile_decoding and (args.actor_zero_stage == 3 or splits(args)),
        "--compile_decoding needs the whole actor on each device: no ZeRO stage 3, no tensor "
        "parallelism.",
    ),
    (
        "state-offload-old-deepspeed",
        lambda args: args.offload_states and stages(args) != {3} and older_than("0.17.6"),
        "--offload_states with this DeepSpeed needs --zero_stage 3.\n  Upgrade, or use it.",
    ),
    (
        "state-offload",
        lambda args: (
            args.offload_states
            and (args.offload or 0 in stages(args) or (args.dtype == "bf16" and 1 in stages(args)))
        ),
        "--offload_states: DeepSpeed can move the states of --zero_stage 2 and 3 (in fp32 of 1), "
        "without --offload.",
    ),
    (
        "tensor-parallel-ppo-old-deepspeed",
        lambda args: splits(args) and older_than("0.19"),
        "--tensor_parallel_size in PPO needs DeepSpeed 0.19: 0.18.5 finds the responses of its "
        "ranks inconsistent.",
    ),
]
PPO_WARNINGS = [
    (
        "stale",
        lambda args: args.allow_unstable,
        "--allow_unstable: with several updates on a rollout its log-probs go stale. Watch "
        "ratio_max, clip_fraction, approx_kl; --target_kl.",
    ),
    (
        "weak-kl",
        lambda args: args.kl_in == "reward" and args.kl_estimator != "k1",
        "{kl_estimator} in the reward hardly holds the actor back: near the "
        "reference its expected gradient vanishes. Use k1, or --kl_in loss (docs/ppo.md).",
    ),
]
