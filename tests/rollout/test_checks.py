"""The checks of PPO's first step stop what must not be trained on, and let rounding pass."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from machinery import checks, ranks
from tests import kit


def first(dtype="fp32", allow_mismatch=0):
    """Returns the stand-in of a run that is at its first step."""
    args = SimpleNamespace(dtype=dtype, allow_mismatch=allow_mismatch)
    return SimpleNamespace(args=args, step=1, finish=lambda code: sys.exit(code))


def scored(gap, off, tokens=200):
    """Returns a micro-batch of 4 responses. Of all tokens `off` were drawn with other log-probs."""
    old = torch.full((4, tokens // 4), -1.0)
    sampled = old.clone()
    sampled.view(-1)[:off] += gap
    mask = torch.ones_like(old)
    per_token = {"sampled_logprobs": sampled}
    return SimpleNamespace(old_logprobs=old, response_mask=mask, per_token=per_token)


def stops(run, *batches, check=checks.stop_unless_sampled_as_scored):
    """Returns whether the check ends the run."""
    try:
        check(run, batches)
    except SystemExit as stop:
        assert stop.code == 1
        return True
    return False


def test_sampling_and_scoring_give_a_token_one_logprob(capsys):
    """A cache, a mask or a position that is wrong for a model shows here, before anything is
    trained. A few tokens may be off by much: in 16 bits rounding does that. Many may not: 5 % of
    them, and three standard deviations of their number, here 20 of 200; in fp32 0.5 %, here 5.

    A model that is coarse by itself is off without a mistake of ours, and another policy may be
    meant to sample: who knows better is warned, and goes on. Padding is not compared.
    """
    assert not stops(first("bf16"), scored(9.0, off=20)) and not stops(first(), scored(9.0, off=5))
    assert not stops(first("bf16"), scored(0.19, off=200)) and not capsys.readouterr().out
    assert stops(first(), scored(2e-3, off=6))
    assert stops(first("bf16"), scored(0.0, off=0), scored(0.21, off=36))
    assert "for 36 of 400 sampled tokens" in capsys.readouterr().out
    assert not stops(first(allow_mismatch=1), scored(9.0, off=200))
    assert "warning: step 1: for 200 of 200 sampled tokens" in capsys.readouterr().out
    batch = scored(9.0, off=40)
    batch.response_mask.view(-1)[:40] = 0
    assert not stops(first(), batch)


def one_rank_is_wrong():
    """In bf16, of 2 ranks: one has 24 of 200 tokens off, which is too many for it alone."""
    return stops(first("bf16"), scored(0.5, off=24 * (ranks.get_rank() == 1)))


def test_one_rank_that_samples_otherwise_stops_all():
    """On many ranks its tokens would be a small share of all."""
    assert kit.on_ranks(one_rank_is_wrong, 2) == [True, True]


@pytest.mark.parametrize(
    "dtype, ratio, wrong",
    [
        ("fp32", 1.00001, False),
        ("fp32", 1.001, True),
        ("bf16", 1.005, False),
        ("bf16", 0.95, True),
        ("fp32", math.nan, True),  # is above no limit, as any comparison with it is false
    ],
)
def test_one_token_of_many_whose_first_ratio_is_not_1_stops_the_run(dtype, ratio, wrong):
    """Their mean would be as good as 1. In another micro-batch, too; but not in the padding."""
    check, real = checks.stop_unless_one, torch.ones(1, 1000)
    sound, batch = (SimpleNamespace(response_mask=real, ratio=real.clone()) for _ in range(2))
    batch.ratio[0, 500] = ratio
    assert stops(first(dtype), batch, sound, check=check) == wrong
    if not math.isnan(ratio):
        batch.response_mask = real * (torch.arange(1000) != 500)
        assert not stops(first(dtype), sound, batch, check=check)
