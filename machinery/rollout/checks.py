"""What PPO checks in its first step, on the real models: numbers that only a mistake moves."""

from machinery.base import ranks
from machinery.rollout import rollout_metrics

TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}  # 0.0 was seen with fp32 and bf16 on CPUs
# Of a response's mean: with a cache sums are made in another order than in one forward.
SAMPLING_TOLERANCE = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
EQUAL = 1e-6  # rewards that differ by less are equal
PATIENCE = 10  # steps in a row: a few groups may be equal by chance


def stop_unless_one(run, ratio, mask):
    """Stops the run if the ratio is not 1 before a rollout's first update.

    The weights, the tokens and the function are the same, so only a mistake can move it.
    approx_kl (k3) is then below the square of this difference. ratio, mask: (B, R).
    """
    stop_if_above(
        run,
        [(ratio.detach() - 1).abs() * mask],
        TOLERANCE,
        "before the first update the ratio is off by",
        "Likely: dropout in the actor (--actor_dropout 0), a mask or temperature in one forward "
        "only,\n  or a nondeterministic kernel.",
    )


def stop_unless_sampled_as_scored(run, micro_batches):
    """Stops the run if scoring gives sampled tokens other log-probs than sampling did.

    Sampling used a cache, one token at a time; scoring is one forward over the whole row. Where
    they differ by more than rounding, a cache, a mask or a position is wrong for this model.
    """
    of_responses = []
    for batch in micro_batches:
        if "sampled_logprobs" in batch.tokens:
            counts = batch.response_mask.sum(-1).clamp(min=1)  # (B,)
            of_responses.append(rollout_metrics.token_gaps(batch).sum(-1) / counts)
    stop_if_above(
        run,
        of_responses,
        SAMPLING_TOLERANCE,
        "the log-probs of sampling and of scoring differ, on average over a response, by",
        f"A {run.engine.module.config.model_type} model is not decoded as it is scored. Take "
        "another, or --compile_decoding 0; for your own sampler --is_cap.",
    )


def warn_of_equal_rewards(run, state, metrics):
    """Names, in the first step or after PATIENCE of them, the step since which rewards are equal.

    All of them, or where responses are compared, those to each prompt. state: what checkpoints
    keep; metrics: of the step, on all ranks.
    """
    equal = metrics.get("equal_groups", metrics["reward_std"] <= EQUAL) == 1
    since = state["equal_since"] = (state["equal_since"] or run.step) if equal else None
    if equal and run.step - since == (0 if since == 1 else PATIENCE - 1):
        of = " of the responses to a prompt" * run.args.compares_groups
        what = f"all rewards{of} are equal (mean {metrics['reward']:.4g})"
        ranks.say(f"warning: since step {since} {what}: nothing to learn from")


def stop_if_above(run, found, tolerance, what, advice):
    """Stops the run if the largest number of all ranks is above its dtype's tolerance, or NaN.

    found: this rank's, a list of tensors.
    """
    found = [numbers.max().nan_to_num(nan=float("inf")).item() for numbers in found]
    worst, dtype = max([0.0, *ranks.all_gather_objects(found)]), run.args.dtype
    if worst > tolerance[dtype]:
        allowed = f"(allowed with {dtype}: {tolerance[dtype]})"
        ranks.say(f"error: step {run.step}: {what} {worst:.4g} {allowed}.\n  {advice}")
        run.finish(code=1)
