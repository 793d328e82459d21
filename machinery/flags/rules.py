"""The rules that flags keep: a table of (name, when it is broken, what to say of it).

A rule stands here if breaking it would be silently wrong, or an error from deep inside a library
after minutes. The words are filled in with the values of the flags. `declaring.parse` checks
COMMON, `ppo_flags.resolve` SAMPLING and PPO.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

from deepspeed.accelerator import get_accelerator

from machinery.base import ranks
from machinery.base.refused import Refused
from machinery.engine.old_deepspeed import older_than


class Rule(NamedTuple):
    """broken(args) is true where the rule is broken."""

    name: str
    broken: Callable
    words: str


def first_broken(args, table):
    """Returns the first Rule of the table that the flags break, or None."""
    return next((rule for rule in table if rule.broken(args)), None)


def check(args, table):
    """Raises Refused if the flags break a rule of the table."""
    if rule := first_broken(args, table):
        raise Refused(rule.name, rule.words.format(**vars(args)))


def warn(args, table):
    """Prints a warning for each rule of the table that the flags break."""
    for rule in table:
        if rule.broken(args):
            ranks.say(f"warning: {rule.words.format(**vars(args))}")


# ---- What the rules ask for ----
def on_cpu():
    """Returns whether the models train on CPUs."""
    return get_accelerator().device_name() == "cpu"


def rank_count():
    """Returns the number of ranks that the launcher starts."""
    return int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1)))


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


def has_unusable_name(args):
    """Returns whether a flag names what no file system holds: no UTF-8, or a part too long."""
    for flag in args.declared.names:
        value = getattr(args, flag)
        for text in value if isinstance(value, list) else [value or ""]:
            raw = text.encode(errors="surrogateescape")
            as_utf8 = text.encode(errors="ignore")
            if raw != as_utf8 or len(raw) > 4095 or max(map(len, raw.split(b"/"))) > 255:
                return True
    return False


def is_given(args, *names):
    """Returns whether one of these flags is on the command line."""
    return bool(args.declared.given & set(names))


# ---- All scripts ----
COMMON = [
    Rule(
        "unusable-name",
        has_unusable_name,
        "a name that a flag gives is no UTF-8, or longer than 255 bytes.\n  Rename it.",
    ),
    Rule(
        "empty-split",
        lambda args: not any(args.data_split),
        "--data_split gives no step any rows.\n  One of its numbers must be above 0.",
    ),
    Rule(
        "fp16-on-cpu",
        lambda args: on_cpu() and args.dtype == "fp16",
        "--dtype fp16 needs a GPU: CPUs have no fast kernels for it.\n  Use bf16 or fp32.",
    ),
    Rule(
        "deepcompile-on-cpu",
        lambda args: on_cpu() and args.deepcompile,
        "--deepcompile needs a GPU: its passes are written in CUDA.\n  Leave it out.",
    ),
    Rule(
        "deepcompile-stage-0",
        lambda args: args.deepcompile and 0 in stages(args),
        "--deepcompile works on ZeRO's communication, and --zero_stage 0 has none.\n"
        "  Use --zero_stage 1, 2 or 3.",
    ),
    Rule(
        "offload-stage",
        lambda args: args.offload and 3 not in stages(args),
        "--offload moves sharded weights, and --zero_stage {zero_stage} has none.\n"
        "  Use --zero_stage 3, or --adam_offload for optimizer states.",
    ),
    Rule(
        "adam-offload-stage-0",
        lambda args: args.adam_offload and 0 in stages(args),
        "--adam_offload moves sharded optimizer states.\n  Use --zero_stage 1, 2 or 3.",
    ),
    Rule(  # 0.18.5 gave a gradient norm of 8.7 for 6.1
        "adam-offload-old-deepspeed",
        lambda args: (
            args.adam_offload
            and args.dtype == "bf16"
            and 1 in stages(args)
            and older_than("0.19")
        ),
        "--adam_offload with --zero_stage 1 in bf16 needs DeepSpeed 0.19: before, its gradients "
        "are wrong.\n  Upgrade, or take --zero_stage 2.",
    ),
    Rule(
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
    Rule(
        "tensor-parallel-old-deepspeed",
        lambda args: splits(args) and older_than("0.16.4"),
        "--tensor_parallel_size {tensor_parallel_size} needs DeepSpeed 0.16.4.\n"
        "  Upgrade, or leave it out.",
    ),
    Rule(
        "tensor-parallel-stage-3-old-deepspeed",
        lambda args: splits(args) and 3 in stages(args) and older_than("0.19"),
        "--tensor_parallel_size {tensor_parallel_size} with --zero_stage 3 needs DeepSpeed 0.19.\n"
        "  Upgrade, or take --zero_stage 2.",
    ),
    Rule(
        "tensor-parallel-dtype",
        lambda args: splits(args) and args.dtype != "bf16",
        "--tensor_parallel_size {tensor_parallel_size} works in bf16 only, not in {dtype}.\n"
        "  Take --dtype bf16, or leave it out.",
    ),
    Rule(
        "tensor-parallel-ranks",
        lambda args: rank_count() % args.tensor_parallel_size,
        "--tensor_parallel_size {tensor_parallel_size} must divide the number of ranks.\n"
        "  Start as many ranks, or a multiple.",
    ),
    Rule(
        "tensor-parallel-lora",
        lambda args: splits(args) and has_lora(args),
        "--tensor_parallel_size {tensor_parallel_size} and LoRA do not go together.\n  Leave it "
        "out, or take --lora_dim 0 (PPO: --actor_lora_dim 0 --critic_lora_dim 0).",
    ),
]
WARNINGS = [
    Rule(
        "other-zero-stage",
        lambda args: stages(args) != {args.declared.preset.get("zero_stage", args.zero_stage)},
        "the ZeRO stage is not that of the preset {preset}. A lower one runs out of memory sooner, "
        "a higher one communicates more.",
    ),
]

# ---- PPO ----
SAMPLING = [
    Rule(
        "empty-stop",
        lambda args: not all(args.stop),
        '--stop "": an empty text ends every response at once.\n  Leave it out.',
    ),
    Rule(
        "min-new-tokens",
        lambda args: args.min_new_tokens >= args.max_answer_seq_len,
        "--min_new_tokens {min_new_tokens} must be below --max_answer_seq_len "
        "{max_answer_seq_len}, else EOS never comes.",
    ),
]
ADVICE = "Use --gradient_accumulation_steps for a larger batch; --allow_unstable 1 lifts this."
PPO = [
    Rule(
        "training-batch-divides",
        lambda args: (
            args.per_device_generation_batch_size
            * args.generation_batches
            % args.per_device_training_batch_size
        ),
        "--per_device_training_batch_size {per_device_training_batch_size} must divide "
        "--per_device_generation_batch_size {per_device_generation_batch_size} x "
        "--generation_batches {generation_batches}.",
    ),
    Rule(
        "samples-divide",
        lambda args: args.per_device_generation_batch_size % args.samples_per_prompt,
        "--samples_per_prompt {samples_per_prompt} must divide "
        "--per_device_generation_batch_size {per_device_generation_batch_size}.",
    ),
    Rule(
        "group-of-one",
        lambda args: args.compares_groups and args.samples_per_prompt < 2,
        "--advantage {advantage} compares the responses to a prompt, and --samples_per_prompt is "
        "{samples_per_prompt}.\n  Use 4, for example.",
    ),
    # DeepSpeed-Chat reports divergence where one of the next three is broken, and leaves open why.
    # While they hold, the weights that train are those that sampled: the ratio is 1, clipping never
    # acts, and this is a policy gradient with a baseline. labs/stability.md tries them.
    Rule(
        "unequal-batches",
        lambda args: (
            not args.allow_unstable
            and args.per_device_generation_batch_size != args.per_device_training_batch_size
        ),
        "--per_device_generation_batch_size {per_device_generation_batch_size} and "
        "--per_device_training_batch_size {per_device_training_batch_size} differ: DeepSpeed-Chat "
        f"reports divergence with unequal sizes.\n  Set both to the same number. {ADVICE}",
    ),
    Rule(
        "several-epochs",
        lambda args: not args.allow_unstable and args.ppo_epochs != 1,
        "--ppo_epochs {ppo_epochs} must be 1: DeepSpeed-Chat reports divergence otherwise.\n"
        f"  {ADVICE}",
    ),
    Rule(
        "several-generation-batches",
        lambda args: not args.allow_unstable and args.generation_batches != 1,
        "--generation_batches {generation_batches} must be 1: DeepSpeed-Chat reports divergence "
        f"otherwise.\n  {ADVICE}",
    ),
    Rule(
        "k1-in-loss",
        lambda args: args.kl_in == "loss" and args.kl_estimator == "k1",
        "--kl_in loss --kl_estimator k1: k1's expected gradient is 0.\n  Take k2 or k3.",
    ),
    Rule(
        "kl-target-without-kl",
        lambda args: args.kl_target is not None and args.kl_target * args.kl_coef <= 0,
        "--kl_target {kl_target}: it and --kl_coef must be above 0.",
    ),
    Rule(
        "normalize-function",
        lambda args: args.normalize_reward and args.reward_fn,
        "--normalize_reward with --reward_fn: reward.py's statistics are the reward model's.",
    ),
    Rule(
        "normalize-several",
        lambda args: args.normalize_reward and len(args.reward_model_name_or_path) > 1,
        "--normalize_reward scales one reward model's scores, not several's.",
    ),
    Rule(
        "clip-high",
        lambda args: args.clip_high is not None and args.clip_high < args.clip,
        "--clip_high {clip_high} must be --clip {clip} or more.",
    ),
    Rule(
        "warmup-without-critic",
        lambda args: args.critic_warmup_steps and not args.has_critic,
        "--critic_warmup_steps {critic_warmup_steps}: --advantage {advantage} has no critic; gae "
        "has.",
    ),
    Rule(
        "eval-ema-without-ema",
        lambda args: args.eval_ema and not args.enable_ema,
        "--eval_ema 1: there is no average to evaluate without --enable_ema 1.",
    ),
    Rule(
        "deepcompile-in-ppo",
        lambda args: args.deepcompile,
        "--deepcompile: DeepSpeed keeps one compilation for the whole process, and actor and "
        "critic need two.\n  Leave it out of ppo.py; sft.py and reward.py take it.",
    ),
    Rule(
        "compile-decoding-shards",
        lambda args: args.compile_decoding and (args.actor_zero_stage == 3 or splits(args)),
        "--compile_decoding needs the whole actor on each device, at one place: no ZeRO stage 3, "
        "no tensor parallelism.",
    ),
    Rule(
        "state-offload-old-deepspeed",
        lambda args: args.offload_states and stages(args) != {3} and older_than("0.17.6"),
        "--offload_states with this DeepSpeed needs --zero_stage 3.\n"
        "  Upgrade, or take --zero_stage 3.",
    ),
    Rule(
        "state-offload-stage",
        lambda args: (
            args.offload_states
            and (0 in stages(args) or (1 in stages(args) and args.dtype == "bf16"))
        ),
        "--offload_states: DeepSpeed cannot move the states of stage 0, nor in bf16 of stage 1.\n"
        "  Use --zero_stage 2 or 3.",
    ),
    Rule(
        "state-offload-with-offload",
        lambda args: args.offload_states and args.offload,
        "--offload_states: DeepSpeed cannot move the states with --offload.\n  Leave one out.",
    ),
    Rule(
        "tensor-parallel-ppo-old-deepspeed",
        lambda args: splits(args) and older_than("0.19"),
        "--tensor_parallel_size {tensor_parallel_size}: PPO needs DeepSpeed 0.19, as 0.18.5 finds "
        "the responses of its ranks inconsistent.\n  Upgrade, or leave it out.",
    ),
]
PPO_WARNINGS = [
    Rule(
        "stale",
        lambda args: args.allow_unstable,
        "--allow_unstable: with several updates on a rollout its log-probs go stale. Watch "
        "ratio_max, clip_fraction, approx_kl; --target_kl.",
    ),
    Rule(
        "weak-kl",
        lambda args: args.kl_in == "reward" and args.kl_estimator != "k1",
        "--kl_estimator {kl_estimator} in the reward: near the reference its expected gradient\n"
        "  vanishes, so it hardly holds the actor back. Take k1, or --kl_in loss (docs/ppo.md).",
    ),
    Rule(
        "no-critic",
        lambda args: (
            not args.has_critic
            and is_given(args, "lam", "clip_value", "critic_learning_rate", "critic_lora_dim")
        ),
        "--advantage {advantage} has no critic: --lam, --clip_value, --critic_... do not act.",
    ),
    Rule(
        "no-discount",
        lambda args: args.compares_groups and is_given(args, "gamma"),
        "--gamma does not act with --advantage {advantage}.",
    ),
]
