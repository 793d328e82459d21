"""What a model's forward takes beside ids and a mask: models differ in it."""

import inspect
import sys

import torch

from machinery.base.modules import unwrap_model


def takes(model):
    """Returns the names of what the model's forward takes."""
    return set(inspect.signature(unwrap_model(model).forward).parameters)


def accepted(model, **options):
    """Returns those of `options` that the model's forward takes, without those that are None.

    BLOOM, for example, takes no position_ids.
    """
    known = takes(model)
    return {name: x for name, x in options.items() if name in known and x is not None}


def picks_positions(model):
    """Returns whether the model computes logits at the positions that a mask (B, T) marks.

    transformers' own do (5.23), by a function of this name, unless they are compiled.
    """
    library = vars(sys.modules[type(unwrap_model(model)).__module__])
    return "slice_logits_to_keep" in library and not getattr(model, "is_compiled", False)


def forward_options(model, mask, keep=None, last=None):
    """Returns position ids and which positions get logits, if the model takes them.

    Position ids (B, T) count real tokens, so that padding moves nothing (BLOOM takes none). keep:
    the positions, bool (B, T), or a number: the last so many. A model that cannot pick positions
    gives logits for all that are among the `last` of a row, without the very last one.
    """
    if torch.is_tensor(keep) and not picks_positions(model):
        keep = torch.arange(-last, -1, device=mask.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return accepted(model, position_ids=positions, logits_to_keep=keep)
