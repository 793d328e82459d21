"""What is done for speed changes no result: the cache that is reserved once, and the rows that
leave when they are done."""

from types import SimpleNamespace

import pytest
import torch
from transformers import MistralConfig, Qwen2Config
from transformers.cache_utils import DynamicSlidingWindowLayer

import common
from machinery.base import ranks
from machinery.engine import patches, zero3
from machinery.models import forwards
from machinery.rollout import compiled_decoding, decoding
from tests.conftest import generate, load_model
from tests.test_1_tokens import E, Scripted
from tests.tiny_models import KINDS, SHAPE, config_of, folder_of, get_args, random_ids

VOCAB, CONFIGS = SHAPE["vocab_size"], {name: config_of(name) for name in KINDS}

WINDOWS = {
    "short window": MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=6),
    "one layer of two": Qwen2Config(
        **SHAPE,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
    ),
}
MODELS = {**CONFIGS, **WINDOWS}
every_model = pytest.mark.parametrize("name", MODELS)
LENGTHS = [9, 4, 1, 6, 9, 2, 7, 3]
IDS, MASK = common.pad(
    [random_ids(n, seed=n + 10 * row).tolist() for row, n in enumerate(LENGTHS)], pad_value=0
)
# of the last five tokens: 5, 4, 3, 2, 1, 0, 5, 4 in the eight rows
WANTED = torch.arange(5) >= torch.arange(8)[:, None] % 6
NO_END = SimpleNamespace(pad_token_id=0, eos_token_id=-1)


@pytest.fixture
def model(name, tmp_path):
    return load_model(folder_of(tmp_path / "model", MODELS[name]), get_args(), stage=0).eval()


@torch.no_grad()
def slow_generate(model, ids, mask, uniforms):
    """Sampling as in a textbook: transformers' own cache, all rows to the end, the cumulative
    distribution written out."""
    answer, cache, new = ids[:, :0], None, ids
    for r in range(uniforms.shape[1]):
        options = forwards.forward_options(model, mask)
        if "position_ids" in options:
            options["position_ids"] = options["position_ids"][:, -new.shape[1] :]
        out = model(new, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        cache, cdf = (
            out.past_key_values,
            torch.softmax(out.logits[:, -1].float(), -1).double().cumsum(-1),
        )
        new = (cdf <= uniforms[:, r, None].double() * cdf[:, -1:]).sum(-1, keepdim=True)
        answer, mask = torch.cat([answer, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    return answer


def ends(answers, eos):
    """Returns each row up to and including its first `eos`, or all of it."""
    return [row[: row.index(eos) + 1] if eos in row else row for row in answers.tolist()]


def kept(answer, mask):
    return [row[:count] for row, count in zip(answer.tolist(), mask.sum(1).tolist())]


@every_model
def test_sampled_answers_are_those_of_the_slow_loop(name, model):
    """The same uniforms, the same tokens: on ten architectures, with padding, with windows shorter
    than the text."""
    uniforms = decoding.row_uniforms(1, 0, range(8), 16)
    answer, mask = generate(model, IDS, MASK, uniforms, NO_END)
    assert mask.all() and answer.tolist() == slow_generate(model, IDS, MASK, uniforms).tolist()
    assert len({tuple(row) for row in answer.tolist()}) == 8


@every_model
def test_rows_that_leave_change_nothing(name, model):
    """A row that has ended leaves the batch, and with it its part of the cache. Whoever stays gets
    the tokens that it would have got; here EOS is the token that ends most rows early, at different
    times."""
    uniforms = decoding.row_uniforms(1, 0, range(8), 16)
    whole = slow_generate(model, IDS, MASK, uniforms)
    eos = max(
        range(1, VOCAB), key=lambda token: sum(token in row for row in whole[:, :12].tolist())
    )
    expected = ends(whole, eos)
    sizes = []
    handle = model.register_forward_pre_hook(lambda m, inputs: sizes.append(len(inputs[0])))
    answer, mask = generate(
        model, IDS, MASK, uniforms, SimpleNamespace(pad_token_id=0, eos_token_id=eos)
    )
    handle.remove()
    assert kept(answer, mask) == expected and answer[mask == 0].eq(0).all()
    assert sizes[0] == 8 and sizes == sorted(sizes, reverse=True)
    assert len({len(row) for row in expected}) > 1, (
        "some row must end before the others, or nothing was tested"
    )


@every_model
def test_greedy_answers_are_stock_transformers(name, model):
    """With top_k 1 nothing is left to chance: the tokens of transformers' own generate(),
    left-padded, rows ending early."""
    options = dict(attention_mask=MASK, do_sample=False, max_new_tokens=16, pad_token_id=0)
    uniforms = decoding.row_uniforms(1, 0, range(8), 16)
    free = model.generate(IDS, **options, eos_token_id=None)[:, IDS.shape[1] :]
    eos = max(range(1, VOCAB), key=lambda token: sum(token in row for row in free[:, :12].tolist()))
    stock = model.generate(IDS, **options, eos_token_id=eos)[:, IDS.shape[1] :]
    assert kept(
        *generate(
            model, IDS, MASK, uniforms, SimpleNamespace(pad_token_id=0, eos_token_id=eos), top_k=1
        )
    ) == ends(stock, eos)


def test_finished_rows_cost_nothing():
    """Eight rows, one of them long: the batch shrinks once a quarter of it has ended, not at every
    single end, because each time what stays in the cache is copied."""
    script = [[5] * n + [E] * (12 - n) for n in (1, 2, 3, 4, 5, 5, 5, 11)]
    model, uniforms = Scripted(script), torch.full((8, 12), 0.5)
    answer, mask = generate(
        model,
        *common.pad([[1 + i] for i in range(8)], 0),
        uniforms,
        SimpleNamespace(pad_token_id=0, eos_token_id=E),
    )
    assert mask.sum(1).tolist() == [2, 3, 4, 5, 6, 6, 6, 12]
    assert model.batch_sizes == [8, 8, 8, 6, 6, 4, 1, 1, 1, 1, 1, 1]
    assert kept(answer, mask) == ends(torch.tensor(script), E)


@every_model
def test_a_prompt_is_computed_once_for_all_its_samples(name, model):
    """Four rows of two prompts in turns: the first forward has two rows, the cache then four, and
    each row gets the tokens that it would get alone."""
    ids, mask = IDS[[0, 3, 0, 3]], MASK[[0, 3, 0, 3]]
    uniforms, sizes = decoding.row_uniforms(1, 0, range(4), 16), []
    handle = model.register_forward_pre_hook(lambda m, inputs: sizes.append(len(inputs[0])))
    answer, _ = generate(model, ids, mask, uniforms, NO_END)
    handle.remove()
    assert sizes[:3] == [2, 4, 4]
    assert answer.tolist() == slow_generate(model, ids, mask, uniforms).tolist()
    assert len({tuple(row) for row in answer.tolist()}) == 4


@pytest.mark.parametrize("end", [-1, 7])
@every_model
def test_a_static_cache_gives_the_same_tokens(name, model, end):
    """--compile_decoding, without a compiler: prompts padded to 64 slots, all rows to the end,
    twice in the one cache."""
    tokenizer, sampled = SimpleNamespace(pad_token_id=0, eos_token_id=end), []
    for step in range(2):
        uniforms = decoding.row_uniforms(1, step, range(8), 16)
        plain = generate(model, IDS, MASK, uniforms, tokenizer)
        static = generate(model, IDS, MASK, uniforms, tokenizer, compile_decoding=True)
        assert all(map(torch.equal, plain, static))
        sampled += plain[0].tolist()
    assert len(set(map(tuple, sampled))) == 16


def test_a_compiled_step_is_compiled_once(tmp_path, monkeypatch):
    """The steps of all tokens, of two rollouts, have one graph: no shape changes, no number is
    built into it. (On CUDA transformers compiles it; here a backend runs it as it is.)"""
    model = load_model(folder_of(tmp_path, CONFIGS["llama"]), get_args(), stage=0).eval()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model.__call__, backend=backend, fullgraph=True)
    monkeypatch.setattr(compiled_decoding, "step_of", lambda model: compiled)
    for step, lengths in enumerate([LENGTHS, [n + 2 for n in LENGTHS]]):
        ids, mask = common.pad([random_ids(n, seed=n).tolist() for n in lengths], pad_value=0)
        uniforms = decoding.row_uniforms(1, step, range(8), 16)
        plain = generate(model, ids, mask, uniforms, NO_END)
        static = generate(model, ids, mask, uniforms, NO_END, compile_decoding=True)
        assert all(map(torch.equal, plain, static)) and len(graphs) == 1


def test_the_cache_is_reserved_once(tmp_path):
    """Concatenation would move the whole cache at every token; slots that were reserved stay where
    they are."""
    model = load_model(folder_of(tmp_path, CONFIGS["llama"]), get_args(), stage=0).eval()
    cache, places, ids = decoding.reserved_cache(model, 12), set(), random_ids(2, 8)
    with torch.no_grad():
        for end in range(8, 13):
            model(
                ids if end == 8 else ids[:, -1:],
                attention_mask=torch.ones(2, end),
                past_key_values=cache,
                use_cache=True,
            )
            assert cache.get_seq_length() == end
            places.add(tuple(layer.keys.data_ptr() for layer in cache.layers))
    assert len(places) == 1


def test_a_short_window_keeps_its_own_cache(tmp_path):
    """A layer that looks back 6 tokens keeps no more, in transformers' way. If the text fits the
    window, there is none."""
    model = load_model(folder_of(tmp_path, WINDOWS["one layer of two"]), get_args(), stage=0)
    assert [type(layer) for layer in decoding.reserved_cache(model, 20).layers] == [
        decoding.ReservedLayer,
        DynamicSlidingWindowLayer,
    ]
    assert [type(layer) for layer in decoding.reserved_cache(model, 6).layers] == [
        decoding.ReservedLayer
    ] * 2


def test_a_rank_that_is_done_goes_on_while_others_are_not(monkeypatch):
    """With ZeRO-3's hooks on every rank must make as many forwards. One whose rows have all ended
    keeps the last of them in the batch and throws away what they say."""
    # "another rank has a row alive"
    monkeypatch.setattr(ranks, "all_sum", lambda count: torch.tensor([count + 1.0]))
    model, uniforms = Scripted([[5, E, 7, 8], [E, 6, 7, 8], [E, 6, 7, 8]]), torch.full((3, 4), 0.5)
    answer, mask = generate(
        model,
        *common.pad([[7], [8], [9]], 0),
        uniforms,
        SimpleNamespace(pad_token_id=0, eos_token_id=E),
        synced=True,
    )
    assert answer.tolist() == [[5, E, 0, 0], [E, 0, 0, 0], [E, 0, 0, 0]] and mask.sum(
        1
    ).tolist() == [2, 1, 1]
    assert model.batch_sizes == [3, 1, 1, 1]


def test_a_rollout_under_zero3_begins_without_collecting_garbage():
    """The engine's own empty_partition_cache() also calls gc.collect(), which took a fifth of the
    benchmark's ZeRO-3 step, and empties the device's cache of memory."""
    released = []
    optimizer = SimpleNamespace(empty_partition_cache=lambda: released.append(True))
    engine = SimpleNamespace(optimizer=optimizer, empty_partition_cache=pytest.fail)
    zero3.release_early_gathers(engine)
    assert released == [True]
    zero3.release_early_gathers(SimpleNamespace(optimizer=None))  # below stage 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4), (0, 4)])
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 5)])
def test_under_zero3_a_product_without_a_backward_is_the_same_to_the_bit(shape, bias, dtype):
    """DeepSpeed's own F.linear keeps no gathered weight for the backward, at a price that a rollout
    need not pay. PPO compares log-probs of a scoring pass with those of a training pass: both must
    round alike."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator).to(dtype),
        torch.randn(5, 4, generator=generator).to(dtype).requires_grad_(),
    )
    bias = None if bias is None else bias.to(dtype)
    trained = patches.quick_linear(x, weight, bias)
    with torch.no_grad():
        scored = patches.quick_linear(x, weight, bias)
    assert (
        "LinearFunctionForZeroStage3" in type(trained.grad_fn).__name__ and scored.grad_fn is None
    )
    assert torch.equal(trained, scored)
    torch.testing.assert_close(scored, torch.nn.functional.linear(x, weight, bias))


@every_model
def test_logits_are_made_for_the_wanted_tokens_only(name, model, monkeypatch):
    """(M, V), and not a row more: on real dialogues less than half of (B, K, V), and the output
    matrix of a large vocabulary is the largest product of all. Where the forward cannot pick tokens
    (a model's own code, DeepCompile) all K are made and these kept."""
    made = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: made.append(output.shape[:-1])
    )
    logits = common.last_logits(model, IDS, MASK, WANTED)
    monkeypatch.setattr(model, "is_compiled", True, raising=False)
    slow = common.last_logits(model, IDS, MASK, WANTED)
    hook.remove()
    assert made == [(24,), (8, 5)] and logits.shape == slow.shape == (24, VOCAB)
    with torch.no_grad():
        whole = model(IDS, attention_mask=MASK, **forwards.forward_options(model, MASK)).logits
    for found in (logits, slow):
        torch.testing.assert_close(found, whole[:, -6:-1][WANTED], rtol=1e-4, atol=2e-5)


@every_model
def test_tokens_that_are_not_wanted_have_no_part_in_the_gradient(name, model):
    """The same loss, from the wanted tokens alone and from all with a mask: the same gradients. A
    batch of fillers has none."""
    found = []
    for few, many in (
        (WANTED, WANTED),
        (torch.ones(8, 5), WANTED),
        (torch.zeros(8, 5), torch.ones(8, 5)),
    ):
        model.zero_grad()
        (common.last_logprobs(model, IDS, MASK, few) * many).sum().backward()
        found.append(
            [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        )
    for few, many, none in zip(*found):
        torch.testing.assert_close(few, many, rtol=1e-3, atol=1e-3 * many.abs().max().item() + 1e-6)
        assert not none.any()


def test_a_model_that_knows_no_logits_to_keep_is_cut():
    """A forward without that argument returns all logits; the wanted ones are the same."""

    class Plain(torch.nn.Module):
        def forward(self, ids, attention_mask, use_cache):
            return SimpleNamespace(logits=torch.nn.functional.one_hot(ids, VOCAB))

    logits = common.last_logits(Plain(), IDS, MASK, torch.ones(len(IDS), 3, dtype=torch.bool))
    assert logits.argmax(-1).tolist() == IDS[:, -4:-1].flatten().tolist()
