"""Logits are made for the wanted tokens alone: on real dialogues that is less than half of a row,
and the output matrix of a large vocabulary is the largest product of all."""

from types import SimpleNamespace

import pytest
import torch

import common
from machinery.models import forwards
from tests.kit import load_model
from tests.tiny_models import KINDS, SHAPE, config_of, folder_of, get_args, random_ids

VOCAB = SHAPE["vocab_size"]
LENGTHS = (9, 4, 1, 6, 9, 2, 7, 3)
IDS, MASK = common.pad([random_ids(n, seed=n).tolist() for n in LENGTHS], 0)
LAYOUT = common.Layout(**common.last_columns(IDS, MASK, 5))
# of the last five tokens: 5, 4, 3, 2, 1, 0, 5, 4 in the eight rows
WANTED = torch.arange(5) >= torch.arange(8)[:, None] % 6
every_model = pytest.mark.parametrize("name", KINDS)


@pytest.fixture
def model(name, tmp_path):
    return load_model(folder_of(tmp_path / "model", config_of(name)), get_args(), stage=0).eval()


@every_model
def test_logits_are_made_for_the_wanted_tokens_only(name, model, monkeypatch):
    """(M, V), and not a row more. Where the forward cannot pick tokens (a model's own code,
    DeepCompile) those of the last columns are made, and the wanted ones kept."""
    made = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: made.append(output.shape[:-1].numel())
    )
    logits = common.response_logits(model, LAYOUT, WANTED)
    monkeypatch.setattr(model, "is_compiled", True, raising=False)
    slow = common.response_logits(model, LAYOUT, WANTED)
    hook.remove()
    assert made[0] == WANTED.sum() and made[1] < IDS.numel()
    with torch.no_grad():
        positions = forwards.accepted(model, position_ids=LAYOUT.positions)
        whole = model(IDS, attention_mask=MASK, **positions).logits
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
        (common.response_logprobs(model, LAYOUT, few) * many).sum().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        found.append([grad.clone() for grad in grads])
    for few, many, none in zip(*found):
        torch.testing.assert_close(few, many, rtol=1e-3, atol=1e-3 * many.abs().max().item() + 1e-6)
        assert not none.any()


def test_a_model_that_knows_no_logits_to_keep_is_cut():
    """A forward without that argument returns all logits; the wanted ones are the same."""

    class Plain(torch.nn.Module):
        def forward(self, ids, attention_mask, use_cache):
            return SimpleNamespace(logits=torch.nn.functional.one_hot(ids, VOCAB))

    layout = common.Layout(**common.last_columns(IDS, MASK, 3))
    logits = common.response_logits(Plain(), layout, torch.ones(len(IDS), 3, dtype=torch.bool))
    assert logits.argmax(-1).tolist() == IDS[:, -4:-1].flatten().tolist()
