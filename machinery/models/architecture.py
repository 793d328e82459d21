"""Tries out a model's architecture on a small random copy of it, before any weights are loaded.

The copy has the config's own options, its first layers, and narrower ones: a few milliseconds on
the CPU, in fp32, where what is right agrees to 1e-5. So neither ZeRO, nor the dtype of the run, nor
what the weights have learned can hide an error.
"""

import copy
import functools
import re

import torch
from transformers import AutoModelForCausalLM

import common
from machinery.models import forwards

LARGEST = 500e6  # weights of a small copy: 2 GB, and some seconds to draw them
WIDTHS = re.compile("size|dim|rank|d_model|d_ff|d_head|n_embd|n_inner|channels|width")
NO_WIDTHS = re.compile("vocab|position|chunk|window|kernel|image|patch|conv|state|group|block")
LEAST_HEAD = 8  # the width of a copy's attention heads
TOLERANCE = 1e-4  # of the largest log-prob: right models differ by 1e-6, wrong ones by 3e-3 and up


class CannotTell(Exception):
    """No small copy could be made, which says nothing about the model itself."""


def small_copy(config, trust_remote_code=False):
    """Returns a small random causal LM, in eval mode, of the architecture in `config`.

    If narrower layers do not fit together, it has the config's own width. Where no copy runs, this
    raises what the model itself raises, and CannotTell if it raises nothing.
    """
    options = dict(dtype=torch.float32, trust_remote_code=trust_remote_code)
    build = functools.partial(AutoModelForCausalLM.from_config, **options)
    for narrow in (True, False):
        try:
            model = draw(build, shortened(config, narrow))
        except Exception as error:  # no such attributes, or layers that hang together
            reason = error
            continue
        try:
            logprobs(model, row_of(model, 4))
            return model
        except Exception:
            if not narrow:
                raise
    with torch.device("meta"):
        build(copy.deepcopy(config))
    raise CannotTell(f"no small copy of it can be made: {reason}")


def draw(build, config):
    """Returns a new random model, whose weights are first counted in tensors without data."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build(config).parameters())
    if count > LARGEST:
        raise CannotTell(f"it would have {count:,} weights")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(config).eval()


def shortened(config, narrow):
    """Returns the config with fewer layers (all kinds of them), fewer tokens and narrower layers.

    All widths are divided by the same number, so that they still go together.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    config._attn_implementation = None  # PyTorch's own: other kernels may need a GPU
    if getattr(text, "is_heterogeneous", False):  # widths that differ between layers
        text.per_layer_config = None
    layers = text.num_hidden_layers
    lists = {k: v for k, v in vars(text).items() if isinstance(v, list) and len(v) == layers}
    computed = [getattr(text, name, None) or () for name in ("layer_types", "layers_block_type")]
    kinds = [list(map(str, v)) for v in (*lists.values(), *computed) if len(v) == layers]
    kinds = [kind for kind in kinds if len(set(kind)) < 9]  # more: the numbers of some layers
    firsts = [kind.index(one) for kind in kinds for one in kind]
    text.num_hidden_layers = kept = min(layers, max([2, *(first + 1 for first in firsts)]))
    for name, value in lists.items():
        setattr(text, name, value[:kept])
    if "num_kv_shared_layers" in vars(text):  # they take keys from layers that are cut off
        text.num_kv_shared_layers = 0
    text.vocab_size = min(text.vocab_size, 256)
    for name in {"initializer_range", "init_std"} & set(vars(text)):
        setattr(text, name, 0.1)  # so that tokens do attend to each other
    for part in (config, text):
        for name, value in list(vars(part).items()):
            if name.endswith("token_id") and isinstance(value, int) and value >= text.vocab_size:
                setattr(part, name, 0)
    if narrow:
        make_narrow(text)
    return config


def make_narrow(text):
    """Divides the widths in a config by a power of 2, down to heads of LEAST_HEAD; fewer experts"""
    head = vars(text).get("head_dim") or text.hidden_size // getattr(text, "num_attention_heads", 8)
    factor = 1
    while head // (2 * factor) >= LEAST_HEAD:
        factor *= 2
    for name, value in list(vars(text).items()):
        if type(value) is not int:
            continue
        is_width = WIDTHS.search(name) and not NO_WIDTHS.search(name)
        if is_width and value % factor == 0 and value >= 2 * factor:
            setattr(text, name, value // factor)
        elif "experts" in name and value % 128 == 0:
            setattr(text, name, value // 16)
        elif "chunk_size" in name:  # chunks are filled up to this size, which takes seconds
            setattr(text, name, min(value, 16))


# ---- Trying it out ----
def row_of(model, count):
    """Returns `count` tokens, (1, count), of which none is the model's padding."""
    text = model.config.get_text_config()
    known = [i for i in range(2, text.vocab_size) if i != getattr(text, "pad_token_id", None)]
    return torch.tensor([(known * count)[:count]])


@torch.no_grad()
def logprobs(model, ids, padding=0):
    """Returns the log-probs (1, T-1) of a row (1, T) that has so much padding on its left."""
    row = ids[0].tolist()
    ids, mask = common.pad([row, [2] * (len(row) + padding)], 2)
    return common.last_logprobs(model, ids[:1], mask[:1], torch.ones(1, len(row) - 1))


def differ(some, others, tolerance=TOLERANCE):
    """Returns whether log-probs differ by more than fp32 rounds."""
    return not (some - others).abs().max() <= tolerance * others.abs().max()


def looks_ahead(model):
    """Returns whether a row's last token changes the log-probs of the tokens before it."""
    ids = row_of(model, 9)
    changed = ids.clone()
    changed[0, -1] = ids[0, 0]
    return differ(logprobs(model, ids)[:, :-1], logprobs(model, changed)[:, :-1])


def sees_padding(model):
    """Returns whether padding on the left changes a row's log-probs."""
    ids = row_of(model, 9)
    return differ(logprobs(model, ids, padding=3), logprobs(model, ids))


@torch.no_grad()
def decodes(model, way):
    """Returns whether rollouts sample from the distribution that a forward gives.

    Two prompts, one of them padded, are decoded as ppo.py does (way: decoding.way_of); the first
    ends early.
    """
    row, count = row_of(model, 9), 4  # prompt and response
    prompts = [row[0, :-count].tolist(), row[0, 2:-count].tolist()]
    ids, mask = common.pad(prompts, 2)
    responses, alive = row[:, -count:].repeat(2, 1), torch.ones(2, dtype=torch.bool)
    vocabulary = range(model.config.get_text_config().vocab_size)
    found = []
    layout = ids, mask, responses, alive
    for _, _, logits in way(model, vocabulary, *layout, synced=False):
        found.append(logits[-1].log_softmax(-1))  # of the second prompt
        alive[0] = False
    short = row[:, 2:]
    options = forwards.forward_options(model, torch.ones_like(short))
    logits = model(short, attention_mask=torch.ones_like(short), use_cache=False, **options).logits
    expected = logits[0, -count - 1 : -1].log_softmax(-1)
    return not differ(torch.stack(found), expected, 10 * TOLERANCE)  # Mamba's steps round more
