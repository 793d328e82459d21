"""What the tests share. Read the files in order: 1 tokens, 2 advantages, 3 losses, 4 data, ... 8 wrong input."""
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # the tests' numbers are the CPU's; set it to cuda to try them there
os.environ.setdefault("HF_HUB_OFFLINE", "1")    # no test needs the network
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import common


@pytest.fixture
def tokenizer():
    """The toy's byte-level BPE; pad is 0 and EOS is 1."""
    return common.load_tokenizer(str(ROOT / "toy/model"))


@pytest.fixture(scope="session")
def tiny_model():
    """Two random layers of 32 with the toy's vocabulary: enough for every property, a few milliseconds a forward."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=common.load(str(ROOT / "toy/model")).vocab_size, hidden_size=32, intermediate_size=64,
                         num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3, tie_word_embeddings=False,
                         bos_token_id=None, eos_token_id=1, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def hh():
    """A folder with real dialogues of Anthropic's HH-RLHF (train.jsonl, test.jsonl); tests skip where it is absent."""
    folder = Path(os.environ.get("RLHF_HH", ROOT / "../shared/data/hh")).resolve()
    if not (folder / "train.jsonl").exists():
        pytest.skip(f"no HH data in {folder}; RLHF_HH names the folder")
    return folder


def pytest_collection_modifyitems(items):
    """In reading order: 2 comes before 10."""
    items.sort(key=lambda item: int(item.path.name.split("_")[1]))
