"""What a model's forward takes beside ids and a mask: models differ in it."""

import inspect
import sys

from machinery.base.modules import unwrap_model
from machinery.engine import patches


def accepted(model, **options):
    """Returns those of the options that the model's forward takes. (BLOOM takes no position ids.)

    A model that cannot give logits at single places takes a number of last columns, or nothing.
    What is `cache` in transformers 5.24 was `past_key_values` before.
    """
    takes = inspect.signature(unwrap_model(model).forward).parameters
    options.setdefault("past_key_values", options.get("cache"))
    return {name: value for name, value in options.items() if name in takes}


def mask_for(model, mask):
    """Returns the mask of a Layout as the model takes it: one (N, 1, T, T) as numbers to add."""
    return patches.as_numbers(mask, unwrap_model(model).dtype) if mask.dim() == 4 else mask


def picks_positions(model):
    """Returns whether the model computes logits at the positions that a mask (N, T) marks.

    transformers' own do (5.23), by `slice_logits_to_keep`, unless they are compiled.
    """
    library = vars(sys.modules[type(unwrap_model(model)).__module__])
    return "slice_logits_to_keep" in library and not getattr(model, "is_compiled", False)
