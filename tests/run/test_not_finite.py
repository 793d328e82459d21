"""A number that is not finite stops a run, and is named."""

import sys
from types import SimpleNamespace

import pytest

from machinery.run import Run
from tests import kit
from tools.report import runs, verdicts


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that is at step 7."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(Run, "finish", lambda run, code: sys.exit(code))
    run = object.__new__(Run)
    run.args, run.step = SimpleNamespace(output_dir=str(tmp_path)), 7
    return run


def test_a_nan_stops_the_run_and_is_named(run, tmp_path, capsys):
    """With its step, on the screen and in the last line of the log; tools/look.py takes it from
    there."""
    run.stop_unless_finite({"values": 1.0, "count": 3, "name": "nan", "grad_norm": None})
    assert not list(tmp_path.iterdir())
    wrong = {"values": float("nan"), "reward": float("inf"), "entropy": 1.0}
    with pytest.raises(SystemExit) as stop:
        run.stop_unless_finite(wrong)
    assert stop.value.code == 1
    assert "step 7: values, reward not finite" in capsys.readouterr().out
    assert kit.metrics(tmp_path) == [{"step": 7, "not_finite": ["values", "reward"]}]
    verdict, words, _ = verdicts.finite(runs.Run(tmp_path, "run"))
    assert verdict == "stopped" and "at step 7" in words


def test_an_evaluation_that_is_not_finite_is_not_logged(run, tmp_path):
    with pytest.raises(SystemExit):
        run.write({"step": 7, "eval_loss": float("nan")}, on_screen=True)
    assert kit.metrics(tmp_path) == [{"step": 7, "not_finite": ["eval_loss"]}]
