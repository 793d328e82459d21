"""Wrong input of every kind, as a user gives it: through a script's own main(), in an empty folder.

Each case is refused in words that name what was given, before any model is loaded, and the folder
is as it was. hostile.py draws from the same things. What flags refuse: test_flags.py.
"""

import json
import os
import shlex
import shutil
import sys

import pytest
from test_flags import SCRIPTS
from transformers import AutoTokenizer

import common
from machinery.base.refused import Refused
from machinery.flags import declaring
from tests import kit

TOY = declaring.ROOT / "toy/model"
PAIR = {"prompt": "Why?", "response": " So.", "chosen": " So.", "rejected": " No."}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
JUDGES = """
def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]
def narrow(prompts, completions):
    return [0.0 for text in completions]
"""
FILES = {  # what lies in the box: a path, and its text or its rows
    "good/train.jsonl": [{**PAIR, "prompt": f"Why {i}?"} for i in range(8)],
    "good/test.jsonl": [PAIR],
    "columns.jsonl": [{"question": "a", "reply": "b"}],
    "half.jsonl": [{"prompt": f"Why {i}?", "response": " So."} for i in range(8)],
    "only/test.jsonl": [PAIR],
    "broken.jsonl": json.dumps(PAIR) + '\n{"prompt": "Why?", "response": ',
    "chat/train.jsonl": [CHAT] * 8,
    "chat/test.jsonl": [CHAT],
    "score.py": JUDGES,
    "done/config.json": "{}",
    "foreign/model.safetensors": "not ours",
}
# of a model folder: a file, and its text. More of them: tests/models/test_model_folders.py
UNFIT = {
    "no_base": ("adapter_config.json", '{"base_model_name_or_path": null}'),
    "cut_tokenizer": ("tokenizer.json", '{"version'),
}


def fill_box(box):
    """Makes the wrong things that CASES name, and two good models: actor and judge."""
    for name, content in FILES.items():
        path = box / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = content if isinstance(content, str) else "\n".join(map(json.dumps, content))
        path.write_text(rows)
    (box / "nothing").mkdir()
    for name, (file, text) in UNFIT.items():
        (shutil.copytree(TOY, box / name) / file).write_text(text)
    for name in ("actor", "judge", "other", "instruct"):
        made = kit.base() / "models" / ("actor" if name == "actor" else "reward")
        shutil.copytree(made, box / name)
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(99)
    tokenizer.save_pretrained(box / "instruct")
    tokenizer.add_tokens(["zebra-crossing"])
    tokenizer.save_pretrained(box / "other")
    return box


CASES = {  # script and flags: a word of the message
    # data
    "sft --data_path colums.jsonl": "columns.jsonl",  # what is there instead
    "sft --data_path ''": "No such file",
    "sft --data_path only": "test",  # nothing to train on
    "sft --data_path nothing": "nothing",
    "sft --data_path columns.jsonl": "question",
    "sft --data_path chat": "chat template",
    "sft --data_split 0,4,4": "--data_split",
    "sft --data_split 0,0,0": "--data_split",
    "reward --data_path half.jsonl": "chosen",
    # models
    "sft --model_name_or_path ./good/modle": "good/modle",
    "sft --model_name_or_path cut_tokenizer": "cut_tokenizer",
    "ppo --actor_model_name_or_path missing/actor": "missing/actor",
    "ppo --critic_model_name_or_path other": "other",  # another vocabulary
    "ppo --reward_model_name_or_path judge other": "other",
    "ppo --reward_model_name_or_path instruct": "instruct",  # another end of a response
    "ppo --reward_model_name_or_path actor": "actor",  # no value head
    "ppo --reward_model_name_or_path no_base": "adapter_config.json",
    "ppo --normalize_reward 1": "score_statistics",
    # functions
    "ppo --reward_fn missing.py:length": "missing.py",
    "ppo --reward_fn score.py:length score.py:lenght": "lenght",
    "ppo --reward_fn score.py": "score.py",
    "ppo --reward_fn score.py:narrow": "narrow(prompts, completions, **columns)",
    # where the run would go
    "sft --output_dir done": "done",
    "sft --output_dir score.py": "score.py",
    "sft --output_dir foreign": "foreign",
    "reward --resume": "--resume",
}
RIGHT = {
    "sft": f"--model_name_or_path {TOY}",
    "reward": f"--model_name_or_path {TOY}",
    "ppo": "--actor_model_name_or_path actor --critic_model_name_or_path judge --gold_fn=",
}


@pytest.fixture(scope="session")
def full_box(tmp_path_factory):
    return fill_box(tmp_path_factory.mktemp("box"))


@pytest.fixture
def box(full_box, tmp_path, monkeypatch):
    """A working folder with those things in it. Models are not to be loaded from there."""

    def loaded(*args, **options):
        raise AssertionError("a model is loaded")

    shutil.copytree(full_box, tmp_path, copy_function=os.link, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("deepspeed.init_distributed", lambda **options: None)
    monkeypatch.setattr(common, "load_model", loaded)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of the user's file
    return tmp_path


def start(script, flags, monkeypatch):
    """Runs main() with the flags of the case on top of right ones: what comes last wins."""
    right = f"--preset toy --data_path good --output_dir out {RIGHT[script]} "
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *shlex.split(right + flags)])
    SCRIPTS[script].main()


@pytest.mark.parametrize("case", CASES)
def test_wrong_input_is_refused_in_words(box, monkeypatch, case):
    script, _, flags = case.partition(" ")
    before = sorted(box.rglob("*"))
    with pytest.raises(Refused) as caught:
        start(script, flags, monkeypatch)
    assert CASES[case] in caught.value.words
    assert sorted(box.rglob("*")) == before


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_flags_that_the_cases_start_from_are_right(box, monkeypatch, script):
    with pytest.raises(AssertionError, match="a model is loaded"):
        start(script, "", monkeypatch)
