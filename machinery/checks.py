"""What the scripts check on the real models: numbers that only a mistake moves."""

import numpy as np
import torch

import common
from machinery import metrics, ranks
from machinery.refused import Refused
from machinery.zero3 import unwrap_model

LONGEST = 32  # tokens of the row that is tried with padding
PADDING, AHEAD = 3, 2
# Of the mean difference over the row's tokens, as a share of their standard deviation: the values
# of a new head are small. With other shapes sums are made in another order.
DRIFT = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
FIRST_RATIO = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}  # 0.0 was seen with fp32, bf16 on CPUs
# A token is off if its log-probs of sampling and of scoring differ by more than OFF. SHARE_OFF of
# the tokens may be. With a cache, sums are made in another order: docs/ppo.md has figures.
OFF = {"fp32": 1e-3, "bf16": 0.2, "fp16": 0.05}
SHARE_OFF = {"fp32": 0.005, "bf16": 0.05, "fp16": 0.05}


# ---- All scripts, before they train ----
def refuse_if_padding_matters(run, *engines):
    """Refuses the model if padding, or tokens that follow, change what it says of a row.

    A row must have the same log-probs (or values) with padding on its left, and when more tokens
    follow it. Else the model ignores the mask or the position ids, or looks ahead: rows of
    different lengths would train it on noise, or it would see the tokens that it has to predict.

    run: with args, train and tokenizer, as Run.plan leaves them. All ranks call it: two forwards of
    a row of `train`, a long one.
    """
    args, train, pad_id = run.args, run.train, run.tokenizer.pad_token_id
    row = train[int(np.argmax(train["length"][:100]))]
    ids = [token for part in (row["prompt_ids"], *row["responses"][:1]) for token in part]
    for engine in engines if len(ids) >= AHEAD + 4 else ():
        refuse_drift(args, engine, ids[-LONGEST:], pad_id)


@torch.no_grad()
def refuse_drift(args, engine, ids, pad_id):
    """Does what `refuse_if_padding_matters` says, for one engine and the tokens of one row."""
    engine.eval()
    alone = numbers_of(engine, ids[:-AHEAD], 0, pad_id)  # (1, t)
    padded = numbers_of(engine, ids, PADDING, pad_id)[:, : alone.shape[1]]
    engine.train()
    drift = ranks.largest((alone - padded).abs().mean() / alone.std().clamp(min=1e-6))
    kind = unwrap_model(engine).config.model_type
    if drift == torch.inf:
        words = f"what this {kind} model says of a row is not finite. Are its weights damaged?"
        raise Refused("not-finite-weights", f"{words}\n  Or take --dtype bf16 or fp32.")
    if drift > DRIFT[args.dtype]:
        raise Refused(
            "padding-changes-a-row",
            f"what a {kind} model says of a row changes with padding or tokens that follow, by "
            f"{drift:.4g} standard deviations (allowed: {DRIFT[args.dtype]}).\n"
            "  Take another architecture, such as OPT, Llama or Qwen.",
        )


def numbers_of(engine, ids, padding, pad_id):
    """Returns the log-probs, or the values, of all tokens of a row but the first: (1, t)."""
    row = torch.tensor([[pad_id] * padding + ids])
    mask = torch.tensor([[0] * padding + [1] * len(ids)])
    layout = common.last_columns(row, mask, len(ids) - 1).to(ranks.device())
    if isinstance(engine.module, common.ValueModel):
        return common.values_before_tokens(engine, layout)
    return common.response_logprobs(engine, layout, torch.ones_like(layout.logit_places))


# ---- PPO, in its steps ----
@torch.no_grad()
def stop_unless_rollout_is_finite(run, micro_batches):
    """Stops the run if anything that was stored for the update is NaN or infinite.

    That is each tensor of numbers in the micro-batches that is filled in by now, a fork's own
    among them, and what the sampler says of each token.
    """
    sums = {}
    for batch in micro_batches:
        for name, stored in (vars(batch) | batch.per_token).items():
            if torch.is_tensor(stored) and stored.is_floating_point():
                sums[name] = sums.get(name, 0) + stored.sum()
    totals = dict(zip(sums, ranks.all_sum(*sums.values()).tolist()))
    run.stop_unless_finite(totals)


@torch.no_grad()
def stop_unless_sampled_as_scored(run, micro_batches):
    """Stops the run if scoring gives sampled tokens other log-probs than sampling did.

    Sampling used a cache, one token at a time; scoring is one forward over the whole row. Rounding
    alone moves few tokens by more than OFF; a wrong cache, mask, position or temperature moves
    many. So the tokens that are off are counted, on each rank and on all together.
    """
    args = run.args
    batches = [batch for batch in micro_batches if "sampled_logprobs" in batch.per_token]
    gaps = [metrics.token_gaps(batch)[batch.response_mask > 0] for batch in batches]  # (n,) each
    counts = counts_off(args, gaps)
    if not any(too_many(args, *of_rank) for of_rank in counts):
        return
    off, count = counts[-1]
    ranks.say(
        f"{'warning' if args.allow_mismatch else 'error'}: step {run.step}: for {off:,} of "
        f"{count:,} sampled tokens scoring gives another log-prob than sampling, by more than "
        f"{OFF[args.dtype]} (allowed: {SHARE_OFF[args.dtype]:.1%}).\n  Likely: a cache, mask, "
        "position or temperature that is wrong for this model, or other weights that sample.\n"
        "  If the model itself is coarse in 16 bits (--dtype fp32 tells), or another policy is "
        "meant to sample, --allow_mismatch 1 goes on."
    )
    if not args.allow_mismatch:
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


def stop_unless_one(run, minibatch):
    """Stops the run if the ratio was not 1 in a rollout's first update, before any weight moved.

    The weights, the tokens and the function are the same, so only a mistake can move it.
    approx_kl (k3) is then below the square of the ratio's distance from 1.
    """
    off = [((batch.ratio - 1).abs() * batch.response_mask).max() for batch in minibatch]
    worst = ranks.largest(torch.stack(off).max())
    dtype = run.args.dtype
    if worst > FIRST_RATIO[dtype]:
        ranks.say(
            f"error: step {run.step}: before the first update the ratio is off by {worst:.4g} "
            f"(allowed with {dtype}: {FIRST_RATIO[dtype]}).\n  Likely: dropout in the actor "
            "(--actor_dropout 0), a mask or temperature in one forward only,\n"
            "  or a nondeterministic kernel."
        )
        run.finish(code=1)


def warn_of_scores(run, logged):
    """Says in the first step what of its rewards teaches nothing.

    Namely how many scores --clip_reward changes: a function's may be above it. And whether all are
    equal, or where responses are compared, those to each prompt. logged: the metrics of the step.
    """
    if run.step > 1:
        return
    if share := logged["clip_reward_fraction"]:
        ranks.say(f"warning: --clip_reward changes {share:.0%} of the rewards")
    if logged.get("equal_groups", logged["reward_std"] <= metrics.EQUAL) == 1:
        of = " of the responses to a prompt" * run.args.compares_groups
        what = f"all rewards{of} are equal (mean {logged['reward']:.4g})"
        ranks.say(f"warning: {what}: nothing to learn from")
