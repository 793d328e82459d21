"""Models and adapters that people reported to other projects. Each docstring names the threads."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny_models import TOKENIZER, config_of, folder_of, get_args
from transformers import AutoModelForCausalLM

from machinery import folders, saving
from tests import kit


def edit(file, **changes):
    """Changes keys of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def save_again(folder, to, stage):
    """Loads a language model at a ZeRO stage and saves it as a run does."""
    model = kit.load_model(folder, get_args(), stage)
    saving.save_model(model, TOKENIZER, to)


# --------------------------------------------------------------------------------------------------
# Weights
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "opt"])
def test_each_stage_takes_the_files_output_matrix(kind, own, tmp_path):
    """The config ties the output matrix to the embedding, the file has one of its own: stock
    transformers uses it. ZeRO-3 took two weights that it had partitioned for equal, and dropped it.
    What is saved says that it is not tied, as vLLM drops it, too. transformers#42612, vllm#51665,
    LlamaFactory#6749, peft#2777"""
    folder = folder_of(tmp_path / "base", config_of(kind, tie_word_embeddings=not own), True)
    edit(tmp_path / "base/config.json", tie_word_embeddings=True)
    kit.on_ranks(save_again, 2, folder, tmp_path / "3", 3)
    save_again(folder, tmp_path / "0", 0)
    stock = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for stage in "03":
        found = load_file(tmp_path / stage / "model.safetensors")
        assert found.keys() == {name for name in stock if own or name != "lm_head.weight"}
        assert all(found[name].equal(stock[name]) for name in found)
        config = folders.load_config(str(tmp_path / stage))
        assert config.tie_word_embeddings == (not own)
