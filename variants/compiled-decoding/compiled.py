"""Compiled decoding (--compile_decoding): a rollout replays one step for all of its tokens.

In a static cache the steps of all tokens have the same shapes. So transformers can compile one step
and, on CUDA, replay it as one graph. Rows stay to the end, and each prompt is computed for itself.
A graph is recorded for one shape and one place in memory, and is never freed: so there are at most
three widths of prompts, one number of rows, and a cache for each, which stays with the model. What
does not fit into one of them is decoded as without the flag.
"""

import functools
from dataclasses import dataclass

import torch
from torch import nn
from transformers import CompileConfig, StaticCache
from transformers.integrations import sdpa_attention

import common
from machinery import flags, folders, ranks, rollout, zero3
from machinery.refused import Refused


@dataclass
class Cache(rollout.Cache):
    """A static cache, whose rows all stay to the end."""

    width: int = 0  # slots of the prompts


def check(args):
    """Refuses --compile_decoding where a rank has not all weights of the actor."""
    whole = 3 not in flags.stages_of(args, "actor") and args.tensor_parallel_size == 1
    if args.compile_decoding and not whole:
        words = "--compile_decoding needs a whole actor: no stage 3, no --tensor_parallel_size."
        raise Refused("compile-decoding-shards", words)


def static_slots(args):
    """Returns {slots that a prompt may have: all slots of a row}, of each static cache.

    64, 128 and 256 for prompts of 256 tokens at most.
    """
    widths = sorted({64 * -(-args.max_prompt_seq_len // (64 << n)) for n in range(3)})
    return {width: width + args.max_answer_seq_len for width in widths}


# ---- At the start of a run ----
def try_it(args, engine, tokenizer, sample):
    """With --compile_decoding gives the model static caches, once each of them has been tried.

    The flag is refused where a cache cannot be compiled or does not fit, and where tokens are drawn
    with other log-probs than scoring gives them, on whatever rank. All ranks call it. sample:
    ppo.sample.
    """
    if not args.compile_decoding:
        return
    ranks.say("--compile_decoding: it is tried. On a GPU compiling can take minutes")
    keep_groups()
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
                # 0.05 at most, mistakes of 0.19 to 4.5.
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
    uniforms = rollout.uniforms_of(0, 0, rows, min(8, args.max_answer_seq_len))
    model.static_caches = caches
    responses, logprobs, lengths, *_ = sample(args, model, tokenizer, ids, mask, uniforms)
    R = responses.shape[1]
    real = (torch.arange(R, device=ids.device) < lengths[:, None]).long()  # (B, R)
    ids, mask = torch.cat([ids, responses], 1), torch.cat([mask, real], 1)  # (B, P + R)
    layout = common.last_columns(ids, mask, R).to(ids.device)
    scored = common.response_logprobs(model, layout, real, args.temperature)
    return ((scored - logprobs).abs().sum() / real.sum()).item()


def keep_groups():
    """Makes attention copy no keys and values that several query heads share, where it need not.

    At one position transformers (5.24) packs the queries of a group together, but not while it
    compiles: a compiled step would copy the whole cache for each query head, at every token, for
    Qwen2.5-0.5B seven times. Shapes are fixed there, so packing compiles.
    """
    sdpa_attention.is_torchdynamo_compiling = bool  # False
    sdpa_attention.use_gqa_in_sdpa = kernel_takes_groups


def kernel_takes_groups(mask, key, value, theirs=sdpa_attention.use_gqa_in_sdpa):
    """Returns whether PyTorch's kernels are given the keys and values of groups as they are.

    On CUDA only flash takes them. It needs 16 bits, and Ampere or newer; elsewhere transformers
    (5.24) ends in the plain products of all scores, T^2 (transformers#48633).
    """
    takes = theirs(mask, key, value)
    if takes and key.device.type == "cuda":
        takes = key.dtype.itemsize == 2 and torch.cuda.get_device_capability(key.device) >= (8, 0)
    return takes


# ---- In ppo.sample ----
def new_cache(args, model, ids, mask, count):
    """Returns the cache of a rollout: a static one if one was tried that has room, else ours."""
    B, P = ids.shape
    caches = getattr(model, "static_caches", {})
    wide = [width for width in caches if width >= P and B <= args.rollout_batch_size]
    if wide and count <= args.max_answer_seq_len:
        return static_cache(args, caches, mask, min(wide))
    return rollout.new_cache(model, ids, mask, count)


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


def next_logits(model, inputs, cache):
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
        **folders.accepted(model, cache=cache.past, position_ids=positions, logits_to_keep=1),
    )
    cache.length = end
    return forward(**given).logits[:B, -1].clone()  # the next replay writes to the same memory
