"""Real dialogues (Anthropic's HH-RLHF), where the folder is at hand: the three steps in sequence,
two ranks, ZeRO-3, from the toy's architecture and random weights."""

import math

import pytest

from tests import kit

STEPS = {
    "sft": "--max_steps 16 --max_seq_len 256 --per_device_train_batch_size 4 --num_samples 1",
    "reward": "--model_name_or_path BASE/sft --max_steps 16 --max_seq_len 256 "
    "--per_device_train_batch_size 4",
    "ppo": "--actor_model_name_or_path BASE/sft --critic_model_name_or_path BASE/reward "
    "--max_steps 4 --num_eval_prompts 12 --max_prompt_seq_len 128 --max_answer_seq_len 24 "
    "--per_device_generation_batch_size 4 --per_device_training_batch_size 4",
}


@pytest.mark.slow
def test_the_three_steps_run_on_real_dialogues(hh, tmp_path):
    """No number is NaN or infinite; SFT's held-out loss falls; the actor moves away from the
    reference. Each step begins with what the one before has left."""
    (tmp_path / "hh").mkdir()
    for name, count in (("train", 600), ("test", 24)):
        lines = (hh / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"hh/{name}.jsonl").write_text("".join(lines[:count]))
    common = f"--preset toy --data_path {tmp_path}/hh --data_split 2,4,4 --zero_stage 3"
    common += " --num_warmup_steps 2 --per_device_eval_batch_size 12 --log_steps 1"
    found = {}
    for script, flags in STEPS.items():
        flags = f"{common} {flags}".replace("BASE", str(tmp_path)).split()
        done = kit.run(script, *flags, ranks=2, folder=tmp_path / script, limit=600)
        found[script] = kit.metrics(done.folder)
        numbers = [x for line in found[script] for x in line.values() if isinstance(x, float)]
        assert all(map(math.isfinite, numbers))
    losses = [line["eval_loss"] for line in found["sft"] if "eval_loss" in line]
    assert losses[-1] < losses[0] - 0.5 and len(found["reward"]) > 16
    kl = [line["kl_k3"] for line in found["ppo"] if "kl_k3" in line]
    assert kl[0] == 0 < kl[-1]
