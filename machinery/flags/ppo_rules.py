"""The rules that ppo.py's flags must keep: each yields, in words, what is broken."""

import itertools
import math

import deepspeed

from machinery.base import ranks
from machinery.engine import old_deepspeed
from machinery.flags import declaring, refusals


def refusal(args):
    """Returns why ppo.py cannot run with these resolved flags; None if it can."""
    return refusals.refusal(args) or broken_constraint(args)


def broken_constraint(args):
    """Returns the first of PPO's own rules that the flags break, or None."""
    stability = () if args.allow_unstable else stability_rules(args)
    rules = batch_rules, option_rules, sampling_rules, engine_rules
    return next(itertools.chain(*(rule(args) for rule in rules), stability), None)


def batch_rules(args):
    """Sizes must divide each other."""
    generation = args.per_device_generation_batch_size
    training = args.per_device_training_batch_size
    group = args.samples_per_prompt
    count = args.generation_batches
    if (generation * count) % training:
        responses = f"{generation} x {count} responses of each accumulation step"
        rule = f"must divide the {responses}.\n  Use {math.gcd(generation, training)}"
        yield f"--per_device_training_batch_size {training} {rule}, for example."
    if generation % group or (args.compares_groups and group < 2):
        rule = f"must divide --per_device_generation_batch_size {generation}"
        two = f"2 or more if --advantage ({args.advantage}) compares the responses to a prompt"
        yield f"--samples_per_prompt {group} {rule}, and be {two}.\n  Use 4, for example."


def option_rules(args):
    """Options must be able to act as they are given."""
    if args.kl_in == "loss" and args.kl_estimator == "k1":
        yield "--kl_in loss --kl_estimator k1: k1's expected gradient is 0: take k2 or k3."
    if args.normalize_reward and args.reward_fn:
        yield "--normalize_reward with --reward_fn: reward.py's statistics are the reward model's."
    if args.normalize_reward and len(args.reward_model_name_or_path) > 1:
        yield "--normalize_reward scales one reward model's scores, not several's."
    if 0 < args.dual_clip <= 1:
        yield f"--dual_clip {args.dual_clip}: it acts only when above 1; 3 is usual."
    if args.clip_high is not None and args.clip_high < args.clip:
        yield f"--clip_high {args.clip_high}: it must be --clip {args.clip} or more."
    if args.critic_warmup_steps and not args.has_critic:
        warmup = f"--critic_warmup_steps {args.critic_warmup_steps}"
        yield f"{warmup}: --advantage {args.advantage} has no critic; gae has."
    if args.eval_ema and not args.enable_ema:
        yield "--eval_ema 1: there is no average to evaluate without --enable_ema 1."
    if args.kl_target is not None and args.kl_target * args.kl_coef <= 0:
        yield f"--kl_target {args.kl_target}: it and --kl_coef must be above 0."


def sampling_rules(args):
    """A response must be able to end, and not at once."""
    if not all(args.stop):
        yield '--stop "": an empty text ends every response at once. Leave it out.'
    if args.min_new_tokens >= args.max_answer_seq_len:
        rule = f"must be below --max_answer_seq_len {args.max_answer_seq_len}, else EOS never comes"
        yield f"--min_new_tokens {args.min_new_tokens} {rule}."


def engine_rules(args):
    """DeepSpeed must be able to do it."""
    if args.deepcompile:
        why = "DeepSpeed keeps one compilation for the whole process, and actor and critic need two"
        yield f"--deepcompile: {why}.\n  Leave it out of ppo.py; sft.py and reward.py take it."
    stages = set(refusals.stages_of(args))
    moves = declaring.of_role(args, "actor").zero_stage == 3 or args.tensor_parallel_size > 1
    if args.compile_decoding and moves:
        needs = "the whole actor on each device, at one place"
        yield f"--compile_decoding needs {needs}: no ZeRO stage 3, no tensor parallelism."
    moved = args.offload_states and not args.adam_offload
    if moved and old_deepspeed.older_than("0.17.6") and stages != {3}:
        needs = f"--zero_stage 3 with DeepSpeed {deepspeed.__version__}"
        yield f"--offload_states needs {needs}; upgrade to 0.18.5 or newer."
    other_optimizer = 1 in stages and args.dtype == "bf16"
    if moved and (0 in stages or other_optimizer or args.offload):
        stuck = "--offload" if args.offload else f"--zero_stage {min(stages)} in {args.dtype}"
        why = f"DeepSpeed cannot move them with {stuck}"
        yield f"--offload_states: {why}: use --zero_stage 2 or 3, without --offload."
    if args.tensor_parallel_size > 1 and old_deepspeed.older_than("0.19"):
        why = "PPO needs DeepSpeed 0.19: 0.18.5 finds its ranks' responses inconsistent"
        yield f"--tensor_parallel_size {args.tensor_parallel_size}: {why}."


def stability_rules(args):
    """DeepSpeed-Chat reports divergence where one of these is broken, and leaves open why.

    While they hold, the weights that train are those that sampled: the ratio is 1, clipping never
    acts, and this is a policy gradient with a baseline. On the toy nothing diverges without them at
    its own rates, and at higher ones the reward model is exploited sooner (labs/stability.md). Of
    disagreements between the two passes, old log-probs of the wrong token ruin a run
    (labs/mismatch.md).
    """
    generation = args.per_device_generation_batch_size
    training = args.per_device_training_batch_size
    advice = "use --gradient_accumulation_steps for more; --allow_unstable 1 lifts this"
    if generation != training:
        yield (
            f"--per_device_generation_batch_size {generation} and "
            f"--per_device_training_batch_size {training} differ.\n"
            "  DeepSpeed-Chat reports divergence with unequal sizes.\n"
            f"  Set both to {training} (or both to {generation}), and {advice}."
        )
    for name in ("ppo_epochs", "generation_batches"):
        if (value := getattr(args, name)) != 1:
            why = "must be 1: DeepSpeed-Chat reports divergence otherwise"
            yield f"--{name} {value} {why}.\n  Leave it at 1, and {advice}."


def warn(args):
    """Warns of what DeepSpeed-Chat advises against, and of flags that do little or nothing."""
    if args.allow_unstable:
        ranks.say(
            "warning: --allow_unstable: with several updates on a rollout its log-probs go stale. "
            "Watch ratio_max, clip_fraction, approx_kl; --target_kl."
        )
    if args.kl_in == "reward" and args.kl_estimator != "k1":
        ranks.say(
            f"warning: --kl_estimator {args.kl_estimator} in the reward: near the reference its "
            "expected gradient\n  vanishes, so it hardly holds the actor back. Take k1, or --kl_in "
            "loss (docs/ppo.md)."
        )
    for name in idle_flags(args):
        ranks.say(f"warning: --{name} does not act with --advantage {args.advantage}.")


def idle_flags(args):
    """Returns the flags on the command line that mean nothing to the estimator."""
    idle = set()
    if not args.has_critic:
        idle |= {"lam", "clip_value", "critic_learning_rate"}
        idle |= {"critic_weight_decay", "critic_dropout", "critic_lora_dim"}
    if args.compares_groups:
        idle.add("gamma")
    return sorted(idle & args._given)
