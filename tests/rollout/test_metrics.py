"""What the log says of a rollout, by hand."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from machinery import checks, evaluation, metrics
from tests.conftest import micro_batch

ARGS = SimpleNamespace(compares_groups=True, has_critic=True)


def rollout(**changes):
    """Two responses and a filler."""
    given = dict(
        scores=torch.tensor([[1.0, 0.0], [3.0, 0.0], [9.0, 0.0]]),
        gold=torch.tensor([[1.0, 0.0]] * 3),
        ended=torch.tensor([1.0, 0.0, 1.0]),
        length=torch.tensor([1, 1, 2]),
        row_weight=torch.tensor([1.0, 1.0, 0.0]),
        response_mask=torch.tensor([[1.0, 0], [1, 0], [0, 0]]),
        raw_advantages=torch.tensor([[3.0, 9], [-3, 9], [9, 9]]),
        returns=torch.tensor([[2.0, 9], [-2, 9], [9, 9]]),
        old_values=torch.tensor([[1.0, 9], [-1, 9], [7, 9]]),
        old_logprobs=torch.tensor([[-1.0, 9], [-2, 9], [9, 9]]),
        ref_logprobs=torch.tensor([[-1.5, 9], [-3, 5], [5, 9]]),
        per_token=dict(sampled_logprobs=torch.tensor([[-1.5, 0], [-2, 0], [0, 0]])),
        entropy=torch.tensor([[0.5, 9], [1.5, 9], [9, 9]]),
    )
    given["shaped_scores"] = given["scores"] / 2  # what is trained on: scaled, or clipped
    given["score_clipped"] = torch.tensor([False, True, True])
    batch = micro_batch([0, 0, 1], **{**given, **changes})
    batch.responses[2]["row_weight"] = 0
    return batch


def test_what_a_rollout_was_like():
    """Means over responses, fillers left out; all else over real tokens only. Returns vary by 4 and
    returns - values by 1: the critic explains three quarters. That is no matter of the advantages,
    whose deviation is 3 here, as another estimator's may be. The one prompt's responses have 1 and
    3, and are trained on as 0.5 and 1.5: a deviation of 0.5, or of sqrt(0.5) where n - 1 divides.
    The second was cut off."""
    batch = rollout()
    for response, score in zip(batch.responses, (0.5, 1.5, 9.0)):
        response["reward_1_format"] = score
    assert metrics.rollout_means(ARGS, [batch]) == pytest.approx(
        {
            "reward": 2.0,
            "reward_1_format": 1.0,
            "reward_std": 0.5,
            "clip_reward_fraction": 0.5,
            "truncated_reward": 3.0,
            "group_std": 0.5**0.5,
            "gold": 1.0,
            "kl": 0.75,  # 0.5 and 1 nat
            "kl_k3": (math.exp(-0.5) - 0.5 + math.exp(-1.0)) / 2,
            "response_length": 1.0,
            "eos_rate": 0.5,
            "entropy": 1.0,
            "advantage_std": 3.0,
            "explained_variance": 0.75,
            "equal_groups": 0.0,
            # scoring says -1 and -2, sampling -1.5 and -2; e^0.5 is outside of 0.8 .. 1.2
            "sampling_gap": 0.5,
            "sampling_kl": -0.25,
            "sampling_outside": 0.5,
        }
    )


STORED = "ref_logprobs scores gold old_values old_logprobs entropy sampled_logprobs mine".split()


@pytest.mark.parametrize("name", STORED)
def test_no_stored_number_that_is_not_finite_is_trained_on(name):
    """It is named, also where it is a sampler's own, or a field of a fork's."""
    batch = rollout()
    batch.mine = torch.zeros(3, 2)
    batch.per_token.get(name, getattr(batch, name, None))[1, 0] = math.nan
    run = SimpleNamespace(stop_unless_finite=lambda numbers: run.seen.update(numbers), seen={})
    checks.stop_unless_rollout_is_finite(run, [batch])
    assert [each for each, value in run.seen.items() if not math.isfinite(value)] == [name]


def test_what_updates_report_are_means_over_their_tokens():
    """Two updates of a rollout: approx_kl is half of what the first one has moved. What stands in
    the padding counts nowhere; --target_kl looks at the newest update alone."""
    means, mask = metrics.TokenMeans(), torch.tensor([[1.0, 1.0, 0.0]])
    for kl in (0.0, 0.3):
        values = torch.tensor([[kl, 3 * kl, 99.0]])
        batch = micro_batch([0], response_mask=mask, ratio=1 + values)
        means.add(batch, {"actor_loss": values, "critic_loss": mask, "approx_kl": values})
        last = means.end_update()
    assert last["approx_kl"] == pytest.approx(0.6)
    found = {"loss": 1.3, "actor_loss": 0.3, "critic_loss": 1, "approx_kl": 0.3, "ratio_max": 1.9}
    assert means.of_all_updates() == pytest.approx(found)


@pytest.mark.parametrize(
    "scores, equal", [([0.0, 0.0, 9.0], 1), ([0.0, 1.0, 0.0], 0), ([2.5, 2.5, 0.0], 1)]
)
def test_a_prompt_whose_responses_have_equal_rewards_is_counted(scores, equal):
    """A filler's score says nothing. GRPO's advantages are 0 there."""
    batch = rollout(shaped_scores=torch.tensor(scores)[:, None])
    assert metrics.group_means([batch])["equal_groups"] == equal


def test_pass_at_k_against_all_draws():
    """Of 6 responses to a prompt every choice of k is looked at: the estimate is the share of
    choices with a right one, or the mean of their largest reward. (That [Chen 2021] eq. 1 says the
    same is shown beside the function.)"""
    for rewards in ([0, 1, 0, 0, 1, 0], [0] * 6, [1] * 6, [0.5, -1, 2, 2, 0, 1]):
        for k in range(1, 7):
            draws = [max(draw) for draw in itertools.combinations(rewards, k)]
            assert metrics.best_of(rewards, k) == pytest.approx(sum(draws) / len(draws))


def test_an_evaluation_of_several_samples_reports_pass_at_k():
    """Two prompts with four responses each: one right of four, and four. The interval is over the
    prompts. With rewards of other sizes it is the best of k."""
    responses = [dict(reward=float(i in (0, 4, 5, 6, 7)), kl=0.0) for i in range(8)]
    found = evaluation.means_of(responses, 4)
    assert [found[f"eval_pass_at_{k}"] for k in (1, 2, 4)] == [0.625, 0.75, 1.0]
    assert found["eval_reward"] == 0.625 and found["eval_pass_at_4_ci"] == [1.0, 1.0]
    low, high = found["eval_pass_at_1_ci"]  # of 0.25 and 1: s = 0.53, and s / sqrt(2) = 0.375
    assert (low, high) == pytest.approx((0.625 - 1.96 * 0.375, 0.625 + 1.96 * 0.375))
    responses[0]["reward"] = 3.0
    found = evaluation.means_of(responses, 4)
    assert found["eval_best_of_4"] == 2.0 and "eval_pass_at_4" not in found
    assert [*evaluation.means_of(responses, 1)] == ["eval_reward", "eval_kl"]


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("equal_groups", 1, "are equal (mean 0.5): nothing to learn from"),
        ("equal_groups", 0.9, ""),
        ("reward_std", 0, "are equal (mean 0.5): nothing to learn from"),
        # a function whose scores go to 10 or 100 would teach little, and nothing else would say so
        ("clip_reward_fraction", 0.25, "--clip_reward changes 25% of the rewards"),
    ],
)
def test_a_first_step_that_teaches_nothing_is_named(name, value, says, capsys):
    """Where no responses are compared with those to the same prompt, all of them are. Later steps
    are not: a few groups may be equal by chance, and the log has their share."""
    logged = {"reward": 0.5, "reward_std": 1.0, "clip_reward_fraction": 0.0, name: value}
    for step in (2, 1):
        checks.warn_of_scores(SimpleNamespace(step=step, args=ARGS), logged)
        said = capsys.readouterr().out
        assert says in said if says and step == 1 else not said
