"""DeepSpeed 0.18.5, the oldest that is supported: what is done otherwise for it. What it cannot do
is refused: tests/run/test_flags.py.
"""

import deepspeed
import pytest

import common
import sft

old = pytest.mark.parametrize("installed, is_old", [("0.18.5", True), ("0.19.0", False)])


@old
def test_gradients_wait_for_the_last_micro_batch(monkeypatch, installed, is_old):
    """In bf16 at stage 1, 0.18.5 sums over the ranks before the last micro-batch is in, unless it
    is told not to."""
    monkeypatch.setattr(deepspeed, "__version__", installed)
    args = sft.get_args(["--preset", "toy", "--dtype", "bf16", "--zero_stage", "1"])
    expected = {"enabled": True, **({"immediate_grad_update": True} if is_old else {})}
    assert common.ds_config(args, 1, 4)["bf16"] == expected
