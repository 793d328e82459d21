"""What every script checks on the real model before it trains: padding must change no row."""

import numpy as np
import torch

import common
from machinery.base import ranks
from machinery.base.modules import unwrap_model
from machinery.base.refused import Refused

LONGEST = 32  # tokens of the row that is tried
PADDING, AHEAD = 3, 2
# Of the mean difference over the row's tokens, as a share of their standard deviation: the values
# of a new head are small. With other shapes sums are made in another order.
TOLERANCE = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}


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
    drift = (alone - padded).abs().mean() / alone.std().clamp(min=1e-6)
    drift = max(ranks.all_gather_objects([drift.nan_to_num(nan=torch.inf).item()]))
    kind = unwrap_model(engine).config.model_type
    if drift == torch.inf:
        words = f"what this {kind} model says of a row is not finite. Are its weights damaged?"
        raise Refused("not-finite-weights", f"{words}\n  Or take --dtype bf16 or fp32.")
    if drift > TOLERANCE[args.dtype]:
        raise Refused(
            "padding-changes-a-row",
            f"what a {kind} model says of a row changes with padding or tokens that follow, by "
            f"{drift:.4g} standard deviations (allowed: {TOLERANCE[args.dtype]}).\n"
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
