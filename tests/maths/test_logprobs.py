"""Log-probs and entropy: of the right token, at the right temperature, and in fp32."""

import math
from types import SimpleNamespace

import pytest
import torch

import common
from machinery import folders
from tests.tiny_models import KINDS, SHAPE, config_of, folder_of, get_args, load_model, random_ids

VOCAB = SHAPE["vocab_size"]
every_model = pytest.mark.parametrize("name", KINDS)
LENGTHS = (9, 4, 1, 6, 9, 2, 7, 3)
TEXTS = [random_ids(n, seed=n + 10 * row).tolist() for row, n in enumerate(LENGTHS)]
IDS, MASK = common.pad(TEXTS, 0)
# of the last five tokens: 5, 4, 3, 2, 1, 0, 5, 4 in the eight rows
WANTED = torch.arange(5) >= torch.arange(8)[:, None] % 6


def layout(count, ids=IDS, mask=MASK):
    return common.last_columns(ids, mask, count)


@pytest.fixture
def model(name, tmp_path):
    return load_model(folder_of(tmp_path / "model", config_of(name)), get_args(), stage=0).eval()


# --------------------------------------------------------------------------------------------------
# Which token, which temperature
# --------------------------------------------------------------------------------------------------
def test_logits_are_shifted_by_one(tiny_model):
    """The logits at t score token t+1. The slow truth: for each token, feed only what stands before
    it, without padding, and read the last position. Sampling at temperature 2 draws from
    softmax(logits / 2), so the log-probs must be of that, too."""
    rows = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]
    padded = layout(3, *common.pad(rows, 0))
    wanted = torch.ones(2, 3, dtype=torch.bool)
    with torch.no_grad():
        logits = common.response_logits(tiny_model, padded, wanted).view(2, 3, -1)  # (2, 3, V)
        logprobs = {T: common.response_logprobs(tiny_model, padded, wanted, T) for T in (1.0, 2.0)}
        for b, row in enumerate(rows):
            for r, end in enumerate(range(len(row) - 3, len(row))):
                slow = tiny_model(torch.tensor([row[:end]])).logits[0, -1]
                assert torch.allclose(logits[b, r], slow, atol=1e-4)
                for T, found in logprobs.items():
                    expected = (slow / T).log_softmax(-1)[row[end]]
                    assert torch.allclose(found[b, r], expected, atol=1e-4)


def test_a_temperature_is_applied_in_fp32():
    """The rollout divides fp32 logits. Divided in bf16, logits of 20 would be off by up to 0.06
    nats: another policy."""
    generator = torch.Generator().manual_seed(0)
    logits = (20 * torch.randn(6, 50, generator=generator)).bfloat16()
    targets = torch.zeros(6, dtype=torch.long)
    exact = (logits.double() / 0.7).log_softmax(-1)
    found = common.TokenLogprobs.apply(logits, targets, 0.7).double()
    assert torch.allclose(found, exact[:, 0], atol=1e-4)
    expected = -(exact.exp() * exact).sum(-1)
    assert torch.allclose(common.entropy(logits, 0.7).double(), expected, atol=1e-4)


def test_entropy_is_that_of_the_softmax():
    """log 3 nats for three equal logits, 0 for a sure one, and -sum p log p in between (p = 1/2,
    1/4, 1/4: 1.5 log 2)."""
    logits = torch.tensor([[0.0, 0.0, 0.0], [1000.0, 0.0, 0.0], [math.log(2), 0.0, 0.0]])
    expected = pytest.approx([math.log(3), 0, 1.5 * math.log(2)], abs=1e-6)
    assert common.entropy(logits).tolist() == expected


# --------------------------------------------------------------------------------------------------
# A chunk of tokens at a time
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 5, 64, 65])
def test_token_logprobs_are_log_softmax_in_fp32(dtype, tokens, monkeypatch):
    """Values and gradient agree with torch's in every chunk, and a bf16 model's logits are not
    rounded once more on the way: log-probs differ from one forward to the next by tiny amounts that
    bf16 could not hold. Fillers alone: no token at all."""
    torch.manual_seed(0)
    monkeypatch.setattr(common, "CPU_CHUNK", 64 * 50 * 4)  # 64 tokens
    logits = (4 * torch.randn(tokens, 50)).to(dtype)
    targets, weights = torch.randint(50, (tokens,)), torch.randn(tokens)
    ours, theirs = logits.clone().requires_grad_(), logits.float().requires_grad_()
    found = common.TokenLogprobs.apply(ours, targets, 0.7)
    scaled = theirs / 0.7
    expected = scaled.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    assert found.dtype == torch.float32 and torch.allclose(found, expected, atol=1e-5)
    entropies = -(scaled.softmax(-1) * scaled.log_softmax(-1)).sum(-1)
    assert torch.allclose(common.entropy(logits, 0.7), entropies, atol=1e-5)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    close = 1e-6 if dtype == torch.float32 else 2e-2
    assert ours.grad.dtype == dtype and torch.allclose(ours.grad.float(), theirs.grad, atol=close)


def test_the_size_of_a_chunk_changes_no_bit(monkeypatch):
    """Each token is for itself. A chunk is as many tokens as fill a CPU's cache, or a GPU."""
    torch.manual_seed(0)
    logits, targets = torch.randn(700, 600), torch.randint(600, (700,))
    found = []
    for size in (1, 64 * 600 * 4, 2**27):
        monkeypatch.setattr(common, "CPU_CHUNK", size)
        ours = logits.clone().requires_grad_()
        logprobs = common.TokenLogprobs.apply(ours, targets, 0.7)
        logprobs.square().sum().backward()
        found.append((logprobs, ours.grad, common.entropy(logits)))
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))
    monkeypatch.undo()
    for device, tokens in (("cpu", 2), ("meta", 261)):  # of Llama-3's vocabulary
        step = common.chunks(torch.empty(2000, 128256, device=device, dtype=torch.bfloat16))[0]
        assert step == slice(0, tokens)


# --------------------------------------------------------------------------------------------------
# Where they are wanted
# --------------------------------------------------------------------------------------------------
@every_model
def test_logits_are_made_for_the_wanted_tokens_only(name, model, monkeypatch):
    """(M, V), and not a row more: on real dialogues that is less than half, and the output matrix
    of a large vocabulary is the largest product of all. Where the forward cannot pick places (a
    model's own code, DeepCompile) those of the last columns are made and these kept."""
    made = []
    output = model.get_output_embeddings()
    output.register_forward_hook(lambda module, given, found: made.append(found.shape[:-1]))
    logits = common.response_logits(model, layout(5), WANTED)
    monkeypatch.setattr(model, "is_compiled", True, raising=False)
    slow = common.response_logits(model, layout(5), WANTED)
    assert made == [(24,), (8, 6)] and logits.shape == slow.shape == (24, VOCAB)
    with torch.no_grad():
        positions = folders.accepted(model, position_ids=layout(5).positions)
        whole = model(IDS, attention_mask=MASK, **positions).logits
    for found in (logits, slow):
        torch.testing.assert_close(found, whole[:, -6:-1][WANTED], rtol=1e-4, atol=2e-5)


def test_a_model_that_knows_no_logits_to_keep_is_cut():
    """A forward without that argument returns all logits; the wanted ones are the same."""

    class Plain(torch.nn.Module):
        def forward(self, ids, attention_mask, use_cache):
            return SimpleNamespace(logits=torch.nn.functional.one_hot(ids, VOCAB))

    logits = common.response_logits(Plain(), layout(3), torch.ones(8, 3, dtype=torch.bool))
    assert logits.argmax(-1).tolist() == IDS[:, -4:-1].flatten().tolist()
