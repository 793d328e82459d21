"""What makes ppo.sample fast, and what its flags change: one named call each.

A cache in slots that are reserved once, a prompt that several rows share computed once, and rows
that leave when they have ended. The loop in ppo.py would be right without them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

import common
from machinery import ranks
from machinery.zero3 import unwrap_model


# ---- Random numbers ----
def uniforms_of(seed, step, requests, count):
    """Returns numbers in [0, 1), (B, count), float64. `requests`: B dicts with row and sample.

    They depend on each request's `draw_key` alone, not on ranks, batches or neighbours.
    """
    keys = [draw_key(seed, step, request) for request in requests]
    drawn = [np.random.default_rng(key).random(count, np.float32) for key in keys]
    return torch.from_numpy(np.stack(drawn)).to(ranks.device()).double()


def draw_key(seed, step, request):
    """Returns what the random numbers of a response depend on: (seed, step, row, sample).

    And the request's `turn`, if a fork of ours samples for the same row more than once in a step.
    """
    key = [seed, step, max(request["row"], 0), request["sample"]]
    return [*key, request["turn"]] if request.get("turn") else key


# ---- The cache ----
class ReservedLayer(DynamicLayer):
    """One layer's keys and values, in slots: transformers' own copies them all for every token."""

    def __init__(self, slots):
        super().__init__()
        self.slots = slots

    def update(self, keys, values, *args, **kwargs):
        """Adds new tokens' keys and values, (B, heads, new tokens, size of a head).

        Returns those of all tokens so far, as views.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            shape = *keys.shape[:2], self.slots
            self.reserved = [x.new_empty(*shape, x.shape[3]) for x in (keys, values)]
        start = self.get_seq_length()
        end = start + keys.shape[2]
        for slots, new in zip(self.reserved, (keys, values)):
            slots[:, :, start:end] = new
        self.keys, self.values = (slots[:, :, :end] for slots in self.reserved)
        return self.keys, self.values

    def batch_select_indices(self, indices):
        """Keeps the rows `indices`, in that order, some of them more than once."""
        if end := self.get_seq_length():
            self.reserved = [slots[indices] for slots in self.reserved]
            self.keys, self.values = (slots[:, :, :end] for slots in self.reserved)


def reserved_cache(model, slots):
    """Returns a transformers cache for `slots` tokens a row.

    Layers that keep less than that (a short window, no keys at all) stay transformers' own.
    """
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        windowed = type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= slots
        if type(layer) is DynamicLayer or windowed:
            cache.layers[i] = ReservedLayer(slots)
    return cache


@dataclass
class Cache:
    """The b rows that are decoded: their keys and values, and what their next forward takes."""

    past: DynamicCache  # keys and values of all tokens so far
    mask: Tensor  # (b, P + R) 1 on a prompt's tokens and on every response slot
    positions: Tensor  # (b, P + R)
    active: Tensor  # (b,) which of the B responses of ppo.sample the rows are
    copies: Tensor | None  # (B,) which of the computed prompts each has, until it is copied
    selectable: bool  # rows can be copied and left out
    length: int = 0  # tokens so far, padding included

    def select(self, indices):
        """Keeps the rows `indices`, some of them more than once."""
        self.past.batch_select_indices(indices)
        self.mask, self.positions = self.mask[indices], self.positions[indices]
        self.active = self.active[indices]


def new_cache(model, ids, mask, count):
    """Returns a Cache of prompts (B, P), left-padded, with slots for `count` tokens of a response.

    Equal prompts are in it once: `active` has the first response to each. Layers that hold more
    than keys and values (Mamba's) cannot copy rows, and there every row is computed for itself.
    """
    B, P = ids.shape
    past = reserved_cache(model, P + count)
    selectable = {type(each) for each in past.layers} <= {ReservedLayer, DynamicSlidingWindowLayer}
    active = copies = torch.arange(B, device=ids.device)
    if selectable:
        active, copies = first_of_each(ids, mask)
    mask = nn.functional.pad(mask, (0, count), value=1)[active]  # (b, P + R)
    return Cache(past, mask, common.position_ids(mask), active, copies, selectable)


def numbers_of_a_token(config):
    """Returns how many numbers a token has in the cache at most: a key and a value in each layer.

    config: of a language model.
    """
    count = 0
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    for layer in config.per_layer_config[:own]:  # in which Gemma 4's differ
        heads = getattr(layer, "num_attention_heads", 0)  # Mamba has none
        width = getattr(layer, "head_dim", None) or layer.hidden_size // max(heads, 1)
        count += 2 * (getattr(layer, "num_key_value_heads", None) or heads) * width
    return count


def memory(args, engine, requests, count):
    """Returns the bytes that `count` of the requests hold beside the weights while decoded.

    The cache; about 16 hidden states for each token of the prompts' forward, which come and go; and
    the logits of a token, with 24 more bytes for each while it is drawn.
    """
    model = unwrap_model(engine)
    config, size = model.config.get_text_config(), model.dtype.itemsize
    longest = max((len(row["prompt_ids"]) for row in requests), default=0)
    cached = numbers_of_a_token(config) * (longest + args.max_answer_seq_len)
    logits = config.vocab_size * (size + 24)
    of_row = size * (cached + 16 * config.hidden_size * longest) + logits
    return min(count, len(requests)) * of_row


def first_of_each(ids, mask):
    """Returns the first row of each different prompt among ids, mask (B, P): (U,).

    And which of them each row has: (B,).
    """
    found, copies = torch.cat([ids, mask], 1).unique(dim=0, return_inverse=True)
    rows = torch.arange(len(ids), device=ids.device)
    first = rows.new_full((len(found),), len(ids)).scatter_reduce(0, copies, rows, "amin")
    return (rows, rows) if len(first) == len(rows) else (first, copies)  # all differ: as they are


def for_each_response(cache, logits):
    """Returns logits (B, V) of all responses after the prompts' forward, which gave (U, V)."""
    copies, cache.copies = cache.copies, None
    if copies is None or len(copies) == len(cache.active):  # done before; or all prompts differ
        return logits
    cache.select(copies)
    cache.active = torch.arange(len(copies), device=logits.device)
    return logits[copies]


def goes_on(remaining, synced):
    """Returns whether to go on: `remaining` rows have not ended here, or with `synced` anywhere.

    With ZeRO-3's hooks on, each forward is a collective: a rank that stopped would hang the others.
    """
    return bool(ranks.all_sum(remaining)[0] if synced else remaining)


def leave_out_ended(cache, alive, remaining):
    """Takes ended rows out of the cache once a quarter of its rows have ended, as this copies it.

    alive: bool (B,), of all rows, `remaining` of which go on.
    """
    if cache.selectable and 0 < remaining <= 0.75 * len(cache.active):
        cache.select(alive[cache.active].nonzero()[:, 0])


# ---- Flags ----
def restricted(args, probs):
    """Returns the probabilities (b, V) of a token with 0 for what may not be drawn.

    --top_k: only the k likeliest. --top_p: only the likeliest whose share of the sum reaches p.
    Without these flags they are the model's own.
    """
    if args.top_k:
        probs = TopKLogitsWarper(args.top_k, filter_value=0.0)(None, probs)
    if args.top_p < 1:
        probs = TopPLogitsWarper(args.top_p)(None, probs.log()).exp()
    return probs
