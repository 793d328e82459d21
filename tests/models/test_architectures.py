"""Any causal language model will do: what the scripts may rely on, on ten tiny architectures.

One process, no DeepSpeed engine.
"""

import pytest
import torch
from tiny_models import (
    CLOSE,
    KINDS,
    TOKENIZER,
    config_of,
    folder_of,
    get_args,
    logprobs,
    random_ids,
    value_model_of,
    values,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from machinery import saving
from tests.kit import load_model

pytestmark = pytest.mark.parametrize("name", KINDS)


@pytest.fixture
def folder(name, tmp_path):
    return folder_of(tmp_path / "model", config_of(name))


@pytest.fixture
def language_model(folder):
    return load_model(folder, get_args(), stage=0).eval()


@pytest.fixture
def value_model(folder):
    return value_model_of(folder)


# --------------------------------------------------------------------------------------------------
# From scratch, and dropout
# --------------------------------------------------------------------------------------------------
def test_a_folder_without_weights_starts_from_scratch(folder):
    """config.json alone is a model that has learned nothing: --seed decides its weights."""
    first, same, other = (
        load_model(folder, get_args("--seed", seed), stage=0).state_dict() for seed in "112"
    )
    matrices = [k for k, v in first.items() if v.dim() == 2 and v.is_floating_point()]
    assert len(matrices) > 8
    assert all(torch.equal(first[k], same[k]) for k in first)
    assert all(first[k].std() > 0 and not torch.equal(first[k], other[k]) for k in matrices)


def test_dropout_is_this_runs_alone(name, folder, tmp_path):
    """PPO compares log-probs of a training pass with stored ones: 0 must silence every dropout
    there is, whatever an architecture calls it, and any other number must be heard. What is saved
    has the model's own."""
    ids = random_ids(2, 12)
    for dropout, same in ((0.0, True), (0.5, False)):
        model = load_model(folder, get_args(), 0, dropout)
        with torch.no_grad():
            scoring = logprobs(model.eval(), ids, torch.ones_like(ids), 8)
            training = logprobs(model.train(), ids, torch.ones_like(ids), 8)
        assert torch.equal(scoring, training) == same
    saving.save_model(model, TOKENIZER, tmp_path / "saved")
    untouched = load_model(folder, get_args(), 0, None)
    for found in (AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), untouched):
        own, now = config_of(name).to_dict(), found.config.to_dict()
        assert {k: now[k] for k in own if "drop" in k} == {k: own[k] for k in own if "drop" in k}


# --------------------------------------------------------------------------------------------------
# Padding, values, log-probs
# --------------------------------------------------------------------------------------------------
@torch.no_grad()
def test_padding_never_changes_a_logprob_or_a_value(language_model, value_model):
    """A row is padded to the longest of its batch, which is chance; so neither the number of
    padding slots nor what stands in them may be seen in the result. Log-probs are those of the
    textbook formula, logits[:, t] for token t+1, at the temperature that is sampled from."""
    ids = random_ids(1, 11)
    logits = language_model(ids).logits / 0.7  # (1, 11, V)
    expected = logits.log_softmax(-1)[:, 3:-1].gather(-1, ids[:, 4:, None])[..., 0]  # (1, 7)
    expected_values = values(value_model, ids, torch.ones_like(ids))
    assert expected.std() > 1e-3 and expected_values.std() > 1e-4  # tokens differ from each other
    for junk in (random_ids(1, 0), torch.zeros(1, 9).long(), random_ids(1, 9, seed=99)):
        wide = torch.cat([junk, ids], 1)
        mask = torch.cat([torch.zeros_like(junk), torch.ones_like(ids)], 1)
        torch.testing.assert_close(logprobs(language_model, wide, mask, 7, 0.7), expected, **CLOSE)
        found = values(value_model, wide, mask)[:, junk.shape[1] :]
        torch.testing.assert_close(found, expected_values, **CLOSE)


@torch.no_grad()
def test_the_head_multiplies_in_fp32_also_in_a_bf16_model(folder):
    """bf16 has 8 bits: multiplied there, values between 4 and 8 move in steps of 1/32, and many
    held-out responses have the same score. Our head's product is that of exact numbers."""
    model, hidden = value_model_of(folder, "--dtype", "bf16"), []
    ids = random_ids(8, 40)
    model.model.base_model.register_forward_hook(lambda *x: hidden.append(x[-1][0]))
    found = values(model, ids, torch.ones_like(ids))
    weight = model.model.score.weight
    assert weight.dtype == hidden[0].dtype == torch.bfloat16
    exact = (hidden[0].double() @ weight.double().T).squeeze(-1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    assert len(found.unique()) > 0.95 * found.numel()


# --------------------------------------------------------------------------------------------------
# Saved here, loaded in stock transformers, and the other way round
# --------------------------------------------------------------------------------------------------
@torch.no_grad()
def test_a_reward_model_made_elsewhere_keeps_its_head(name, tmp_path):
    """A head is initialised only when it is new: a sequence-classification checkpoint of stock
    transformers comes in with every weight, head included, untouched to the bit."""
    config = config_of(name, num_labels=1)
    folder = folder_of(tmp_path, config)
    stock = AutoModelForSequenceClassification.from_config(config).eval()
    stock.score.weight.fill_(0.25)
    stock.save_pretrained(folder)
    ours, theirs = value_model_of(folder), stock.state_dict()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.model.state_dict().items())
    ids = random_ids(2, 9)
    found = values(ours, ids, torch.ones_like(ids))[:, -1]
    torch.testing.assert_close(found, stock(ids).logits[:, 0], **CLOSE)
