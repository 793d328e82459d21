"""DeepSpeed 0.18.5, the oldest that is supported: what is done otherwise for it. What it cannot do
is refused: tests/run/test_flags.py.
"""

from tests.runs import config


def test_gradients_wait_for_the_last_micro_batch():
    """In bf16 at stage 1, 0.18.5 sums over the ranks before the last micro-batch is in, unless it
    is told not to. With later versions this saves memory: test_a_single_rank_reduces_nothing."""
    expected = {"enabled": True, "immediate_grad_update": True}
    assert config("--dtype", "bf16", "--zero_stage", "1")["bf16"] == expected
