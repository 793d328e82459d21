"""A check on the real model when a run begins: what a row is given depends on that row alone.

A row must have the same log-probs (or values) with padding on its left, and when more tokens follow
it. Else the model ignores the mask or the position ids, or looks ahead: rows of different lengths
would train it on noise, or it would see the tokens that it has to predict.
"""

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


@torch.no_grad()
def check(args, engine, row, pad_id):
    """Raises Refused if padding, or tokens that follow, change what the model says of a row.

    row: a dict with prompt_ids and responses, as machinery/data/rows.py makes it. All ranks call
    it: two forwards of one row.
    """
    ids = [token for part in (row["prompt_ids"], *row["responses"][:1]) for token in part]
    ids = ids[-LONGEST:]
    if len(ids) < AHEAD + 4:
        return
    engine.eval()
    alone = numbers_of(engine, ids[:-AHEAD], 0, pad_id)  # (1, t)
    padded = numbers_of(engine, ids, PADDING, pad_id)[:, : alone.shape[1]]
    engine.train()
    drift = (alone - padded).abs().mean() / alone.std().clamp(min=1e-6)
    drift = max(ranks.all_gather_objects([drift.item()]))
    if not drift <= TOLERANCE[args.dtype]:
        kind = unwrap_model(engine).config.model_type
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
    layout = common.Layout(**common.last_columns(row, mask, len(ids) - 1)).to(ranks.device())
    if isinstance(engine.module, common.ValueModel):
        return common.values_before_tokens(engine, layout)
    return common.response_logprobs(engine, layout, torch.ones_like(layout.predicts))
