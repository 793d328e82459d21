"""The benchmark and `make gpu-check`, on tiny sizes: their rows are commands that our scripts take,
and what they print is what was measured."""

import importlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import kit
from tools import bench

sys.path.insert(0, str(kit.ROOT / "tools"))  # for what these programs import from beside them


@pytest.mark.parametrize("row", bench.CPU + bench.REAL + bench.GPU, ids=lambda row: row.name)
def test_a_row_is_a_command_that_its_script_takes(row, tmp_path):
    """What one rank computes in a step, times ranks and accumulation, is what the rate counts."""
    if row.script == "decode":
        assert {"ours", "generate"} <= {*row.sides.split()}
        return
    for folder in (row.model, f"{row.model}-score"):
        kit.tiny_config(max_position_embeddings=4096).save_pretrained(tmp_path / folder)
    for dtype in row.dtypes.split():
        flags = bench.flags_of(row, tmp_path, dtype)
        args = importlib.import_module(row.script).get_args(flags)
        rows = row.batch // row.ranks // row.accumulation
        batch = "per_device_train_batch_size"
        if row.script == "ppo":
            batch = "per_device_generation_batch_size"
            assert args.samples_per_prompt == row.samples and rows % row.samples == 0
        assert getattr(args, batch) == args.per_device_eval_batch_size == rows
        assert args.gradient_accumulation_steps == row.accumulation and args.dtype == dtype


def test_a_pretrained_model_is_the_same_for_both_sides(tmp_path, monkeypatch):
    """Its weights are those of the folder, the head of its reward model is drawn once for all, and
    padding is not EOS: TRL's PPO masks by `ids != pad`, so that ends of turns would be masked."""
    import bench_inside

    monkeypatch.setenv("RLHF_HH", str(kit.ROOT / "recipes/toy/data"))
    folder = shutil.copytree(kit.base() / "models/actor", tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    heads = []
    for work in (tmp_path / "first", tmp_path / "second"):
        work.mkdir()
        rows = [dict(model="real", script="sft", data=6)]
        bench_inside.prepare(work, json.dumps(rows), "4", str(folder))
        expected = kit.weights(folder)
        torch.testing.assert_close(kit.weights(work / "real"), expected, rtol=0, atol=0)
        judge = AutoModelForSequenceClassification.from_pretrained(work / "real-score")
        backbone = judge.model.state_dict()
        assert all(expected[f"model.{name}"].equal(backbone[name]) for name in backbone)
        heads.append(judge.score.weight)
        tokenizer = AutoTokenizer.from_pretrained(work / "real")
        assert tokenizer.pad_token_id == judge.config.pad_token_id != tokenizer.eos_token_id
        assert len((work / "data-6/train.jsonl").read_text().splitlines()) == 6
    assert torch.equal(*heads)


def test_the_table_compares_turn_by_turn():
    """By hand: two rounds of 12 and 15 against 10 make 1.2 and 1.5. At 4 GFLOP a token, and 100
    GFLOP/s, 25 tokens/s are the limit; reading 0.05 s a token makes it 20."""
    common = dict(dtype="fp32", unit="tokens/s", wall=3.0, gb=1.5)
    records = [dict(common, name="machine", side="limit", rate=100.0)]
    for ours in (12.0, 15.0):
        records.append(dict(common, name="sft", side="ours", rate=ours, flops=4e9))
        records.append(dict(common, name="sft", side="old", rate=10.0, flops=4e9))
    line = next(line for line in bench.table(records).splitlines() if "| sft |" in line)
    assert "| 13.5 tokens/s | old 10.0 tokens/s | 1.350 (1.200, 1.500) | 25.0 | 54% |" in line
    reads = dict(records[1], reading_seconds=0.05)
    assert bench.limit_of([reads], records[0]) == ["20.0", "60%"]


@pytest.mark.slow
def test_a_benchmark_runs_and_compares_two_checkouts(tmp_path):
    """A script on two ranks under ZeRO-3, and decoding, each twice in turn, at tiny sizes. The
    other checkout is this one, so the two sides learn the same."""
    program = [sys.executable, kit.ROOT / "tools/bench.py", "--smoke", "--rounds", 1]
    rows = ["--only", "zero3", "decode 8", "--dtype", "fp32"]
    given = ["--against", kit.ROOT, "--work", tmp_path]
    done = kit.start_command([*program, *rows, *given], limit=1800)
    assert done.code == 0, done
    records = kit.read_lines(tmp_path / "results.jsonl")
    sides = [f"{record['name']}: {record['side']}" for record in records]
    assert sides == "zero3: old,zero3: ours,decode 8 rows: old,decode 8 rows: ours".split(",")
    for old, ours in zip(records[::2], records[1::2]):
        assert old.get("quality") == ours.get("quality") and min(old["rate"], ours["rate"]) > 0
    assert done.out.count("| old ") == 2 and "generate" in done.out


# --------------------------------------------------------------------------------------------------
# make gpu-check
# --------------------------------------------------------------------------------------------------
def test_each_peak_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch, capsys):
    """DeepSpeed's hooks keep the engine of a run that has ended, so in one process the second peak
    would hold the first run's models, too. Other groups have a process each."""
    from tools import gpu_check

    launched = []
    monkeypatch.setattr(gpu_check, "launch", lambda base, part, *_: launched.append(part) or "")
    monkeypatch.setattr(gpu_check.kit, "base", lambda: tmp_path)  # it sets this
    monkeypatch.setattr(gpu_check.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--cpu", "grpo", "memory"])
    with pytest.raises(SystemExit) as left:
        gpu_check.main()
    assert left.value.code == 1 and "did not end" in capsys.readouterr().out  # nothing ran
    assert launched == ["reference", "grpo", *gpu_check.GROUPS["memory"]]


def group_of_check(base, part):
    """Makes the runs of a group of gpu_check.py, in a rank."""
    from tools import gpu_check

    gpu_check.worker(Path(base), part)


def checked(monkeypatch, capsys, *words, started=()):
    """Calls gpu_check.py's main() with these words. Returns its exit code and its last line.

    The ranks of the groups in `started` are started as it starts them, the others forked.
    """
    from tools import gpu_check

    launch = gpu_check.launch

    def launch_or_fork(base, part, ranks, accelerator, hosts=None):
        if part in started:
            return launch(base, part, ranks, accelerator, hosts)
        env, given = {"PRETEND": "1"} if "--pretend" in words else None, (str(base), part)
        return str(kit.fork(group_of_check, ranks, *given, env=env, meet="", limit=600))

    monkeypatch.setattr(gpu_check, "launch", launch_or_fork)
    monkeypatch.setattr(kit, "base", kit.base)  # main() changes it, and these variables
    monkeypatch.setenv("DS_ACCELERATOR", os.environ["DS_ACCELERATOR"])
    monkeypatch.setenv("PRETEND", "")
    monkeypatch.delenv("PRETEND")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
    with pytest.raises(SystemExit) as left:
        gpu_check.main()
    return left.value.code, json.loads(capsys.readouterr().out.splitlines()[-1])["gpu_check"]


@pytest.mark.slow
def test_gpu_check_runs_on_cpu_ranks(monkeypatch, capsys):
    """Its runs, its kernels and its decoding are those of a GPU, on another device."""
    words = ["--cpu", "attention", "decoding", "grpo"]
    code, found = checked(monkeypatch, capsys, *words, started=["attention"])
    assert code == 0 and found["ok, failed, not known"][:2] == [6, 0], found


@pytest.mark.slow
def test_gpu_check_pretends(monkeypatch, capsys):
    """It runs its list on this device: here LoRA, a resumed run among it, and decoding. Rows of
    kernels and of memory are not known there. Its ranks are forked here."""
    words = ["--pretend", "attention", "lora", "decoding"]
    code, found = checked(monkeypatch, capsys, *words)
    assert code == 0 and found["ok, failed, not known"] == [5, 0, 3], found
