"""Log-probs and entropy: of the right token, at the right temperature, and in fp32."""

from types import SimpleNamespace

import pytest
import torch

import common
from machinery import folders
from tests.tiny_models import KINDS, SHAPE, config_of, folder_of, get_args, load_model, random_ids

VOCAB = SHAPE["vocab_size"]
LENGTHS = (9, 4, 1, 6, 9, 2, 7, 3)
TEXTS = [random_ids(n, seed=n + 10 * row).tolist() for row, n in enumerate(LENGTHS)]
IDS, MASK = common.pad(TEXTS, 0)
# of the last five tokens: 5, 4, 3, 2, 1, 0, 5, 4 in the eight rows
WANTED = torch.arange(5) >= torch.arange(8)[:, None] % 6
LAYOUT = common.last_columns(IDS, MASK, 5)


def test_logits_are_shifted_by_one(tiny_model):
    """The logits at t score token t+1. The slow truth: for each token, feed only what stands before
    it, without padding, and read the last position. Sampling at temperature 2 draws from
    softmax(logits / 2), so the log-probs must be of that, too."""
    rows = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]
    layout = common.last_columns(*common.pad(rows, 0), 3)
    with torch.no_grad():
        for T in (1.0, 2.0):
            found = common.response_logprobs(tiny_model, layout, torch.ones(2, 3), T)
            for b, row in enumerate(rows):
                for r, end in enumerate(range(len(row) - 3, len(row))):
                    slow = tiny_model(torch.tensor([row[:end]])).logits[0, -1] / T
                    assert torch.allclose(found[b, r], slow.log_softmax(-1)[row[end]], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 5, 64, 65])
def test_token_logprobs_are_log_softmax_in_fp32(dtype, tokens, monkeypatch):
    """Values and gradient agree with torch's in every chunk, and a bf16 model's logits are not
    rounded once more on the way, where they are divided by the temperature: logits of 20 would be
    off by up to 0.06 nats. The size of a chunk changes no bit. Fillers alone: no token at all."""
    torch.manual_seed(0)
    logits = (20 * torch.randn(tokens, 50)).to(dtype)
    targets, weights = torch.randint(50, (tokens,)), torch.randn(tokens)
    theirs = logits.float().clone().requires_grad_()
    scaled = theirs / 0.7
    expected = scaled.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    (expected * weights).sum().backward()
    entropies = -(scaled.softmax(-1) * scaled.log_softmax(-1)).sum(-1)
    made = []
    for chunk in (1, 64, 2**20):
        monkeypatch.setattr(common, "CPU_CHUNK", chunk * 50 * 4)
        ours = logits.clone().requires_grad_()
        found = common.TokenLogprobs.apply(ours, targets, 0.7)
        assert found.dtype == torch.float32 and torch.allclose(found, expected, atol=1e-4)
        (found * weights).sum().backward()
        close = 1e-5 if dtype == torch.float32 else 2e-2
        assert ours.grad.dtype == dtype and torch.allclose(
            ours.grad.float(), theirs.grad, atol=close
        )
        made.append((found, ours.grad, common.entropy(logits, 0.7)))
        assert torch.allclose(made[-1][2], entropies, atol=1e-4)
    for others in made[1:]:
        assert all(map(torch.equal, made[0], others))


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_made_for_the_wanted_tokens_only(name, tmp_path, monkeypatch):
    """(M, V), and not a row more: on real dialogues that is less than half, and the output matrix
    of a large vocabulary is the largest product of all. Where the forward cannot pick places (a
    model's own code, DeepCompile) those of the last columns are made and these kept."""
    model = load_model(folder_of(tmp_path / "model", config_of(name)), get_args(), stage=0).eval()
    made = []
    output = model.get_output_embeddings()
    output.register_forward_hook(lambda module, given, found: made.append(found.shape[:-1]))
    logits = common.response_logits(model, LAYOUT, WANTED)
    monkeypatch.setattr(model, "is_compiled", True, raising=False)
    slow = common.response_logits(model, LAYOUT, WANTED)
    assert made == [(24,), (8, 6)] and logits.shape == slow.shape == (24, VOCAB)
    with torch.no_grad():
        positions = folders.accepted(model, position_ids=LAYOUT.positions)
        whole = model(IDS, attention_mask=MASK, **positions).logits
    for found in (logits, slow):
        torch.testing.assert_close(found, whole[:, -6:-1][WANTED], rtol=1e-4, atol=2e-5)


def test_a_model_that_knows_no_logits_to_keep_is_cut():
    """A forward without that argument returns all logits; the wanted ones are the same."""

    class Plain(torch.nn.Module):
        def forward(self, ids, attention_mask, use_cache):
            return SimpleNamespace(logits=torch.nn.functional.one_hot(ids, VOCAB))

    logits = common.response_logits(Plain(), LAYOUT, WANTED)
    assert logits.argmax(-1).tolist() == IDS[:, -6:-1][WANTED].tolist()
