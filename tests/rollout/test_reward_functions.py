"""Reward functions are the user's own code: what they return is input, too."""

import contextlib
import functools
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from machinery import judges
from machinery.refused import Refused
from tests import kit

RESPONSE = {"chat": False, "extra": "{}", "response_ids": [5, 1], "prompt": "Why?", "text": " So."}


@pytest.mark.parametrize("first", [0.5, {"format": 0.5, "answer": True}, {"std": 1.0}])
def test_a_dict_of_parts_is_refused_in_words(first):
    """Its keys would be no scores, and its sum would hide which part was rewarded: with a function
    for each part the log has the mean of each. A bool and numpy's numbers are numbers."""
    given = [first, {"format": np.float32(0.25), "answer": False}]
    with pytest.raises(Refused, match="one function a part: --reward_fn"):
        judges.scores_of(lambda **columns: given, [{**RESPONSE}] * 2)
    numbers = [np.float32(0.5), True]
    assert judges.scores_of(lambda **columns: numbers, [{**RESPONSE}] * 2) == [[0.5], [1.0]]


def test_a_function_leaves_the_working_folder_as_it_was(tmp_path, monkeypatch):
    """A run's own paths are relative to it: its checkpoints would go elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "away").mkdir()
    (tmp_path / "moves.py").write_text(f"import os\nos.chdir('away')\n{MOVES}")
    function = judges.load_function("moves.py:f", "--reward_fn")
    assert Path.cwd() == tmp_path
    for wrong in (False, True):
        with contextlib.suppress(ValueError):
            row = {**RESPONSE, "extra": json.dumps({"wrong": wrong})}
            assert judges.scores_of(function, [row]) == [[1.0]]
        assert Path.cwd() == tmp_path


def scaled(prompts, completions, factor=2, **columns):
    return (factor * len(text) for text in completions)


@pytest.mark.parametrize(
    "function, factor", [(scaled, 2), (functools.partial(scaled, factor=3), 3)]
)
def test_any_callable_will_do_and_a_generator_is_read_to_its_end(function, factor):
    assert judges.scores_of(function, [RESPONSE] * 2) == [[4 * factor]] * 2


def test_the_error_of_a_function_names_the_rows():
    """One place for what it raises and what it returns: the traceback is the function's own, and
    the note says which rows."""
    rows = [{**RESPONSE, "row": number} for number in (3, 8)]
    for wrong in (lambda **columns: 1 / 0, lambda **columns: [1.0, None]):
        with pytest.raises((ZeroDivisionError, Refused)) as caught:
            judges.scores_of(wrong, rows)
        assert "[3, 8]; columns: prompts, completions" in caught.value.__notes__[0]


def test_a_function_cannot_end_the_run_as_if_all_were_well():
    """sys.exit(0) in the middle of step 3 would be a success to whoever started it."""

    def leaves_later(prompts, completions, **columns):
        yield 1.0
        sys.exit(0)

    for function in (lambda prompts, completions: sys.exit(0), leaves_later):
        try:
            judges.scores_of(function, [RESPONSE] * 2)
        except SystemExit as stop:
            assert stop.code not in (0, None)
        except Exception:
            pass
        else:
            raise AssertionError("it has scored")


MOVES = """
def f(prompts, completions, wrong, **columns):
    os.chdir("away")
    yield from [1.0 for _ in prompts]
    if wrong[0]:
        raise ValueError
"""
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
FUNCTION = "\ndef f(prompts, completions, **columns):\n    return [1.0 for _ in prompts]\n"
FILES = {  # of a user: the error that it raises, and a word that must be there, or None
    "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    "@dataclass\nclass Rule:\n    weight: float = 1.0\n": None,
    "import sys\nsys.exit(0)": (RuntimeError, "ended the program"),  # not the end of a good run
    "{}['gone']": (KeyError, "--reward_fn"),
}


@pytest.mark.parametrize("text", FILES)
def test_a_users_file_is_loaded_like_any_module(tmp_path, text):
    """Its dataclasses find their module, a Pool can send its functions, and two files of one name
    are two modules. What it raises says which flag has named it."""
    loaded = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "json.py").write_text(text + FUNCTION)
        spec = f"{tmp_path / folder}/json.py:f", "--reward_fn"
        if FILES[text] is None:
            loaded.append(judges.load_function(*spec))
            continue
        with pytest.raises(FILES[text][0]) as caught:
            judges.load_function(*spec)
        said = [str(caught.value), *getattr(caught.value, "__notes__", [])]
        assert any(FILES[text][1] in words for words in said)
    assert [pickle.loads(pickle.dumps(function)) for function in loaded] == loaded


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
