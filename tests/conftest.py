"""What the tests share. Read the files in order: 1 tokens, 2 advantages, 3
losses, 4 data, ... 8 wrong input."""

import copy
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
# the tests' numbers are the CPU's; set it to cuda to try them there
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import common
import ppo
from machinery.flags import declaring
from machinery.models import model_folders
from tests import workers


# --------------------------------------------------------------------------------------------------
# Models, engines, responses and micro-batches without a run around them
# --------------------------------------------------------------------------------------------------
def load_model(path, args, stage, dropout=None, tokenizer=None, value_head=None, lora_dim=0):
    """common.load_model with the flags of one model written out."""
    own = dict(model_name_or_path=path, zero_stage=stage, dropout=dropout, lora_dim=lora_dim)
    return common.load_model(declaring.of_role(args, **own), tokenizer, value_head)


class Knowing:
    """A tokenizer, or the stand-in of one, that has so many tokens."""

    def __init__(self, tokenizer, count):
        self.tokenizer, self.count = tokenizer, count

    def __len__(self):
        return self.count

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def generate(model, ids, mask, uniforms, tokenizer, synced=False, known=sys.maxsize, **options):
    """ppo.sample with the flags of sampling written out, off unless they are given.

    known: the ids that the tokenizer has."""
    off = dict(temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=0, stop=[])
    args = SimpleNamespace(**{**off, **options})
    return ppo.sample(args, model, Knowing(tokenizer, known), ids, mask, uniforms, synced)


def micro_batch(rows=(), **tensors):
    """A ppo.MicroBatch of these tensors, with responses to the rows of these numbers."""
    needed = dict.fromkeys(("ids", "mask", "response_mask", "last", "row_weight", "ended"))
    return ppo.MicroBatch([{"row": row} for row in rows], **{**needed, **tensors})


# --------------------------------------------------------------------------------------------------
# Fixtures
# --------------------------------------------------------------------------------------------------
@pytest.fixture
def tokenizer():
    """The toy's byte-level BPE; pad is 0 and EOS is 1."""
    return model_folders.load_tokenizer(str(ROOT / "toy/model"))


def make_tiny_model():
    """Two random layers of 32 with the toy's vocabulary: enough for every
    property, a few milliseconds a forward."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=model_folders.load_config(str(ROOT / "toy/model")).vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny_model():
    return make_tiny_model()


def save_trained(base, tiny_model):
    """Makes folders as steps 1 and 2 leave them: "actor", a language model, and "judge", a reward
    model, both with random weights and the toy's tokenizer. Returns `base`."""
    config = copy.deepcopy(tiny_model.config)
    config.num_labels = 1
    for name, model in (("actor", tiny_model), ("judge", LlamaForSequenceClassification(config))):
        model.save_pretrained(base / name)
        model_folders.load_tokenizer(str(ROOT / "toy/model")).save_pretrained(base / name)
    return base


@pytest.fixture(scope="session")
def trained(tiny_model, tmp_path_factory):
    return save_trained(tmp_path_factory.mktemp("trained"), tiny_model)


@pytest.fixture(scope="session")
def hh():
    """A folder with real dialogues of Anthropic's HH-RLHF (train.jsonl,
    test.jsonl); tests skip where it is absent."""
    folder = Path(os.environ.get("RLHF_HH", ROOT / "../shared/data/hh")).resolve()
    if not (folder / "train.jsonl").exists():
        pytest.skip(f"no HH data in {folder}; RLHF_HH names the folder")
    return folder


def pytest_report_header():
    return None if declaring.cpu_has_bf16() else "this CPU emulates bf16: tests in bf16 are slow"


def pytest_collection_modifyitems(items):
    """In reading order: 2 comes before 10. What looks at a rare run, or at
    one whose ranks share layers, is slow."""
    items.sort(key=lambda item: int(item.path.name.split("_")[1]))
    rare = {*workers.RARE, *workers.TENSOR_PARALLEL}
    for item in items:
        given = vars(item).get("callspec")
        if given and any(str(value) in rare for value in given.params.values()):
            item.add_marker("slow")
