"""What each monitor's file holds is metrics.jsonl, step for step."""

import csv
import json
import subprocess
import sys

import pytest

from tests.kit import ROOT


def csv_history(folder):
    """{metric: {step: value}} in DeepSpeed's CSV files."""
    found = {}
    for file in folder.glob("*.csv"):
        (_, name), *lines = csv.reader(file.read_text().splitlines())
        found[f"train/{name}"] = {int(step): float(value) for step, value in lines}
    return found


def test_a_monitor_holds_every_metric_at_its_step(tmp_path):
    """DeepSpeed's own events count samples, and W&B drops what comes at a lower number than the
    last: all of ours, once. Two rows a step and four steps: samples are not steps."""
    settings = json.loads((ROOT / "ds_config.json").read_text())
    settings["csv_monitor"]["enabled"] = True
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    pairs = [{"prompt": f"{i}?", "response": f" {i}."} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    flags = """--data_path rows.jsonl --data_split 1,0,0 --ds_config ds.json --output_dir out
                --max_steps 4 --eval_steps 2 --log_steps 1 --num_samples 0
                --per_device_train_batch_size 2"""
    command = [sys.executable, str(ROOT / "sft.py"), "--preset", "toy", *flags.split()]
    command += ["--model_name_or_path", str(ROOT / "toy/model")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    logged = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").open()]
    assert [row["step"] for row in logged] == [0, 1, 2, 3, 4]
    found = csv_history(tmp_path / "out/run")
    assert not any("Samples" in name for name in found)
    for row in logged:
        for name in {"loss", "eval_loss", "learning_rate", "grad_norm"} & row.keys():
            assert found[f"train/{name}"][row["step"]] == pytest.approx(row[name], rel=1e-5)
