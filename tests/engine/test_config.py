"""DeepSpeed's config: one function writes it."""

import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import get_timers_config

from machinery import flags
from tests.runs import config

TO_CPU = {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_zero_stage_has_a_config(stage):
    """Offloading is asked of DeepSpeed only where that stage has it: weights under stage 3,
    optimizer states wherever they are sharded. A frozen model has nothing to optimise."""
    asked = ["--zero_stage", str(stage)]
    asked += ["--adam_offload"] * (stage > 0) + ["--offload"] * (stage == 3)
    for train in (True, False):
        made = config(*asked, train=train)
        zero = made["zero_optimization"]
        assert zero["stage"] == stage and zero["reduce_scatter"] is True
        assert zero.get("offload_param") == (TO_CPU if stage == 3 else None)
        assert zero.get("offload_optimizer") == (TO_CPU if stage and train else None)
        assert ("gradient_clipping" in made) == train
        bf16 = config(*asked[:2], "--dtype", "bf16", train=train)["zero_optimization"]
        assert bf16["stage"] == (max(stage, 1) if train else stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_summed_in_fp32_where_there_is_a_sum(stage):
    """In bf16. With --adam_offload DeepSpeed keeps the sum of stages 1 and 2 on the device, which a
    single micro-batch does not need. tools/estimate.py counts by this."""
    asked = "--dtype", "bf16", "--zero_stage", str(stage)
    for more, single in (((), True), (("--adam_offload",), False)):
        summed = ["data_types" in config(*asked, *more, micro_steps=n) for n in (1, 2)]
        assert summed == [single, True]
    assert "data_types" not in config(*asked, train=False) | config("--dtype", "fp32")


@pytest.mark.parametrize("stage, overlaps", [(1, False), (2, False), (3, True)])
def test_gradients_are_reduced_as_deepspeed_does_by_default(stage, overlaps):
    """At stage 2 with overlap_comm a second stream reads gradients that other ranks may free: they
    may be overwritten. Nor does DeepSpeed's timer wait for the device at each forward."""
    made = config("--zero_stage", str(stage))
    assert DeepSpeedZeroConfig(**made["zero_optimization"]).overlap_comm is overlaps
    assert get_timers_config(made).enabled is False


def test_deepcompile_is_for_engines_that_train(monkeypatch):
    monkeypatch.setattr(get_accelerator(), "device_name", lambda *_: "cuda")
    monkeypatch.setattr(flags, "lacks_nvcc", bool)
    asked = "--deepcompile", "--dtype", "fp32"
    assert config(*asked)["compile"] == {"deepcompile": True}
    assert "compile" not in config(*asked, train=False)


def test_a_layer_is_gathered_while_the_one_before_it_computes():
    """DeepSpeed's coordinator gathers ahead until it has as many numbers. A layer of Llama-2-7B has
    202 million: 4 x 4096^2 of attention, 3 x 4096 x 11008 of the MLP. With 5e7 q, k and v were
    there, and the other 150 million were waited for."""
    zero = config()["zero_optimization"]
    layer = 4 * 4096**2 + 3 * 4096 * 11008
    assert layer < zero["stage3_prefetch_bucket_size"] < zero["stage3_max_live_parameters"] - layer
