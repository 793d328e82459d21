"""DeepSpeed's config: one function writes it."""

import json

import pytest

from tests import kit
from tests.runs import config


def test_flags_become_deepspeeds_config():
    """Batch sizes, stage, dtype, clipping and offloading come from the flags; ds_config.json has
    the rest; nobody has to keep two places in agreement."""
    plain = config("--dtype", "bf16", "--zero_stage", "2", "--max_grad_norm", "0.5")
    assert plain["bf16"]["enabled"] and "fp16" not in plain
    assert plain["gradient_clipping"] == 0.5
    assert plain["train_micro_batch_size_per_gpu"] == 4
    assert plain["gradient_accumulation_steps"] == 3
    shipped = json.loads((kit.ROOT / "ds_config.json").read_text())
    assert plain["zero_optimization"].items() >= shipped["zero_optimization"].items()
    assert not {"bf16", "fp16"} & set(config("--dtype", "fp32"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_zero_stage_has_a_config(stage):
    """Stage 3 shards weights, and sets reduce_scatter. Offloading is asked of DeepSpeed only where
    that stage has it: weights under stage 3, optimizer states wherever they are sharded. A frozen
    model has nothing to optimise."""
    flags = ["--zero_stage", str(stage)]
    flags += ["--adam_offload"] * (stage > 0) + ["--offload"] * (stage == 3)
    weights = {"device": "cpu", "pin_memory": True} if stage == 3 else None
    states = {"device": "cpu", "pin_memory": True} if stage else None
    for train in (True, False):
        made = config(*flags, train=train)
        zero = made["zero_optimization"]
        assert zero["stage"] == stage
        assert zero["reduce_scatter"] is True
        assert zero.get("offload_param") == weights
        assert zero.get("offload_optimizer") == (states if train else None)
        assert ("gradient_clipping" in made) == train
