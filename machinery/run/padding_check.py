"""A check on the real model when a run begins: padding must not change what a row is given.

A row alone, and the same row with padding on its left, must have the same log-probs (or values).
Where they differ by more than rounding, the model ignores the mask or the position ids, and rows
of different lengths would train it on noise.
"""

import torch

import common
from machinery.base import ranks
from machinery.base.modules import unwrap_model
from machinery.base.refused import Refused

LONGEST = 32  # tokens of the row that is tried
PADDING = 3
# Of the mean difference over the row's tokens. With other shapes sums are made in another order.
TOLERANCE = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}


@torch.no_grad()
def check(args, engine, row, pad_id):
    """Raises Refused if padding changes the log-probs, or values, of a row. All ranks call it.

    row: a dict with prompt_ids and responses, as machinery/data/rows.py makes it.
    """
    ids = [*row["prompt_ids"], *(row["responses"] or [[]])[0]][-LONGEST:]
    if len(ids) < 2:
        return
    was_training = engine.training
    engine.eval()
    of_value_model = isinstance(engine.module, common.ValueModel)
    found = []
    for padding in (0, PADDING):
        row_ids = torch.tensor([[pad_id] * padding + ids])
        mask = torch.tensor([[0] * padding + [1] * len(ids)])
        layout = common.Layout(**common.last_columns(row_ids, mask, len(ids) - 1))
        layout = layout.to(ranks.device())
        if of_value_model:
            found.append(common.response_values(engine, layout))
        else:
            found.append(common.response_logprobs(engine, layout, torch.ones_like(layout.predicts)))
    engine.train(was_training)
    alone, padded = found
    drift = max(ranks.all_gather_objects([(alone - padded).abs().mean().item()]))
    if not drift <= TOLERANCE[args.dtype]:
        kind = unwrap_model(engine).config.model_type
        raise Refused(
            "padding-changes-a-row",
            f"a {kind} model does not honour padding on the left: it moves a row's numbers by "
            f"{drift:.4g} on average\n  (allowed with {args.dtype}: {TOLERANCE[args.dtype]}), so "
            "rows of different lengths make no batch.\n  Take another architecture, such as OPT, "
            "Llama or Qwen.",
        )
