"""The benchmark and `make gpu-check`, on tiny sizes: their rows are commands that our scripts take,
and what they print is what was measured."""

import importlib
import json
import shutil
import sys

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import kit
from tools import bench

sys.path.insert(0, str(kit.ROOT / "tools"))  # for what these programs import from beside them


@pytest.mark.parametrize("row", bench.CPU + bench.REAL + bench.GPU, ids=lambda row: row.name)
def test_a_row_is_a_command_that_its_script_takes(row, tmp_path):
    """What one rank computes in a step, times the ranks, is what the rate counts."""
    if row.script == "decode":
        assert {"ours", "generate"} <= {*row.sides.split()}
        return
    for folder in (row.model, f"{row.model}-score"):
        kit.tiny_config(max_position_embeddings=4096).save_pretrained(tmp_path / folder)
    for dtype in row.dtypes.split():
        flags = bench.flags_of(row, tmp_path, dtype)
        args = importlib.import_module(row.script).get_args(flags)
        rows = row.batch // row.ranks
        batch = "per_device_train_batch_size"
        if row.script == "ppo":
            batch = "per_device_generation_batch_size"
            assert args.samples_per_prompt == row.samples and rows % row.samples == 0
        assert getattr(args, batch) == args.per_device_eval_batch_size == rows
        assert args.gradient_accumulation_steps == 1 and args.dtype == dtype


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
    """By hand: two rounds of 12 and 15 against 10 make 1.2 and 1.5. Of their two steps of 30 tokens
    each the fastest took 1 and 2 s, and 3 and 3 s: 20 against 10. At 4 GFLOP a token, and 100
    GFLOP/s, 25 tokens/s are the limit; reading 0.05 s a token makes it 20."""
    common = dict(dtype="fp32", unit="tokens/s", wall=3.0, gb=1.5, work=60)
    records = [dict(common, name="machine", side="limit", rate=100.0)]
    for ours, seconds in ((12.0, (1, 4)), (15.0, (2, 2))):
        mine = dict(common, name="sft", side="ours", rate=ours, flops=4e9, seconds=seconds)
        records += [mine, dict(mine, side="old", rate=10.0, seconds=(3, 3))]
    line = next(line for line in bench.table(records).splitlines() if "| sft |" in line)
    assert "| 13.5 tokens/s | old 10.0 tokens/s | 1.350 (1.200, 1.500) | 2.000 |" in line
    assert "| 25.0 | 54% |" in line
    assert bench.fastest(records[1::2], records[2:3]) == "1.200"  # a second round that failed
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


def checked(*words):
    """Returns the exit code of tools/gpu_check.py with these words, and its counts of rows."""
    done = kit.start_command([sys.executable, kit.ROOT / "tools/gpu_check.py", *words])
    [last] = done.out.splitlines()[-1:]
    return done.code, json.loads(last)["gpu_check"]["ok, failed, not known"]


@pytest.mark.slow
def test_gpu_check_runs_on_cpu_ranks():
    """Its runs, its kernels and its decoding are those of a GPU, on another device."""
    code, found = checked("--cpu", "attention", "decoding", "grpo")
    assert code == 0 and found[:2] == [6, 0]


@pytest.mark.slow
def test_gpu_check_pretends():
    """It runs its list on this device: here LoRA, a resumed run among it, and decoding. Rows of
    kernels and of memory are not known there."""
    assert checked("--pretend", "attention", "lora", "decoding") == (0, [5, 0, 3])
