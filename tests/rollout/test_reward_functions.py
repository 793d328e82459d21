"""Reward functions are the user's own code: what they return is input, too."""

import functools
import pickle
import sys

import numpy as np
import pytest

from helpers import judging
from machinery.base.refused import Refused

RESPONSE = {"chat": False, "extra": "{}", "response_ids": [5, 1], "prompt": "Why?", "text": " So."}


def test_a_dict_is_its_sum_and_each_part_is_noted():
    """Format 0.5 and answer 1: the sum is trained on, and the log has a mean of each part. A bool
    and numpy's numbers are numbers. With parts that only some rows have a mean would say nothing.
    """
    rows = [{**RESPONSE} for _ in range(2)]
    given = [{"format": np.float32(0.5), "answer": True}, {"answer": 0, "format": 0.25}]
    assert judging.scores_of(lambda **columns: given, rows) == [1.5, 0.25]
    assert [(row["reward_format"], row["reward_answer"]) for row in rows] == [(0.5, 1), (0.25, 0)]
    for other in ({"format": 1.0}, {"format": 1, "answer": 1, "style": 1}, {}, 1.0):
        with pytest.raises(Refused, match="same parts"):
            judging.scores_of(lambda other=other, **columns: [given[0], other], rows)


def scaled(prompts, completions, factor=2, **columns):
    return (factor * len(text) for text in completions)


@pytest.mark.parametrize(
    "function, factor", [(scaled, 2), (functools.partial(scaled, factor=3), 3)]
)
def test_any_callable_will_do_and_a_generator_is_read_to_its_end(function, factor):
    assert judging.scores_of(function, [RESPONSE] * 2) == [4 * factor] * 2


def test_the_error_of_a_function_names_the_rows():
    """One place for what it raises and what it returns: the traceback is the function's own, and
    the note says which rows."""
    rows = [{**RESPONSE, "row": number} for number in (3, 8)]
    for wrong in (lambda **columns: 1 / 0, lambda **columns: [1.0, None]):
        with pytest.raises((ZeroDivisionError, Refused)) as caught:
            judging.scores_of(wrong, rows)
        assert "[3, 8]; columns: prompts, completions" in caught.value.__notes__[0]


def test_a_function_cannot_end_the_run_as_if_all_were_well():
    """sys.exit(0) in the middle of step 3 would be a success to whoever started it."""

    def leaves_later(prompts, completions, **columns):
        yield 1.0
        sys.exit(0)

    for function in (lambda prompts, completions: sys.exit(0), leaves_later):
        try:
            judging.scores_of(function, [RESPONSE] * 2)
        except SystemExit as stop:
            assert stop.code not in (0, None)
        except Exception:
            pass
        else:
            raise AssertionError("it has scored")


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
            loaded.append(judging.load_function(*spec))
            continue
        with pytest.raises(FILES[text][0]) as caught:
            judging.load_function(*spec)
        said = [str(caught.value), *getattr(caught.value, "__notes__", [])]
        assert any(FILES[text][1] in words for words in said)
    assert [pickle.loads(pickle.dumps(function)) for function in loaded] == loaded
