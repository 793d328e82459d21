"""Decoding with a static cache (--compile_decoding): the steps of all tokens have the same shapes.

So transformers can compile one step and, on CUDA, replay it as one graph.
"""

import torch
from transformers.cache_utils import StaticCache

from machinery.base import progress
from machinery.models.forwards import forward_options

PROMPT_SLOTS = 64  # prompts are padded to a multiple of this: few shapes, so few compilations


def each_slot(model, tokenizer, ids, mask, responses, alive, synced):
    """Yields (r, rows, logits) for each response slot r, as decoding.leaving does.

    All rows stay to the end, and each is computed for itself: the shapes must not change. Compiled
    on an accelerator; on a CPU the same steps run as they are. Never `synced`: no stage 3.
    """
    count, width = responses.shape[1], -len(ids[0]) % PROMPT_SLOTS
    ids, mask = (torch.nn.functional.pad(x, (width, 0)) for x in (ids, mask))
    mask = torch.cat([mask, torch.ones_like(responses)], 1)  # (B, slots): the causal mask hides
    rows, prompt = torch.arange(len(ids), device=ids.device), ids.shape[1]  # slots yet to come
    options = forward_options(model, mask, keep=1)
    positions = options.pop("position_ids", None)  # (B, slots)
    options.update(past_key_values=empty_cache(model, mask.shape), attention_mask=mask)
    compiled = step_of(model)
    for r in progress.shown(range(count), "tokens of each response"):
        inputs, forward = (responses[:, r - 1, None], compiled) if r else (ids, model)
        if positions is not None:
            end = prompt + r
            options["position_ids"] = positions[:, end - inputs.shape[1] : end].contiguous()
        given = model.prepare_inputs_for_generation(inputs, use_cache=True, **options)
        logits = forward(**given).logits[:, -1, : len(tokenizer)]
        yield r, rows, logits.clone()  # the next replay writes to the same memory
        if not alive.any():
            return


def step_of(model):
    """Returns the model's forward for one token a row: on an accelerator compiled."""
    return model if model.device.type == "cpu" else model.get_compiled_call(None)


def empty_cache(model, shape):
    """Returns the model's StaticCache for mask (B, slots), empty.

    It stays with the model, because a compiled graph is bound to its memory.
    """
    kept = getattr(model, "static_cache", None)
    if kept is None or kept[0] != shape:
        cache = StaticCache(config=model.config, max_cache_len=shape[1])
        if not cache.is_compileable:
            raise ValueError("--compile_decoding: transformers has no static cache for its layers")
        model.static_cache = shape, cache
    cache = model.static_cache[1]
    cache.reset()
    return cache
