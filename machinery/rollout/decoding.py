"""Decoding: prompts batch by batch, options, and what makes it fast.

What makes it fast is a cache in slots that are reserved once, and rows that leave it when they end.
"""

import contextlib

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

import common
from machinery.base import progress, ranks
from machinery.engine import zero3
from machinery.models.forwards import forward_options
from machinery.rollout import compiled_decoding

KEYS_AND_VALUES = DynamicLayer, DynamicSlidingWindowLayer


@contextlib.contextmanager
def prompt_batches(args, engine, tokenizer, prompts, step, size):
    """Gives what ppo.sample takes for each `size` of the prompts, and shows how many are done.

        with prompt_batches(...) as batches:
            for rows, model, ids, mask, uniforms, synced in batches: ...

    ids, mask: (B, P), left-padded. Meanwhile the weights are gathered and the model is in eval
    mode: see zero3.gather_for_generation.
    """

    def batches(model, synced):
        for start in progress.starts(prompts, size):
            rows = prompts[start : start + size]
            ids, mask = common.pad([row["prompt_ids"] for row in rows], tokenizer.pad_token_id)
            ids, mask = ids.to(ranks.device()), mask.to(ranks.device())  # (B, P)
            keys = [(max(row["row"], 0), row["sample"]) for row in rows]
            uniforms = row_uniforms(args.seed, step, keys, args.max_answer_seq_len)
            yield rows, model, ids, mask, uniforms, synced

    with zero3.gather_for_generation(engine) as (model, synced):
        with contextlib.closing(batches(model, synced)) as given:
            yield given


def row_uniforms(seed, step, rows, count):
    """Returns numbers in [0, 1), (B, count); row b depends on (seed, step, rows[b]) only."""
    seeds = [[seed, step, *np.atleast_1d(row)] for row in rows]
    drawn = [np.random.default_rng(s).random(count, np.float32) for s in seeds]
    return torch.stack([torch.from_numpy(line) for line in drawn])


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
    """Returns a cache for `slots` tokens a row.

    Layers that keep less than that (a short window, no keys at all) stay transformers' own.
    """
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        windowed = type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= slots
        if type(layer) is DynamicLayer or windowed:
            cache.layers[i] = ReservedLayer(slots)
    return cache


def rows_can_be_selected(cache):
    """Returns whether all layers keep keys and values alone. Others (Mamba's) keep all rows."""
    return {type(layer) for layer in cache.layers} <= {ReservedLayer, *KEYS_AND_VALUES}


def each_slot(args, model, tokenizer, ids, mask, responses, alive, synced):
    """Yields (r, rows, logits) for each response slot r, until all rows have ended.

    rows: (b,) numbers of the rows that are still decoded. logits: (b, V) of their next token, -inf
    for what --top_k and --top_p leave out. The caller writes that token to responses[rows, r] and
    whether the row goes on to alive[rows].

    ids, mask: (B, P), left-padded prompts. responses: (B, R). alive: bool (B,). V has the
    tokenizer's ids only: another model may not have more. With `synced` (ZeRO-3's hooks are on)
    all ranks make as many forwards.
    """
    way = way_of(args)
    for r, rows, logits in way(model, tokenizer, ids, mask, responses, alive, synced):
        if r < args.min_new_tokens:
            logits[:, tokenizer.eos_token_id] = -torch.inf
        if args.top_k or args.top_p < 1:
            probs = torch.softmax(common.in_fp32(logits, args.temperature), -1)
            logits = logits.where(filter_top(probs, args.top_k, args.top_p) > 0, -torch.inf)
        yield r, rows, logits
        if args.stop:
            alive[rows] &= ~ends_with_stop(args, tokenizer, responses[rows], r)


def way_of(args):
    """Returns how the slots are computed: rows leave, or the step of a token is compiled."""
    compiled = getattr(args, "compile_decoding", False)  # a flag of ppo.py only
    return compiled_decoding.each_slot if compiled else leaving


def leaving(model, tokenizer, ids, mask, responses, alive, synced):
    """Yields what each_slot does. A prompt is computed once, and rows that have ended leave."""
    count, length = responses.shape[1], ids.shape[1]
    mask = torch.cat([mask, torch.ones_like(responses)], 1)  # (B, P + R)
    options = forward_options(model, mask, keep=1)
    positions = options.pop("position_ids", None)  # (B, P + R)
    cache = reserved_cache(model, length + count)
    options.update(past_key_values=cache, use_cache=True)
    rows = torch.arange(len(ids), device=ids.device)
    inputs, prompts, copies = ids, rows, rows
    if can_select := rows_can_be_selected(cache):
        inputs, prompts, copies = first_of_each(ids, mask[:, :length])
    for r in progress.shown(range(count), "tokens of each response"):
        end = length + r
        if positions is not None:
            options["position_ids"] = positions[prompts, end - inputs.shape[1] : end]
        logits = model(inputs, attention_mask=mask[prompts, :end], **options).logits
        logits = logits[:, -1, : len(tokenizer)]  # (b, V)
        if len(prompts) < len(rows):
            logits = logits[copies]
            cache.batch_select_indices(copies)
        yield r, rows, logits
        going_on = alive[rows]
        left = going_on.sum().item()
        # Without `synced` ranks stop on their own; with it one that stopped would hang the others.
        if not (ranks.all_sum(left)[0] if synced else left):
            return
        few = 0 < left <= 0.75 * len(rows)  # each time the cache is copied: not for every row
        if few and can_select:
            kept = going_on.nonzero()[:, 0]
            cache.batch_select_indices(kept)
            rows = rows[kept]
        prompts, inputs = rows, responses[rows, r, None]


def first_of_each(ids, mask):
    """Returns the different prompts among ids, mask (B, P), so that each is computed once.

    -> ids: (U, P), their rows: (U,), and which of them each row has: (B,)
    """
    found, copies = torch.cat([ids, mask], 1).unique(dim=0, return_inverse=True)
    rows = torch.arange(len(ids), device=ids.device)
    first = rows.new_full((len(found),), len(ids)).scatter_reduce(0, copies, rows, "amin")
    if len(first) == len(rows):  # all differ: as they stand
        return ids, rows, rows
    return ids[first], first, copies


def filter_top(probs, top_k, top_p):
    """Sets all but the `top_k` largest of probs (B, V), and all beyond cumulative `top_p`, to 0.

    top_k 0 and top_p 1 are off.
    """
    if top_k:
        least = probs.topk(min(top_k, probs.shape[-1])).values[:, -1:]
        probs = probs.where(probs >= least, 0)
    if top_p < 1:
        ordered, index = probs.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.where(before < top_p * ordered.sum(-1, keepdim=True), 0)
        probs = torch.zeros_like(probs).scatter(-1, index, ordered)
    return probs


def ends_with_stop(args, tokenizer, responses, r):
    """Returns for each row, bool (b,), whether a text of --stop ends in the 16 slots up to r."""
    found = torch.zeros(len(responses), dtype=torch.bool, device=responses.device)
    for row, tail in enumerate(tokenizer.batch_decode(responses[:, max(0, r - 15) : r + 1])):
        found[row] = any(text in tail for text in args.stop)
    return found


def described(args, tokenizer, rows, responses, response_mask):
    """Returns the rows (dicts) with response_ids (EOS included), text, and ended (1.0 or 0.0)."""
    out = []
    for row, ids, count in zip(rows, responses.tolist(), response_mask.sum(-1).tolist()):
        ids = ids[:count]
        stopped = any(text in tokenizer.decode(ids) for text in args.stop)
        stopped |= count < args.max_answer_seq_len or ids[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(ids, skip_special_tokens=True)
        out.append({**row, "response_ids": ids, "ended": float(stopped), "text": text})
    return out
