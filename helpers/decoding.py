"""What makes ppo.sample fast, and what its flags change: one named call each.

A cache in slots that are reserved once, a prompt that several rows share computed once, and rows
that leave when they have ended. The loop in ppo.py would be right without them.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import CompileConfig, StaticCache, TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

import common
from machinery.base import ranks
from machinery.base.modules import unwrap_model
from machinery.base.refused import Refused
from machinery.engine import zero3
from machinery.models import forwards


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
    width: int = 0  # slots of the prompts in a static cache; 0: it is none
    length: int = 0  # tokens so far, padding included

    def select(self, indices):
        """Keeps the rows `indices`, some of them more than once."""
        self.past.batch_select_indices(indices)
        self.mask, self.positions = self.mask[indices], self.positions[indices]
        self.active = self.active[indices]


def new_cache(args, model, ids, mask, count):
    """Returns a Cache of prompts (B, P), left-padded, with slots for `count` tokens of a response.

    Equal prompts are in it once: `active` has the first response to each. Layers that hold more
    than keys and values (Mamba's) cannot copy rows, and there every row is computed for itself.
    """
    B, P = ids.shape
    caches = getattr(model, "static_caches", {})
    wide = [width for width in caches if width >= P and B <= args.rollout_batch_size]
    if wide and count <= args.max_answer_seq_len:
        return static_cache(args, caches, mask, min(wide))
    past = reserved_cache(model, P + count)
    selectable = {type(each) for each in past.layers} <= {ReservedLayer, DynamicSlidingWindowLayer}
    active = copies = torch.arange(B, device=ids.device)
    if selectable:
        active, copies = first_of_each(ids, mask)
    mask = nn.functional.pad(mask, (0, count), value=1)[active]  # (b, P + R)
    return Cache(past, mask, common.position_ids(mask), active, copies, selectable)


def numbers_of_a_token(config):
    """Returns how many numbers a token has in the cache: a key and a value in each layer.

    config: of a language model.
    """
    heads = getattr(config, "num_attention_heads", 0)  # Mamba has none
    width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * heads * width


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


def anyone(remaining, synced):
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


def at_stop(args, tokenizer, responses, r):
    """Returns for each row, bool (b,), whether a text of --stop ends in slots up to r of (b, R).

    It looks back over as many tokens as the longest text has bytes, because each token has at least
    one, and over 16 more, because some tokens may write nothing.
    """
    if not args.stop:
        return torch.zeros(len(responses), dtype=torch.bool, device=responses.device)
    back = max(len(text.encode()) for text in args.stop) + 16
    tails = tokenizer.batch_decode(responses[:, max(0, r - back) : r + 1])
    found = [any(text in tail for text in args.stop) for tail in tails]
    return torch.tensor(found, device=responses.device)


# ---- Compiled (--compile_decoding) ----
# In a static cache the steps of all tokens have the same shapes. So transformers can compile one
# step and, on CUDA, replay it as one graph. Rows stay to the end, and each prompt is computed for
# itself. A graph is recorded for one shape and one place in memory, and is never freed: so there
# are at most three widths of prompts, one number of rows, and a cache for each, which stays with
# the model. What does not fit into one of them is decoded as without the flag.


def static_slots(args):
    """Returns {slots that a prompt may have: all slots of a row}, of each static cache.

    64, 128 and 256 for prompts of 256 tokens at most.
    """
    widths = sorted({64 * -(-args.max_prompt_seq_len // (64 << n)) for n in range(3)})
    return {width: width + args.max_answer_seq_len for width in widths}


def try_compiled(args, engine, tokenizer, sample):
    """With --compile_decoding gives the model static caches, once each of them has been tried.

    The flag is refused where a cache cannot be compiled or does not fit, and where tokens are drawn
    with other log-probs than scoring gives them, on whatever rank. All ranks call it. sample:
    ppo.sample.
    """
    if not args.compile_decoding:
        return
    ranks.say("--compile_decoding: it is tried. On a GPU compiling can take minutes")
    engine.eval()
    errors = []
    with zero3.gather_for_generation(engine) as (model, _):
        try:
            caches = {n: StaticCache(model.config, room) for n, room in static_slots(args).items()}
            if not all(cache.is_compileable for cache in caches.values()):
                raise ValueError("no static cache for this model's layers")
            for width in caches:
                gap = functools.partial(sampling_gap, args, model, tokenizer, sample, width)
                plain, compiled = gap({}), gap(caches)
                # In 16 bits a compiled step rounds in other places than the plain one, whose gap
                # may be 0. On a CPU (SmolLM2-135M, four random models) sound caches had gaps of
                # 0.05 at most, mistakes of 0.19 to 4.5 (MISTAKES, tests/rollout/test_decoding.py).
                limit = 1e-3 if model.dtype == torch.float32 else 0.1 + 3 * plain
                if not compiled < limit:  # NaN is not
                    gaps = f"{compiled:.2g} nats a token, {plain:.2g} without the flag"
                    raise ValueError(f"sampling and scoring differ by {gaps}")
        except Exception as error:  # also: no compiler, no memory, or what it cannot compile
            errors = [f"--compile_decoding 1: {error}.\n  Use --compile_decoding 0."]
    if errors := ranks.all_gather_objects(errors):  # one rank's is all ranks'
        raise Refused("compile-decoding", errors[0])


@torch.no_grad()
def sampling_gap(args, model, tokenizer, sample, width, caches):
    """Returns how far log-probs of sampling and of scoring are apart: nats, a mean over tokens.

    Of 8 tokens a row, or up to where it ends, after prompts of all lengths up to `width`, sampled
    with `caches`, which then stay, or without ({}). At the first tokens the step is compiled and
    recorded. Scoring is one forward, without a cache.
    """
    B, P = args.rollout_batch_size, min(width, args.max_prompt_seq_len)
    sizes = [max(1, P * row // B) for row in range(1, B + 1)]
    prompts = [[n % len(tokenizer) for n in range(size)] for size in sizes]
    ids, mask = (x.to(ranks.device()) for x in common.pad(prompts, 0))  # (B, P)
    rows = [{"row": row, "sample": 0} for row in range(B)]
    uniforms = uniforms_of(0, 0, rows, min(8, args.max_answer_seq_len))
    model.static_caches = caches
    responses, logprobs, lengths, *_ = sample(args, model, tokenizer, ids, mask, uniforms)
    R = responses.shape[1]
    real = (torch.arange(R, device=ids.device) < lengths[:, None]).long()  # (B, R)
    ids, mask = torch.cat([ids, responses], 1), torch.cat([mask, real], 1)  # (B, P + R)
    layout = common.last_columns(ids, mask, R).to(ids.device)
    scored = common.response_logprobs(model, layout, real, args.temperature)
    return ((scored - logprobs).abs().sum() / real.sum()).item()


def static_cache(args, caches, mask, width):
    """Returns a Cache of all rows in caches[width], for prompts with this mask (B, P).

    It has --rollout_batch_size rows. The last of a rollout may be empty.
    """
    B, P = mask.shape
    active = torch.arange(B, device=mask.device)
    mask = nn.functional.pad(mask, (width - P, 0, 0, args.rollout_batch_size - B))
    # the causal mask hides slots to come
    mask = nn.functional.pad(mask, (0, args.max_answer_seq_len), value=1)
    caches[width].reset()
    positions = common.position_ids(mask)
    return Cache(caches[width], mask, positions, active, active, selectable=False, width=width)


def compiled_next_logits(model, inputs, cache):
    """Logits (B, V) of the token that follows, as ppo.next_logits returns them.

    Compiled on an accelerator from the second token on; on a CPU the same steps run as they are.
    """
    (B, count), forward = inputs.shape, model
    if cache.length == 0:  # the prompts
        count = cache.width
    elif model.device.type != "cpu":
        forward = model.get_compiled_call(CompileConfig(dynamic=False))
    inputs = nn.functional.pad(inputs, (count - inputs.shape[1], 0, 0, len(cache.mask) - B))
    start, end = cache.length, cache.length + count
    positions = cache.positions[:, start:end].contiguous()
    given = model.prepare_inputs_for_generation(
        inputs,
        attention_mask=cache.mask,
        use_cache=True,
        **forwards.accepted(model, cache=cache.past, position_ids=positions, logits_to_keep=1),
    )
    cache.length = end
    return forward(**given).logits[:B, -1].clone()  # the next replay writes to the same memory
