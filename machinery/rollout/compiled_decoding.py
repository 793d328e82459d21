"""Decoding with a static cache (--compile_decoding): the steps of all tokens have the same shapes.

So transformers can compile one step and, on CUDA, replay it as one graph. `new_cache` and
`next_logits` take the place of decoding.new_cache and ppo.next_logits. Rows stay to the end, and
each prompt is computed for itself.
"""

import torch
from torch import nn
from transformers.cache_utils import StaticCache

import common
from machinery.base.refused import Refused
from machinery.models import forwards
from machinery.rollout import decoding

PROMPT_SLOTS = 64  # prompts are padded to a multiple of this: few shapes, so few compilations


def new_cache(model, ids, mask, count):
    """Returns a decoding.Cache of all rows, (B, P), with transformers' StaticCache in it."""
    B, P = ids.shape
    mask = nn.functional.pad(mask, (-P % PROMPT_SLOTS, 0))
    mask = torch.cat([mask, mask.new_ones(B, count)], 1)  # the causal mask hides slots to come
    rows = torch.arange(B, device=ids.device)
    past = empty_static_cache(model, mask.shape)
    return decoding.Cache(past, mask, common.position_ids(mask), rows, rows, selectable=False)


def next_logits(model, inputs, cache):
    """Logits (B, V) of the token that follows, as ppo.next_logits returns them.

    Compiled on an accelerator from the second token on; on a CPU the same steps run as they are.
    """
    forward = model
    if cache.length == 0:  # the prompts
        inputs = nn.functional.pad(inputs, (-inputs.shape[1] % PROMPT_SLOTS, 0))
    elif model.device.type != "cpu":
        forward = model.get_compiled_call(None)
    start, end = cache.length, cache.length + inputs.shape[1]
    options = {
        "attention_mask": cache.mask,
        "past_key_values": cache.past,
        "use_cache": True,
        **forwards.accepted(
            model,
            position_ids=cache.positions[:, start:end].contiguous(),
            logits_to_keep=1,
        ),
    }
    given = model.prepare_inputs_for_generation(inputs, **options)
    cache.length = end
    return forward(**given).logits[:, -1].clone()  # the next replay writes to the same memory


def empty_static_cache(model, shape):
    """Returns the model's StaticCache for mask (B, slots), empty.

    It stays with the model, because a compiled graph is bound to its memory.
    """
    kept = getattr(model, "static_cache", None)
    if kept is None or kept[0] != shape:
        cache = StaticCache(config=model.config, max_cache_len=shape[1])
        if not cache.is_compileable:
            words = "--compile_decoding: transformers has no static cache for this model's layers."
            raise Refused("compile-decoding-layers", f"{words}\n  Leave it out.")
        model.static_cache = shape, cache
    cache = model.static_cache[1]
    cache.reset()
    return cache
