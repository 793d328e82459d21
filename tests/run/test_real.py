"""Real dialogues (Anthropic's HH-RLHF), where the folder is at hand: the three steps in sequence,
two ranks, ZeRO-3.

The toy's architecture and tokenizer, from random weights; a few steps each, as a user would start
them.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def outputs(hh, tmp_path_factory):
    """Returns the folder with sft, reward and ppo, each begun from what the one before left."""
    base = tmp_path_factory.mktemp("hh")
    (base / "hh").mkdir()
    for name, count in (("train", 600), ("test", 24)):
        with open(hh / f"{name}.jsonl") as lines:
            (base / f"hh/{name}.jsonl").write_text(
                "".join(line for line, _ in zip(lines, range(count)))
            )
    common = (
        f"--preset toy --data_path {base}/hh --data_split 2,4,4 --zero_stage 3 "
        "--num_warmup_steps 2 --per_device_eval_batch_size 12"
    )
    for script, flags in {
        "sft": "--max_steps 16 --max_seq_len 256 --per_device_train_batch_size 4 --num_samples 1",
        "reward": f"--model_name_or_path {base}/sft --max_steps 16 --max_seq_len 256 "
        "--per_device_train_batch_size 4",
        "ppo": f"--actor_model_name_or_path {base}/sft --critic_model_name_or_path {base}/reward "
        "--max_steps 4 --num_eval_prompts 12 --max_prompt_seq_len 128 --max_answer_seq_len 24 "
        "--per_device_generation_batch_size 4 --per_device_training_batch_size 4",
    }.items():
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc_per_node",
                "2",
                str(ROOT / f"{script}.py"),
                *common.split(),
                *flags.split(),
                "--log_steps",
                "1",
                "--output_dir",
                str(base / script),
            ],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "HF_DATASETS_CACHE": str(base / "cache"),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            },
        )
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return base


@pytest.mark.parametrize(
    "script, key", [("sft", "eval_loss"), ("reward", "loss"), ("ppo", "kl_k3")]
)
def test_the_three_steps_run_on_real_dialogues(outputs, script, key):
    """No number is NaN or infinite; SFT's held-out loss falls; the actor moves away from the
    reference."""
    records = [
        json.loads(line) for line in (outputs / script / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(
        math.isfinite(value)
        for record in records
        for value in record.values()
        if isinstance(value, float)
    )
    values = [record[key] for record in records if key in record]
    assert {
        "sft": values[-1] < values[0] - 0.5,
        "reward": len(values) == 16,
        "ppo": values[0] == 0 < values[-1],
    }[script], values


@pytest.mark.parametrize(
    "folder, kind",
    [
        ("sft", AutoModelForCausalLM),
        ("reward", AutoModelForSequenceClassification),
        ("ppo", AutoModelForCausalLM),
        ("ppo/ema", AutoModelForCausalLM),
        ("ppo/critic", AutoModelForSequenceClassification),
    ],
)
def test_what_they_leave_loads_in_stock_transformers(outputs, folder, kind):
    """Offline, with nothing of ours: weights, config and tokenizer."""
    model, info = kind.from_pretrained(outputs / folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = AutoTokenizer.from_pretrained(outputs / folder)(
        "Human: Why is the sky blue?", return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        assert model.eval()(ids).logits.isfinite().all()
