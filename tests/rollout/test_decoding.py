"""What makes decoding fast changes no token: the cache that is reserved once, rows that leave when
they are done, a prompt that is computed once, and the compiled step."""

import copy
import functools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, StaticCache

import common
import ppo
from helpers import decoding
from machinery.base import ranks
from tests import kit
from tests.kit import Knowing
from tests.tiny_models import KINDS, config_of

VOCAB = 100
WINDOWS = {  # layers that look back over six tokens
    "short window": ("mistral", dict(sliding_window=6)),
    "one layer of two": (
        "qwen2",
        dict(sliding_window=6, use_sliding_window=True, max_window_layers=1),
    ),
}
every_model = pytest.mark.parametrize("name", [*KINDS, *WINDOWS])
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
    kind, changes = WINDOWS.get(name, (name, {}))
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


@every_model
def test_a_static_cache_gives_the_same_tokens(name):
    """--compile_decoding, without a compiler: prompts padded to 64 slots, all rows and an empty one
    to the end, twice in the one cache."""
    model = model_of(name)
    for step, end in ((0, -1), (1, 7)):
        uniforms = kit.uniforms(8, 16, step)
        plain, _ = sampled(model, IDS, MASK, uniforms, ending(end))
        static, _ = sampled(model, IDS, MASK, uniforms, ending(end), compile_decoding=1)
        assert static == plain


class OnAnAccelerator:
    """A model that says so, and whose compiled call is made by a backend of ours."""

    device = SimpleNamespace(type="an accelerator")

    def __init__(self, model, backend):
        self.model = model
        compiled = torch.compile(model.__call__, backend=backend, fullgraph=True)
        self.get_compiled_call = lambda config: compiled

    def __call__(self, *args, **options):
        return self.model(*args, **options)

    def eval(self):
        return self

    def __getattr__(self, name):
        return getattr(self.model, name)


def test_a_compiled_step_is_compiled_for_few_shapes():
    """The steps of all tokens of a rollout have one graph: no shape changes, no number is built
    into it. Prompts of other lengths, and fewer rows, have three widths of one number of rows, and
    the memory that they had: on CUDA each other would be a graph more, which is never given back.
    All are tried at the start, and none is compiled later. (On CUDA transformers compiles the step;
    here a backend runs it as it is.)"""
    graphs, memory, tried = [], set(), 0

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *inputs: memory.update(map(place, inputs)) or graph.forward(*inputs)

    def place(x):
        return torch.is_tensor(x) and x.dim() == 4 and x.shape[2] > 1 and (x.shape[2], x.data_ptr())

    model = OnAnAccelerator(model_of("llama"), backend)
    for rows, longer in [(8, 0), (5, 60), (8, 100), (3, 130), (8, 180)] * 2:
        ids, mask = common.pad([[*prompt, *[5] * longer] for prompt in PROMPTS[:rows]], 0)
        given = ids, mask, UNIFORMS[:rows], ending(-1)
        static, _ = kit.generate(model, *given, compile_decoding=1, max_prompt_seq_len=256)
        assert static.tolist() == sampled(model.model, *given)[0]
        tried = tried or len(graphs)
        assert len(graphs) == tried <= 3
    assert Counter(x[0] - 16 for x in memory if x) == {64: 4, 128: 4, 256: 4}  # layers, k and v


def tried(model, monkeypatch, *given, free=0):
    """Returns what a run's start says of --compile_decoding with these flags given."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
    args = ppo.get_args(["--preset", "toy", "--compile_decoding", "1", "--rollout_batch_size", "4"])
    args.declared.given = set(given)
    decoding.try_compiled(args, model, Knowing(ending(-1), VOCAB), ppo.sample)
    assert args.compile_decoding == bool(model.static_caches)  # what args.json says
    return model.static_caches


def test_a_step_that_is_wrong_is_not_compiled(monkeypatch, capsys):
    """Where the flag was not given the run goes on without, and says why in a line: here tokens are
    others, the caches are large, or the model has none. Where it was, it is refused. All ranks do
    as the one where it failed."""
    model = copy.deepcopy(model_of("llama"))
    room = dict(free=2**30)
    assert len(tried(model, monkeypatch, **room)) and capsys.readouterr().out == ""
    assert not tried(model, monkeypatch) and "GiB" in capsys.readouterr().out
    assert len(tried(model, monkeypatch, "compile_decoding"))
    right = decoding.compiled_next_logits
    wrong = lambda *given: right(*given).roll(1, -1)  # noqa: E731
    for owner, name, value in (
        (decoding, "compiled_next_logits", wrong),
        (StaticCache, "is_compileable", False),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            assert not tried(model, changed, **room)
            assert capsys.readouterr().out.count("the run does without it") == 1
            with kit.refuses("compile-decoding"):
                tried(model, changed, "compile_decoding")
    monkeypatch.setattr(ranks, "all_gather_objects", lambda errors: [*errors, "no memory there"])
    assert not tried(model, monkeypatch, **room) and "no memory there" in capsys.readouterr().out


def test_a_try_looks_at_tokens_up_to_a_rows_end():
    """Behind it both have padding, which says nothing: of three tokens one differs."""
    plain = torch.tensor([[5, 1, 0, 0], [1, 0, 0, 0]]), None, torch.tensor([2, 1]), None
    other = torch.tensor([[5, 1, 0], [7, 1, 0]]), None, torch.tensor([2, 2]), None
    args = SimpleNamespace(rollout_batch_size=2, max_prompt_seq_len=4, max_answer_seq_len=4)
    each = iter([plain, other])
    given = args, SimpleNamespace(), range(VOCAB), lambda *_: next(each), {}, 4
    assert decoding.tokens_alike(*given) == pytest.approx(2 / 3)


def test_what_was_not_tried_is_decoded_without_a_static_cache(monkeypatch):
    """More rows than --rollout_batch_size, as an evaluation may have, longer prompts, or longer
    responses."""
    model = copy.deepcopy(model_of("llama"))
    tried(model, monkeypatch, "compile_decoding")
    args = SimpleNamespace(rollout_batch_size=4, max_answer_seq_len=16)
    width = max(model.static_caches)
    for rows, length, count, static in (
        (4, width, 16, True),
        (5, width, 16, False),
        (4, width + 1, 16, False),
        (4, width, 17, False),
    ):
        ids = torch.arange(rows * length).view(rows, length)
        cache = decoding.new_cache(args, model, ids, torch.ones_like(ids), count)
        assert bool(cache.width) == static


def test_the_cache_is_reserved_once():
    """Concatenation would move the whole cache at every token; slots that were reserved stay where
    they are."""
    model = model_of("llama")
    cache, places, ids = decoding.reserved_cache(model, 12), set(), IDS[:2, :8]
    with torch.no_grad():
        for end in range(8, 13):
            inputs = ids if end == 8 else ids[:, -1:]
            options = dict(attention_mask=torch.ones(2, end), past_key_values=cache)
            model(inputs, use_cache=True, **options)
            assert cache.get_seq_length() == end
            places.add(tuple(layer.keys.data_ptr() for layer in cache.layers))
    assert len(places) == 1
