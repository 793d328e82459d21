"""Reward functions are the user's own code: how they are loaded and called, and how judges add up.

What is refused, and how errors are named, stands in tests/promises.py.
"""

import functools
import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from machinery import judges
from tests import kit

RESPONSE = {"chat": False, "extra": "{}", "response_ids": [5, 1], "prompt": "Why?", "text": " So."}


# --------------------------------------------------------------------------------------------------
# What a function is given, and what becomes of its scores
# --------------------------------------------------------------------------------------------------
def test_a_reward_function_gets_the_columns_of_all_blended_sources():
    """Two sources with unlike columns: both columns are there for every row, None where a row has
    none. A chat is a list of messages for each prompt, and one message of the assistant for each
    response, as TRL hands it over. All are copies."""
    question = [{"role": "user", "content": "Why?"}]
    chat = {"prompt": json.dumps(question), "chat": True, "extra": '{"level": [2]}'}
    rows = [{**RESPONSE, "extra": '{"topic": "t"}'}, {**RESPONSE, **chat}]
    given = judges.columns_for(lambda completion_ids, **columns: [], rows)
    assert given == {
        "prompts": ["Why?", question],
        "completions": [" So.", [{"role": "assistant", "content": " So."}]],
        "topic": ["t", None],
        "level": [None, [2]],
        "completion_ids": [[5, 1]] * 2,
    }
    given["completion_ids"][0].clear()
    assert RESPONSE["response_ids"] == [5, 1]
    assert "completion_ids" not in judges.columns_for(lambda **columns: [], rows)


def test_a_reward_function_may_score_every_token():
    """A list of one number a token stands on the tokens, one number on the last token. A function
    is called for all responses of a step: with a model of its own it keeps no graph."""
    rows = [{**RESPONSE, "response_ids": ids} for ids in ([5, 6, 1], [7, 1])]
    mask, last = torch.tensor([[[1, 1, 1], [1, 1, 0]], [[0, 0, 1], [0, 1, 0]]])
    batch = SimpleNamespace(responses=rows, response_mask=mask, last=last)

    def tokens(prompts, completions, completion_ids, **columns):
        return [[float(i) for i in ids] for ids in completion_ids]

    def whole(**columns):
        return [2.0, float(torch.is_grad_enabled())]

    judges.call_functions({"tokens": tokens, "whole": whole}, rows)
    assert judges.function_scores(batch, "tokens").tolist() == [[5, 6, 1], [7, 1, 0]]
    assert judges.function_scores(batch, "whole").tolist() == [[0, 0, 2], [0, 0, 0]]


def test_several_judges_are_summed():
    """One judge scores the whole response (2 on its last token), another each token (0.5 each).
    What each has said is noted."""
    both = [lambda batch: torch.tensor([[0.0, 2.0]]), lambda batch: torch.tensor([[0.5, 0.5]])]
    given = dict(reward_fn=["a.py:right"], reward_model_name_or_path=["b/kind"])
    batch = SimpleNamespace(responses=[{}])
    scores = judges.sum_and_note(SimpleNamespace(**given), both)(batch)
    assert scores[0].tolist() == [0.5, 2.5]
    assert batch.responses == [{"reward_1_right": 2.0, "reward_2_kind": 1.0}]


def scaled(prompts, completions, factor=2, **columns):
    return (factor * len(text) for text in completions)


@pytest.mark.parametrize(
    "function, score",
    [
        (scaled, 8),
        (functools.partial(scaled, factor=3), 12),
        (lambda **columns: [np.float32(0.5)] * 2, 0.5),
        (lambda **columns: np.array([True, True]), 1),
    ],
)
def test_any_callable_will_do_and_a_generator_is_read_to_its_end(function, score):
    """A bool and numpy's numbers are numbers."""
    assert judges.scores_of(function, [RESPONSE] * 2) == [[score]] * 2


# --------------------------------------------------------------------------------------------------
# Files of the user's
# --------------------------------------------------------------------------------------------------
MODULE = """
from __future__ import annotations
from dataclasses import dataclass
import os

os.chdir("away")

@dataclass
class Rule:
    weight: float = 1.0

def f(prompts, completions, **columns):
    os.chdir("away")
    yield from [Rule().weight for _ in prompts]
"""


def test_a_users_file_is_loaded_like_any_module(tmp_path, monkeypatch):
    """Its dataclasses find their module, a Pool can send its functions, and two files of one name,
    which is also that of another module, are two modules. The working folder stays as it was: a
    run's own paths are relative to it, and its checkpoints would go elsewhere."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "away"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "json.py").write_text(MODULE)
    loaded = [judges.load_function(f"{folder}/json.py:f", "--reward_fn") for folder in "ab"]
    assert pickle.loads(pickle.dumps(loaded)) == loaded and loaded[0] != loaded[1]
    assert judges.scores_of(loaded[0], [RESPONSE]) == [[1.0]] and Path.cwd() == tmp_path


SPAWNS = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

def length(text):
    return float(len(text))

def f(prompts, completions, **columns):
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        return list(pool.map(length, completions))

def g(prompts, completions, **columns):
    return [length(text) for text in completions]
"""
SCORES = """
import sys
if __name__ == "__main__":
    from machinery import judges
    answer = {"chat": False, "extra": "{}", "response_ids": [5, 1], "prompt": "", "text": " So."}
    found = [judges.load_function(f"parallel.py:{name}", "--reward_fn") for name in "fg"]
    assert {function.__module__ for function in found} == {"parallel"}
    print([judges.scores_of(function, [answer] * 2) for function in found])
"""


def test_a_function_may_spawn_processes(tmp_path):
    """They import its file by its name, as they know no other. A module that they cannot import
    ends them one after the other, and a multiprocessing.Pool starts new ones for ever."""
    (tmp_path / "parallel.py").write_text(SPAWNS)
    (tmp_path / "scores.py").write_text(SCORES)
    done = kit.start_command([sys.executable, "scores.py"], cwd=tmp_path, limit=100)
    assert done.code == 0 and "[[[4.0], [4.0]], [[4.0], [4.0]]]" in done.out, done
