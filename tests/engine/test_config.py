"""DeepSpeed's config: one function writes it."""

import pytest

from tests.runs import config


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
