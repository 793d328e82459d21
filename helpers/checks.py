"""What PPO checks on the real models while it trains: numbers that only a mistake moves."""

import itertools

import torch

import common
from helpers import metrics
from machinery.base import ranks
from machinery.models import forwards

LONGEST = 32  # tokens of a response that are decoded once more
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}  # 0.0 was seen with fp32 and bf16 on CPUs
# A token is off if its log-probs of sampling and of scoring differ by more than OFF. SHARE_OFF of
# the tokens may be. With a cache, sums are made in another order: docs/ppo.md has figures.
OFF = {"fp32": 1e-3, "bf16": 0.2, "fp16": 0.05}
SHARE_OFF = {"fp32": 0.005, "bf16": 0.05, "fp16": 0.05}
TRIED_AGAIN = 256  # tokens of a rank's longest responses, at least, are decoded once more
COARSE = 0.25  # a model that is off by itself in a larger share of tokens has no working cache
STORED = "ref_logprobs", "scores", "old_values", "old_logprobs", "entropy"  # before the update
PATIENCE = 10  # steps in a row: a few groups may be equal by chance


@torch.no_grad()
def stop_unless_rollout_is_finite(run, micro_batches):
    """Stops the run if anything that was stored for the update is NaN or infinite."""
    # tokens: sampled_logprobs, and what a sampler of yours adds
    each = [{**vars(batch), **batch.tokens} for batch in micro_batches]
    names = [name for name in (*STORED, *micro_batches[0].tokens) if each[0][name] is not None]
    sums = {name: sum(stored[name].sum() for stored in each) for name in names}
    totals = dict(zip(sums, ranks.all_sum(*sums.values()).tolist()))
    run.stop_unless_finite(totals, micro_batches)


def stop_unless_one(run, minibatch):
    """Stops the run if the ratio was not 1 in a rollout's first update, before any weight moved.

    The weights, the tokens and the function are the same, so only a mistake can move it.
    approx_kl (k3) is then below the square of the ratio's distance from 1.
    """
    off = [(batch.ratio - 1).abs() * batch.response_mask for batch in minibatch]
    found = [numbers.max().nan_to_num(nan=float("inf")).item() for numbers in off]
    worst, dtype = max([0.0, *ranks.all_gather_objects(found)]), run.args.dtype
    if worst > TOLERANCE[dtype]:
        ranks.say(
            f"error: step {run.step}: before the first update the ratio is off by {worst:.4g} "
            f"(allowed with {dtype}: {TOLERANCE[dtype]}).\n  Likely: dropout in the actor "
            "(--actor_dropout 0), a mask or temperature in one forward only,\n"
            "  or a nondeterministic kernel."
        )
        run.finish(code=1)


@torch.no_grad()
def stop_unless_sampled_as_scored(run, micro_batches):
    """Stops the run if scoring gives sampled tokens other log-probs than sampling did.

    Sampling used a cache, one token at a time; scoring is one forward over the whole row. Rounding
    alone moves few tokens by more than OFF; a wrong cache, mask, position or temperature moves
    many. So the tokens that are off are counted, on each rank and on all together. If there are too
    many, the model is compared with itself, without our code: one whose 16 bits round as much may
    go on.
    """
    args, engine = run.args, run.engine
    batches = [batch for batch in micro_batches if "sampled_logprobs" in batch.tokens]
    gaps = [metrics.token_gaps(batch)[batch.response_mask > 0] for batch in batches]  # (n,) each
    counts = counts_off(args, gaps)
    if not any(too_many(args, *of_rank) for of_rank in counts):
        return
    responses = [response for batch in batches for response in batch.responses]
    responses.sort(key=lambda response: -len(response["response_ids"]))  # the longest first
    lengths = [min(LONGEST, len(response["response_ids"])) for response in responses]
    many = 1 + sum(total < TRIED_AGAIN for total in itertools.accumulate(lengths))
    many, tried = map(max, zip(*ranks.all_gather_objects([(many, lengths[0])])))
    own = [gaps_of_own_cache(args, engine, response, tried) for response in responses[:many]]
    (off, count), (own_off, own_count) = counts[-1], counts_off(args, own)[-1]
    noise = own_off / own_count
    coarse = args.dtype != "fp32" and noise <= COARSE and off <= 3 * noise * count
    goes_on = coarse or args.allow_mismatch
    ranks.say(
        f"{'warning' if goes_on else 'error'}: step {run.step}: for {off:,} of {count:,} sampled "
        f"tokens scoring gives another log-prob than sampling, by more than {OFF[args.dtype]} "
        f"(allowed: {SHARE_OFF[args.dtype]:.1%}; the {engine.module.config.model_type} model with "
        f"its own cache: {noise:.1%}).\n  Likely: a cache, mask, position or temperature that is "
        "wrong for this model, or a dtype too coarse for it.\n  Try --dtype fp32. "
        "--allow_mismatch 1 goes on."
    )
    if not goes_on:
        run.finish(code=1)


def counts_off(args, gaps):
    """Returns pairs, how many gaps exceed OFF and how many there are: of each rank, and of all."""
    off = sum((gap > OFF[args.dtype]).sum().item() for gap in gaps)
    of_ranks = ranks.all_gather_objects([(off, sum(len(gap) for gap in gaps))])
    return [*of_ranks, tuple(map(sum, zip(*of_ranks)))]


def too_many(args, off, count):
    """Returns whether more tokens are off than SHARE_OFF, and chance: three deviations and one."""
    allowed = SHARE_OFF[args.dtype] * count
    return off > allowed + 3 * allowed**0.5 + 1


def gaps_of_own_cache(args, engine, response, tried):
    """How far the log-probs of one plain forward are from those with the model's own cache.

    response: a dict with prompt_ids and response_ids. Returns (n,), of its first `tried` tokens at
    most. Every rank makes the same number of forwards.
    """
    start = len(response["prompt_ids"])
    ids = [*response["prompt_ids"], *response["response_ids"], *[0] * tried]
    ids = torch.tensor([ids[: start + tried]], device=ranks.device())  # (1, P + tried)
    last = forwards.accepted(engine, logits_to_keep=tried + 1)
    whole = engine(ids, **last).logits[0, -tried - 1 : -1]  # (tried, V)
    given, past, single = ids[:, :start], {}, []
    for next_token in ids[0, start:]:
        out = engine(given, use_cache=True, **past)
        single.append(out.logits[0, -1])
        # What came out that can go in again is the cache, whatever the model calls it.
        given, past = next_token.view(1, 1), forwards.accepted(engine, **out)
    whole, single = (
        common.TokenLogprobs.apply(logits, ids[0, start:], args.temperature)
        for logits in (whole, torch.stack(single))
    )
    return (whole - single).abs()[: len(response["response_ids"])]


def warn_of_scores(run, state, logged):
    """Says in the first step how many scores --clip_reward changes: a function's may be above it.

    Also names, in the first step or after PATIENCE of them, the step since which scores are equal:
    all of them, or where responses are compared, those to each prompt. state: what checkpoints
    keep; logged: the metrics of the step, on all ranks.
    """
    if run.step == 1 and (share := logged["clip_reward_fraction"]):
        ranks.say(f"warning: --clip_reward changes {share:.0%} of the rewards")
    equal = logged.get("equal_groups", logged["reward_std"] <= metrics.EQUAL) == 1
    since = state["equal_since"] = (state["equal_since"] or run.step) if equal else None
    if equal and run.step - since == (0 if since == 1 else PATIENCE - 1):
        of = " of the responses to a prompt" * run.args.compares_groups
        what = f"all rewards{of} are equal (mean {logged['reward']:.4g})"
        ranks.say(f"warning: since step {since} {what}: nothing to learn from")
