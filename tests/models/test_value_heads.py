"""The value head: how a new one begins, and how a trained one is found again.

Under ZeRO-3, on several ranks, with tests/engine.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import TOKENIZER, config_of, folder_of, random_ids, value_model_of, values

from machinery.models import saving

WIDE = {
    "llama": dict(hidden_size=2048, intermediate_size=8),
    # the backbone puts out word_embed_proj_dim, not hidden_size
    "opt-350m": dict(hidden_size=64, word_embed_proj_dim=2048),
}


@pytest.mark.parametrize("name", WIDE)
def test_a_new_head_starts_small_and_depends_on_the_seed(name, tmp_path):
    """It is drawn from N(0, 1/(d+1)), d the width of what the backbone puts out: first scores are
    near 0, so that nothing is preferred before anything is learned."""
    folder = folder_of(tmp_path, config_of(name, num_hidden_layers=1, **WIDE[name]))
    heads = [value_model_of(folder, "--seed", seed).model.score for seed in "112"]
    weight, same, other = (head.weight for head in heads)
    assert weight.shape == (1, 2048) and heads[0].bias is None
    assert weight.mean().abs().item() < 4 / 2049 / 2048**0.5  # 4 standard errors
    assert weight.std().item() == pytest.approx(1 / 2049, rel=4 / (2 * 2048) ** 0.5)
    assert torch.equal(weight, same) and not torch.equal(weight, other)


@pytest.mark.parametrize("name", ["score", "value_head"])
@torch.no_grad()
def test_the_heads_name_travels_in_config_json(name, tmp_path):
    """--value_head_prefix names the head in the weights' file, and config.json keeps the name, so
    that the next step finds the head without being told."""
    made = value_model_of(folder_of(tmp_path / "base", config_of("llama")), head=name)
    getattr(made.model, name).weight.fill_(0.5)  # "trained"
    saving.save_model(made, TOKENIZER, tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["value_head_prefix"] == name
    assert f"{name}.weight" in load_file(tmp_path / "saved/model.safetensors")
    found = value_model_of(str(tmp_path / "saved"), "--seed", "7", head="score")
    ids = random_ids(2, 9)
    again, before = (values(model, ids, torch.ones_like(ids)) for model in (found, made))
    assert torch.equal(again, before)
