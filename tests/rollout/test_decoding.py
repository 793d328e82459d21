"""What makes decoding fast changes no token: the cache that is reserved once, rows that leave when
they are done, a prompt that is computed once, and the compiled step."""

import copy
import functools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from packaging import version
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, StaticCache
from transformers.integrations import sdpa_attention

import common
import ppo
from helpers import decoding
from machinery.base import ranks
from machinery.engine import patches
from machinery.models import forwards
from tests import kit, two_devices
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
        self.model, self.backend, self.compiled = model, backend, None

    def get_compiled_call(self, config):
        if not self.compiled:
            options = dict(backend=self.backend, fullgraph=True, dynamic=config.dynamic)
            self.compiled = torch.compile(self.model.__call__, **options)
        return self.compiled

    def __call__(self, *args, **options):
        return self.model(*args, **options)

    def eval(self):
        return self

    def __getattr__(self, name):
        return getattr(self.model, name)


@pytest.mark.skipif(
    version.parse(torch.__version__) < version.parse("2.9"),
    reason="before torch 2.9 a graph holds the caches itself, not among its inputs",
)
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


def on_a_device(model):
    """Puts a model without numbers on the device that two_devices pretends. In a FakeTensorMode."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                there = torch.empty(weight.shape, dtype=weight.dtype, device=two_devices.device())
                module._parameters[name] = torch.nn.Parameter(there, requires_grad=False)
        for name, buffer in module._buffers.items():
            there = torch.empty(buffer.shape, dtype=buffer.dtype, device=two_devices.device())
            module._buffers[name] = there
    return model


def step_on_a_device(name, mistake):
    """Compiles a token's step there, three times. Returns how many graphs there are; of the last
    the devices of its inputs and results, how many numbers of it have no fixed size, and its
    largest tensor; and how large one layer's keys are in the cache."""
    patches.keep_groups()
    patches.kernel_takes_groups = lambda mask, key, value, theirs=None: mask is None
    there, model, graphs = two_devices.device(), model_of(name), []
    args = SimpleNamespace(rollout_batch_size=9, max_answer_seq_len=16)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with FakeTensorMode(), torch.no_grad():
        step = OnAnAccelerator(on_a_device(model), backend)
        caches = {64: StaticCache(model.config, 80)}
        for layer in caches[64].layers:  # a number that is known would be computed for real
            layer.cumulative_length = torch.empty((), dtype=torch.long, device=there)
        ids = torch.ones(8, 9, dtype=torch.long, device=there)
        cache = decoding.static_cache(args, caches, torch.ones_like(ids), 64)
        for inputs in (ids, *[ids[:, :1]] * 3):
            if mistake and cache.length:
                cache.positions = cache.positions.cpu()
            logits = decoding.compiled_next_logits(step, inputs, cache)
            assert logits.shape == (8, model.config.vocab_size) and logits.device == there
    values = [node.meta.get("example_value") for node in graphs[-1].graph.nodes]
    tensors = [value for value in values if torch.is_tensor(value)]
    return (
        len(graphs),
        {x.device.type for x in tensors},
        sum(isinstance(value, torch.SymInt) for value in values),
        max(x.numel() for x in tensors),
        cache.past.layers[0].keys.numel(),
    )


@two_devices.needed
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_a_compiled_step_lies_on_its_device(name):
    """Of the step that a CUDA graph would hold each input and each result is on the device, and
    none asks for a number from there: these tensors have shapes alone. An input on the CPU would
    leave inductor without a graph. Three tokens have one step, and nothing in it is larger than the
    cache."""
    ((graphs, devices, unfixed, largest, cache),) = kit.on_ranks(step_on_a_device, 1, name, False)
    assert (graphs, devices, unfixed) == (1, {two_devices.NAME}, 0) and largest == cache


@two_devices.needed
def test_a_compiled_step_that_mixes_devices_is_seen():
    done = kit.fork(step_on_a_device, 1, "llama", True)
    assert done.code and "Tensor device mismatch" in done.err, done


def largest_in_graphs(name, monkeypatch, patched):
    """Returns the most numbers of a tensor of four dimensions in a model's compiled steps, and of
    one layer's keys in the largest cache."""
    for attribute in ("is_torchdynamo_compiling", "use_gqa_in_sdpa"):
        monkeypatch.setattr(sdpa_attention, attribute, getattr(sdpa_attention, attribute))
    if patched:
        patches.keep_groups()
    shapes = []

    def backend(graph, inputs):
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        assert not any(isinstance(value, torch.SymInt) for value in values)
        shapes.extend(x.shape for x in values if torch.is_tensor(x) and x.dim() == 4)
        return graph.forward

    model = OnAnAccelerator(copy.deepcopy(model_of(name)), backend)
    given = IDS, MASK, UNIFORMS, ending(-1)
    found, _ = kit.generate(model, *given, compile_decoding=1)
    assert found.tolist() == textbook(name)
    torch._dynamo.reset()
    (cache,) = model.static_caches.values()
    return max(shape.numel() for shape in shapes), cache.layers[0].keys.numel()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_compiled_step_copies_no_keys_for_query_heads(name, monkeypatch):
    """Of four query heads two share their keys. transformers' own step copies keys and values for
    each (else patches.keep_groups may go); ours has no tensor that is larger than the cache."""
    with monkeypatch.context() as changed:
        largest, cache = largest_in_graphs(name, changed, patched=False)
    assert largest == 2 * cache
    largest, cache = largest_in_graphs(name, monkeypatch, patched=True)
    assert largest == cache


def tried(model):
    """Returns the caches with which a run with --compile_decoding begins. Its `sample` is a fork's,
    which returns more than ours."""
    args = ppo.get_args(["--preset", "toy", "--compile_decoding", "1", "--rollout_batch_size", "4"])
    forked = lambda *given: (*ppo.sample(*given), "more")  # noqa: E731
    decoding.try_compiled(args, model, Knowing(ending(-1), VOCAB), forked)
    return model.static_caches


MISTAKES = {  # what a step gets in place of (inputs, cache)
    "a token of another": lambda ids, cache: (ids.roll(1, 0), cache),
    "positions off by one": lambda ids, cache: (ids, moved(cache, 1, 0)),
    "padding is seen": lambda ids, cache: (ids, moved(cache, 0, 1)),
}


def moved(cache, more, seen):
    """Returns a Cache whose next positions are `more` too high, and whose mask hides nothing."""
    cache.positions = cache.positions + (more if cache.length == cache.width else 0)
    cache.mask = torch.ones_like(cache.mask) if seen else cache.mask
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_a_compiled_step_that_is_wrong_is_refused(mistake, dtype, monkeypatch):
    """Tokens are drawn with a static cache and scored without one. In bf16 the two differ by what
    the plain loop differs by, too; a mistake makes far more of it."""
    model, right = copy.deepcopy(model_of("gpt2")).to(dtype), decoding.compiled_next_logits

    def wrong(model, inputs, cache):
        return right(model, *MISTAKES[mistake](inputs, cache))

    if mistake is None:
        assert len(tried(model)) == 1
        return
    monkeypatch.setattr(decoding, "compiled_next_logits", wrong)
    with kit.refuses("compile-decoding") as caught:
        tried(model)
    assert "nats a token" in str(caught.value) and "--compile_decoding 0" in str(caught.value)


def test_what_cannot_be_compiled_is_refused_on_all_ranks(monkeypatch, capsys):
    """It takes minutes on a GPU, so a line says that it begins. One rank's failure is everybody's,
    as a rank that went on alone would wait forever."""
    model = copy.deepcopy(model_of("llama"))
    assert tried(model) and capsys.readouterr().out.count("--compile_decoding") == 1
    with monkeypatch.context() as changed, kit.refuses("compile-decoding") as caught:
        changed.setattr(StaticCache, "is_compileable", False)
        tried(model)
    assert "no static cache" in str(caught.value)
    monkeypatch.setattr(ranks, "all_gather_objects", lambda errors: [*errors, "no memory there"])
    with kit.refuses("compile-decoding") as caught:
        tried(model)
    assert "no memory there" in str(caught.value)


def test_a_try_compares_log_probs_up_to_a_rows_end(monkeypatch):
    """By hand: of two rows the first has two tokens, the second one. Sampling gave them log-probs
    of -1, -2 and -3; scoring gives all -2.5. So they differ by 1.5, 0.5 and 0.5."""
    responses, lengths = torch.tensor([[5, 1], [1, 0]]), torch.tensor([2, 1])
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    args = SimpleNamespace(rollout_batch_size=2, max_prompt_seq_len=4, max_answer_seq_len=4)
    args.temperature = 1.0
    sampled = lambda *_: (responses, logprobs, lengths, None)  # noqa: E731
    scored = lambda model, layout, wanted, temperature: -2.5 * wanted  # noqa: E731
    monkeypatch.setattr(common, "response_logprobs", scored)
    given = args, SimpleNamespace(), range(VOCAB), sampled, 4, {}
    assert decoding.sampling_gap(*given) == pytest.approx(2.5 / 3)


def test_what_was_not_tried_is_decoded_without_a_static_cache():
    """More rows than --rollout_batch_size, longer prompts, or longer responses."""
    model = copy.deepcopy(model_of("llama"))
    tried(model)
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


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_goes_in_under_the_name_that_the_forward_has(name):
    """transformers 5.24 renamed the argument. Under a name that it does not know a forward ignores
    the cache without a word, and each token would be decoded without those before it. What a
    forward returns goes into the next one, and nothing else of it does."""
    model = {
        "cache": SimpleNamespace(forward=lambda ids, cache, **kernel: None),
        "past_key_values": SimpleNamespace(forward=lambda ids, past_key_values, **kernel: None),
    }[name]
    assert forwards.accepted(model, cache="of all", logits_to_keep=1) == {name: "of all"}
    assert forwards.accepted(model, **{name: "of all", "logits": 1}) == {name: "of all"}


def test_the_cache_is_reserved_once():
    """Concatenation would move the whole cache at every token; slots that were reserved stay where
    they are."""
    model = model_of("llama")
    cache, places, ids = decoding.reserved_cache(model, 12), set(), IDS[:2, :8]
    with torch.no_grad():
        for end in range(8, 13):
            inputs = ids if end == 8 else ids[:, -1:]
            options = forwards.accepted(model, attention_mask=torch.ones(2, end), cache=cache)
            model(inputs, use_cache=True, **options)
            assert cache.get_seq_length() == end
            places.add(tuple(layer.keys.data_ptr() for layer in cache.layers))
    assert len(places) == 1
