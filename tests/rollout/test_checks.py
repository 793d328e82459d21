"""The checks of PPO's first step stop what must not be trained on, and let rounding pass."""

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


def stops(run, *batches):
    """Returns whether the check ends the run."""
    try:
        checks.stop_unless_sampled_as_scored(run, batches)
    except SystemExit as stop:
        assert stop.code == 1
        return True
    return False


def test_sampling_and_scoring_give_a_token_one_logprob(capsys):
    """A cache, a mask or a position that is wrong for a model shows here, before anything is
    trained. A few tokens may be off by much: in 16 bits rounding does that. Many may not: 5 % of
    them, and three standard deviations of their number, here 20 of 200; in fp32 0.5 %, here 5."""
    assert not stops(first("bf16"), scored(9.0, off=20)) and not stops(first(), scored(9.0, off=5))
    assert not stops(first("bf16"), scored(0.19, off=200)) and not capsys.readouterr().out
    assert stops(first(), scored(2e-3, off=6))
    assert stops(first("bf16"), scored(0.0, off=0), scored(0.21, off=36))
    assert "for 36 of 400 sampled tokens" in capsys.readouterr().out


def test_who_knows_better_is_warned_and_goes_on(capsys):
    """A model that is coarse by itself in 16 bits is off without a mistake of ours, and another
    policy may be meant to sample."""
    assert not stops(first(allow_mismatch=1), scored(9.0, off=200))
    assert "warning: step 1: for 200 of 200 sampled tokens" in capsys.readouterr().out


def test_padding_and_masked_tokens_are_not_compared():
    batch = scored(9.0, off=40)
    batch.response_mask.view(-1)[:40] = 0
    assert not stops(first(), batch)


def one_rank_is_wrong():
    """In bf16, of 2 ranks: one has 24 of 200 tokens off, which is too many for it alone."""
    return stops(first("bf16"), scored(0.5, off=24 * (ranks.get_rank() == 1)))


def test_one_rank_that_samples_otherwise_stops_all():
    """On many ranks its tokens would be a small share of all."""
    assert kit.on_ranks(one_rank_is_wrong, 2) == [True, True]


@pytest.mark.parametrize("dtype, sound, wrong", [("fp32", 1.00001, 1.001), ("bf16", 1.005, 1.05)])
def test_one_token_of_many_whose_first_ratio_is_not_1_stops_the_run(dtype, sound, wrong):
    """Their mean would be as good as 1."""
    ratio, mask = torch.ones(1, 1000), torch.ones(1, 1000)
    batch = SimpleNamespace(response_mask=mask, ratio=ratio)
    ratio[0, 500] = sound
    checks.stop_unless_one(first(dtype), [batch])
    ratio[0, 500] = wrong
    with pytest.raises(SystemExit):
        checks.stop_unless_one(first(dtype), [batch])
    mask[0, 500] = 0  # padding
    checks.stop_unless_one(first(dtype), [batch])


def test_a_first_ratio_that_is_nan_is_not_1():
    """As any comparison with NaN is false, one that asks for "too large" would let it pass."""
    batch = SimpleNamespace(response_mask=torch.ones(1, 2), ratio=torch.tensor([[1.0, 1.00001]]))
    checks.stop_unless_one(first(), [batch])
    batch.ratio[0, 1] = torch.nan
    with pytest.raises(SystemExit):
        checks.stop_unless_one(first(), [batch])
