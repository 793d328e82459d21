"""The value head: how a new one begins, and how a trained one is found again.

Under ZeRO-3, on several ranks, with tests/engine.
"""

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import (
    TOKENIZER,
    config_of,
    folder_of,
    get_args,
    random_ids,
    value_model_of,
    values,
)

from machinery import folders, saving
from tests.kit import load_model

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


@pytest.mark.parametrize("name, lora_dim", [("score", 0), ("value_head", 0), ("value_head", 4)])
@torch.no_grad()
def test_the_heads_name_travels_with_the_model(name, lora_dim, tmp_path):
    """--value_head_prefix names the head in the weights' file, and the config keeps the name, so
    that the next step finds the head without being told. With adapters peft looks it up by name,
    too: else what was trained is dropped in silence, and the model scores with a head at random."""
    base = folder_of(tmp_path / "base", config_of("llama"), weights=True)
    made = load_model(base, get_args(), 0, None, TOKENIZER, name, lora_dim).eval()
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter += 0.1  # "trained"
    saving.save_model(made, TOKENIZER, tmp_path / "saved")
    assert folders.load_config(str(tmp_path / "saved")).value_head_prefix == name
    [file] = (tmp_path / "saved").glob("*.safetensors")
    assert any(key.endswith(f"{name}.weight") for key in load_file(file))
    found = value_model_of(str(tmp_path / "saved"), "--seed", "7", head="score")
    ids = random_ids(2, 9)
    again, before = (values(model, ids, torch.ones_like(ids)) for model in (found, made))
    torch.testing.assert_close(again, before, rtol=1e-4, atol=1e-4)
    assert getattr(found.model, name).weight.equal(getattr(made.model, name).weight)
