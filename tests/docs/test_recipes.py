"""What docs/runs.md says of presets and batches (the recipes' numbers are in tests/run)."""

import pytest

import common
import ppo
import reward
import sft

SCRIPTS = {"sft": sft, "reward": reward, "ppo": ppo}
# what llama2/run_llama2_7b.sh have in other numbers than DeepSpeed-Chat's scripts for OPT
LLAMA = {
    "sft": dict(num_train_epochs=4, per_device_train_batch_size=4),
    "reward": dict(learning_rate=9.65e-6, per_device_train_batch_size=8),
    "ppo": dict(
        actor_weight_decay=0.1,
        critic_weight_decay=0.1,
        enable_ema=0,
        per_device_generation_batch_size=1,
        per_device_training_batch_size=1,
    ),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_llama_recipe_differs_from_opts_where_it_says(script):
    args = SCRIPTS[script].get_args(["--preset", "llama-2-7b"])
    assert {name: getattr(args, name) for name in LLAMA[script]} == LLAMA[script]


@pytest.mark.parametrize("script, rows, stage", [("sft", 64, 2), ("reward", 32, 1), ("ppo", 32, 2)])
def test_eight_gpus_get_the_recipes_batches(script, rows, stage):
    """The recipe's stage 0 is 1 in bf16: docs/deepspeed.md."""
    args = SCRIPTS[script].get_args("--preset opt-1.3b --dtype bf16".split())
    name = "training" if script == "ppo" else "train"
    size = getattr(args, f"per_device_{name}_batch_size")
    config = common.ds_config(args, args.zero_stage, size, args.gradient_accumulation_steps)
    batch = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert batch * 8 == rows and config["zero_optimization"]["stage"] == stage
