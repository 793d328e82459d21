"""The checks of PPO's first step stop what must not be trained on, and let rounding pass."""

import sys
from types import SimpleNamespace

import pytest
import torch

from helpers import checks


def first(dtype="fp32"):
    """Returns the stand-in of a run that is at its first step."""
    model = SimpleNamespace(config=SimpleNamespace(model_type="mamba"))
    engine, args = SimpleNamespace(module=model), SimpleNamespace(dtype=dtype)
    return SimpleNamespace(args=args, step=1, engine=engine, finish=lambda code: sys.exit(code))


def scored(gap):
    """Returns a micro-batch of 2 responses, R = 3. One token was drawn with another log-prob."""
    old = torch.full((2, 3), -1.0)
    sampled = old.clone()
    sampled[1, 0] += gap
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    tokens = {"sampled_logprobs": sampled}
    return SimpleNamespace(old_logprobs=old, response_mask=mask, tokens=tokens)


def test_sampling_and_scoring_give_a_token_one_logprob(capsys):
    """A cache, a mask or a position that is wrong for a model shows here, before anything is
    trained. The mean over a response counts, here half of the gap."""
    checks.stop_unless_sampled_as_scored(first(), [scored(0.0), scored(1e-4)])
    checks.stop_unless_sampled_as_scored(first("bf16"), [scored(0.0), scored(0.1)])
    with pytest.raises(SystemExit) as stop:
        checks.stop_unless_sampled_as_scored(first(), [scored(0.0), scored(0.1)])
    assert stop.value.code == 1 and "A mamba model" in capsys.readouterr().out


def test_padding_and_masked_tokens_are_not_compared():
    batch = scored(0.0)
    batch.tokens["sampled_logprobs"][1, 2] = 9.0
    checks.stop_unless_sampled_as_scored(first(), [batch])


def test_a_first_ratio_that_is_nan_is_not_1():
    """As any comparison with NaN is false, one that asks for "too large" would let it pass."""
    batch = SimpleNamespace(response_mask=torch.ones(1, 2), ratio=torch.tensor([[1.0, 1.00001]]))
    checks.stop_unless_one(first(), [batch])
    batch.ratio[0, 1] = torch.nan
    with pytest.raises(SystemExit):
        checks.stop_unless_one(first(), [batch])
