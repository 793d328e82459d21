"""A number that is not finite stops a run, and what was worked on is kept."""

import json
import sys

import pytest

import ppo
from machinery.data import rows
from machinery.run import crash, logs
from tests import kit


def test_a_nan_stops_the_run_and_leaves_its_rows_behind(tokenizer, tmp_path, capsys, monkeypatch):
    """The message names step and number; the rows that were being worked on are a .jsonl file that
    --data_path takes. Where nothing is known of rows, as in an evaluation, none is written."""
    monkeypatch.setattr(crash, "finish", lambda args, code: sys.exit(code))
    args = ppo.get_args(["--preset", "toy", "--output_dir", str(tmp_path)])
    lines = [{"prompt": f"Why {n}?", "completion": " So.", "topic": 7} for n in range(2)]
    crash.stop_if_not_finite(args, {"step": 6, "values": 1.0}, lines)
    with pytest.raises(SystemExit):
        logs.write_record(args, {"step": 0, "eval_loss": float("nan")}, ["step"])
    assert not list(tmp_path.iterdir())
    capsys.readouterr()
    wrong = {"values": float("nan"), "reward": float("inf"), "entropy": 1.0}
    with pytest.raises(SystemExit) as stop:
        crash.stop_if_not_finite(args, {"step": 7, **wrong}, lines)
    assert stop.value.code == 1
    assert "step 7: values, reward not finite" in capsys.readouterr().out
    file = tmp_path / "nonfinite_rank0.jsonl"
    assert kit.read_lines(file) == [{**row, "step": 7} for row in lines]
    again = ppo.get_args(["--preset", "toy", "--data_path", str(file), "--data_split", "0,0,1"])
    train, held_out = rows.load_rows(again, rows.open_sources(again, "ppo"), tokenizer, 32)
    assert sorted([*train["prompt"], *held_out["prompt"]]) == ["Why 0?", "Why 1?"]
    assert json.loads(train[0]["extra"])["topic"] == 7
