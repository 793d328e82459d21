"""recipes/sentiment: what is written into its pairs."""

import sys
from types import SimpleNamespace

from tests import kit


def test_pairs_have_no_response_that_was_cut(monkeypatch):
    """It is drawn again: steps 1 and 2 would put EOS behind it. A prompt whose responses are always
    cut is left out."""
    draws = {"soon": [True], "late": [True, False, False, True], "never": [False]}
    seen = dict.fromkeys(draws, 0)

    def answers(_, __, chats, tokens, temperature):
        assert tokens == 32 and temperature == 0.7
        found = []
        for prompt in chats:
            ended = draws[prompt][seen[prompt] % len(draws[prompt])]
            seen[prompt] += 1
            found.append((f"{prompt} {seen[prompt]}", ended))
        return found

    report = SimpleNamespace(answers=answers, asked=lambda prompt: prompt)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "report", report)
    monkeypatch.setitem(sys.modules, "gold", SimpleNamespace(sentiment=len))
    make = kit.import_file(kit.ROOT / "recipes/sentiment/make.py")
    texts = make.respond(None, None, list(draws))
    assert texts == {"soon": ["soon 1", "soon 2"], "late": ["late 1", "late 4"]}
    assert seen["never"] == 2 * make.TRIES
