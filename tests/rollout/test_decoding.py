"""What makes decoding fast changes no token: the cache that is reserved once, rows that leave when
they are done, and a prompt that is computed once."""

import functools
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import common
from machinery import folders, ranks, rollout
from tests import kit
from tests.tiny_models import KINDS, config_of

VOCAB = 100
WINDOWS = {  # layers that look back over six tokens; of Gemma 4 the others have larger heads
    "short window": ("mistral", dict(sliding_window=6)),
    "one layer of two": (
        "qwen2",
        dict(sliding_window=6, use_sliding_window=True, max_window_layers=1),
    ),
    "Gemma 4": (
        "gemma4_text",
        dict(sliding_window=6, num_key_value_heads=2, head_dim=8, hidden_size_per_layer_input=8),
    ),
}
every_model = pytest.mark.parametrize("name", [*KINDS, *WINDOWS])
SHARED = {  # the last two layers look at the keys of the two before; no row leaves its cache
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
OTHERS = WINDOWS | {"Gemma 4, shared": ("gemma4_text", {**WINDOWS["Gemma 4"][1], **SHARED})}
LENGTHS = (9, 4, 1, 6, 9, 2, 7, 3)
PROMPTS = [
    torch.randint(2, VOCAB, (n,), generator=torch.Generator().manual_seed(n + 10 * row)).tolist()
    for row, n in enumerate(LENGTHS)
]
IDS, MASK = common.pad(PROMPTS, 0)
UNIFORMS = kit.uniforms(8, 16)


def ending(eos):
    return SimpleNamespace(pad_token_id=0, eos_token_id=eos)


@functools.cache
def model_of(name):
    torch.manual_seed(0)
    kind, changes = OTHERS.get(name, (name, {}))
    config = config_of(kind, vocab_size=VOCAB, **changes)
    return AutoModelForCausalLM.from_config(config).eval()


@functools.cache
@torch.no_grad()
def textbook(name, rows=range(8)):
    """Samples each row alone, without padding and without a cache, all to the end."""
    responses = []
    for uniforms, row in zip(UNIFORMS.double(), rows):
        ids = list(PROMPTS[row])
        for uniform in uniforms:
            logits = model_of(name)(torch.tensor([ids])).logits[0, -1]
            cdf = torch.softmax(logits.float(), -1).double().cumsum(-1)
            ids.append(int((cdf <= uniform * cdf[-1]).sum()))
        responses.append(ids[len(PROMPTS[row]) :])
    return responses


def ends(responses, eos):
    """Returns each row up to and including its first `eos`, or all of it."""
    return [row[: row.index(eos) + 1] if eos in row else row for row in responses]


def sampled(model, *given, **options):
    """Returns the responses up to their ends, and the rows of each forward."""
    sizes = []

    def note(module, inputs, named):
        sizes.append(len(inputs[0] if inputs else named["input_ids"]))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    responses, mask = kit.generate(model, *given, **options)
    hook.remove()
    assert not responses[mask == 0].any(), "beyond a row's end there is padding"
    assert mask.any(0).all(), "no column comes back in which nobody wrote"
    return [row[:n] for row, n in zip(responses.tolist(), mask.sum(1).tolist())], sizes


@every_model
def test_decoding_equals_the_plain_model(name):
    """The same uniforms, the same tokens: on ten architectures, with padding, with windows shorter
    than the text."""
    found, _ = sampled(model_of(name), IDS, MASK, UNIFORMS, ending(-1))
    assert found == textbook(name) and len(set(map(tuple, found))) == 8


@every_model
def test_rows_that_leave_change_nothing(name, monkeypatch):
    """Here EOS is the token that ends most rows early, at different times. A row that has ended
    leaves the batch, and with it its part of the cache: once a quarter has ended, not at every
    single end, because each time what stays is copied. Whoever stays gets the tokens that it would
    have got."""
    whole = textbook(name)
    eos = max(range(1, VOCAB), key=lambda token: sum(token in row[:12] for row in whole))
    expected = ends(whole, eos)
    lengths = [len(row) for row in expected]
    assert len(set(lengths)) > 1, "some row must end before the others, or nothing was tested"
    found, sizes = sampled(model_of(name), IDS, MASK, UNIFORMS, ending(eos))
    assert found == expected
    size = 8
    for r in range(max(lengths)):
        assert sizes[r] == size
        left = sum(length > r + 1 for length in lengths)
        size = left if left <= 0.75 * size else size
    assert len(sizes) == max(lengths)
    # "another rank has a row alive": with ZeRO-3's hooks on, all make the same number of forwards
    monkeypatch.setattr(ranks, "all_sum", lambda count: torch.tensor([count + 1.0]))
    found, sizes = sampled(model_of(name), IDS, MASK, UNIFORMS, ending(eos), synced=True)
    assert found == expected and len(sizes) == 16


@every_model
def test_a_prompt_is_computed_once_for_all_its_samples(name):
    """Four rows of two prompts in turns: the first forward has two rows, the cache then four, and
    each row gets the tokens that it would get alone."""
    rows = (0, 3, 0, 3)
    given = IDS[list(rows)], MASK[list(rows)], UNIFORMS[:4], ending(-1)
    found, sizes = sampled(model_of(name), *given)
    assert sizes[:3] == [2, 4, 4]
    assert found == textbook(name, rows) and len(set(map(tuple, found))) == 4


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_goes_in_under_the_name_that_the_forward_has(name):
    """transformers 5.24 renamed the argument. Under a name that it does not know a forward ignores
    the cache without a word, and each token would be decoded without those before it. What a
    forward returns goes into the next one, and nothing else of it does."""
    forwards = {
        "cache": lambda ids, cache, **kernel: None,
        "past_key_values": lambda ids, past_key_values, **kernel: None,
    }
    model = SimpleNamespace(forward=forwards[name])
    for given in ("cache", name):
        assert folders.accepted(model, **{given: "of all", "logits_to_keep": 1}) == {name: "of all"}


def test_the_cache_is_reserved_once():
    """Concatenation would move the whole cache at every token; slots that were reserved stay where
    they are."""
    model = model_of("llama")
    cache, places, ids = rollout.reserved_cache(model, 12), set(), IDS[:2, :8]
    with torch.no_grad():
        for end in range(8, 13):
            inputs = ids if end == 8 else ids[:, -1:]
            options = folders.accepted(model, attention_mask=torch.ones(2, end), cache=cache)
            model(inputs, use_cache=True, **options)
            assert cache.get_seq_length() == end
            places.add(tuple(layer.keys.data_ptr() for layer in cache.layers))
    assert len(places) == 1


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "Gemma 4", "Gemma 4, shared"])
def test_the_memory_of_a_token_is_what_the_cache_holds(name):
    """A key and a value in each layer that has its own. transformers#48501: whoever asks Gemma 4's
    config for the size of a head gets an error, because it differs by layer."""
    cache = rollout.reserved_cache(model_of(name), 4)
    model_of(name)(IDS[:1, :4], use_cache=True, past_key_values=cache)
    own = [x for each in cache.layers for x in (each.keys, each.values) if x is not None]
    held = sum(x.numel() for x in own) / 4
    assert rollout.numbers_of_a_token(model_of(name).config) == held
