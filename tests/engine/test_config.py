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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_summed_in_fp32_where_there_is_a_sum(stage):
    """In bf16. With --adam_offload DeepSpeed keeps the sum of stages 1 and 2 on the device, which a
    single micro-batch does not need. tools/estimate.py counts by this."""
    flags = "--dtype", "bf16", "--zero_stage", str(stage)
    for more, single in (((), True), (("--adam_offload",), False)):
        summed = ["data_types" in config(*flags, *more, micro_steps=n) for n in (1, 2)]
        assert summed == [single, True]
    assert "data_types" not in config(*flags, train=False) | config("--dtype", "fp32")
