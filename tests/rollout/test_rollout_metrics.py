"""What the log says of a rollout, by hand."""

from types import SimpleNamespace

import pytest
import torch

from machinery.rollout import checks, rollout_metrics
from tests.conftest import micro_batch


def rollout(**changes):
    """Two responses and a filler."""
    given = dict(
        scores=torch.tensor([[1.0, 0.0], [3.0, 0.0], [9.0, 0.0]]),
        kl=dict(
            k1=torch.tensor([[0.5, 0.0], [1.0, 0.5], [9.0, 0.0]]),
            k3=torch.tensor([[0.2, 0.0], [0.4, 0.0], [9.0, 0.0]]),
        ),
        gold=torch.tensor([[1.0, 0.0]] * 3),
        ended=torch.tensor([1.0, 0.0, 1.0]),
        length=torch.tensor([1, 1, 2]),
        row_weight=torch.tensor([1.0, 1.0, 0.0]),
        response_mask=torch.tensor([[1.0, 0], [1, 0], [0, 0]]),
        raw_advantages=torch.tensor([[3.0, 9], [-3, 9], [9, 9]]),
        returns=torch.tensor([[2.0, 9], [-2, 9], [9, 9]]),
        old_values=torch.tensor([[1.0, 9], [-1, 9], [7, 9]]),
        old_logprobs=torch.tensor([[-1.0, 9], [-2, 9], [9, 9]]),
        tokens=dict(sampled_logprobs=torch.tensor([[-1.5, 0], [-2, 0], [0, 0]])),
        entropy=torch.tensor([[0.5, 9], [1.5, 9], [9, 9]]),
    )
    batch = micro_batch([0, 0, 1], **{**given, **changes})
    batch.responses[2]["row_weight"] = 0
    return batch


def test_what_a_rollout_was_like():
    """Means over responses, fillers left out; all else over real tokens only. Returns vary by 4 and
    returns - values by 1: the critic explains three quarters. That is no matter of the advantages,
    whose deviation is 3 here, as another estimator's may be. The one prompt's responses differ."""
    args = SimpleNamespace(compares_groups=True)
    assert rollout_metrics.of_all_ranks(args, [rollout()]) == pytest.approx(
        {
            "reward": 2.0,
            "gold": 1.0,
            "kl": 1.0,
            "kl_k3": 0.3,
            "response_length": 1.0,
            "eos_rate": 0.5,
            "entropy": 1.0,
            "advantage_std": 3.0,
            "explained_variance": 0.75,
            "equal_groups": 0.0,
            "sampling_gap": 0.5,
        }
    )


@pytest.mark.parametrize(
    "scores, equal", [([0.0, 0.0, 9.0], True), ([0.0, 1.0, 0.0], False), ([2.5, 2.5, 0.0], True)]
)
def test_a_judge_that_finds_all_equal_is_named(scores, equal, capsys):
    """A filler's score says nothing."""
    batch = rollout(scores=torch.tensor(scores)[:, None])
    checks.warn_of_equal_scores([batch])
    assert ("all scores of the first step are" in capsys.readouterr().out) == equal
    assert rollout_metrics.equal_groups([batch]) == equal
