"""What the log says of a rollout, by hand."""

import contextlib
import io
import json
import math
from types import SimpleNamespace

import pytest
import torch

import ppo
from machinery.rollout import checks, rollout_metrics
from tests import kit
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
    whose deviation is 3 here, as another estimator's may be. The one prompt's responses have 1 and
    3: they differ by a deviation of 1 from their mean, or of sqrt(2) where n - 1 divides. The
    second was cut off."""
    args = SimpleNamespace(compares_groups=True, has_critic=True)
    batch = rollout()
    for response, part in zip(batch.responses, (0.5, 1.5, 9.0)):
        response["reward_format"] = part
    assert ppo.rollout_means(args, [batch]) == pytest.approx(
        {
            "reward": 2.0,
            "reward_format": 1.0,
            "reward_std": 1.0,
            "truncated_reward": 3.0,
            "group_std": 2**0.5,
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


@pytest.mark.parametrize("name", [*rollout_metrics.STORED, "sampled_logprobs"])
def test_no_stored_number_that_is_not_finite_is_trained_on(name):
    """It is named, also where it is a sampler's own. What is kept of the rollout are rows for
    --data_path: prompt, response and the data's other columns, of fillers none."""
    batch = rollout(ref_logprobs=torch.zeros(3, 2))
    batch.tokens.get(name, getattr(batch, name, None))[1, 0] = float("nan")
    chat = [{"role": "user", "content": "Why?"}]
    for row, prompt in zip(batch.responses, ("Why?", json.dumps(chat), "Why?")):
        row.update(prompt=prompt, chat=prompt != "Why?", text=" So.", extra='{"total": 3}')
    seen = []
    run = SimpleNamespace(stop_unless_finite=lambda *given: seen.extend(given))
    rollout_metrics.stop_unless_finite(run, [batch])
    numbers, rows = seen
    assert [each for each, value in numbers.items() if not math.isfinite(value)] == [name]
    kept = [{"prompt": prompt, "completion": " So.", "total": 3} for prompt in ("Why?", chat)]
    assert list(rows) == kept


def test_what_updates_report_are_means_over_their_tokens():
    """Two updates of a rollout: approx_kl is half of what the first one has moved. What stands in
    the padding counts nowhere; --target_kl looks at the newest update alone."""
    means, mask = rollout_metrics.TokenMeans(), torch.tensor([[1.0, 1.0, 0.0]])
    for kl in (0.0, 0.3):
        values = torch.tensor([[kl, 3 * kl, 99.0]])
        means.add(mask, 1 + values, actor_loss=values, critic_loss=mask, approx_kl=values)
        means.end_update()
    assert means.of_last_update["approx_kl"] == pytest.approx(0.6)
    found = {"loss": 1.3, "actor_loss": 0.3, "critic_loss": 1, "approx_kl": 0.3, "ratio_max": 1.9}
    assert means.of_all_updates() == pytest.approx(found)


def test_without_a_reference_there_is_no_kl():
    """--kl_coef 0: the log has no KL, and all else."""
    args = SimpleNamespace(compares_groups=True, has_critic=True)
    with_kl, without = (ppo.rollout_means(args, [rollout(**kl)]) for kl in ({}, {"kl": {}}))
    assert without == {name: with_kl[name] for name in with_kl if name not in ("kl", "kl_k3")}


def test_parts_that_only_some_micro_batches_have_are_refused():
    """A mean of what is not there would be of other rows than it says; ranks would not agree."""
    args, batches = SimpleNamespace(compares_groups=True, has_critic=True), [rollout(), rollout()]
    for response in batches[1].responses:
        response["reward_format"] = 1.0
    with kit.refuses("function-returns"):
        ppo.rollout_means(args, batches)


@pytest.mark.parametrize(
    "scores, equal", [([0.0, 0.0, 9.0], 1), ([0.0, 1.0, 0.0], 0), ([2.5, 2.5, 0.0], 1)]
)
def test_a_prompt_whose_responses_have_equal_rewards_is_counted(scores, equal):
    """A filler's score says nothing. GRPO's advantages are 0 there."""
    batch = rollout(scores=torch.tensor(scores)[:, None])
    assert ppo.group_means([batch])["equal_groups"] == equal


def steps_that_warn(shares):
    """Returns what is said at each step, from 1 on, of equal_groups, or of reward_std."""
    state, said = {"equal_since": None}, {}
    for step, share in enumerate(shares, 1):
        run = SimpleNamespace(step=step, args=SimpleNamespace(compares_groups=True))
        metrics = {"equal_groups": share} if isinstance(share, float) else share
        with contextlib.redirect_stdout(io.StringIO()) as out:
            checks.warn_of_equal_rewards(run, state, {"reward": 0.5, "reward_std": 1.0, **metrics})
        if out.getvalue():
            said[step] = out.getvalue()
    return said


def test_a_run_that_teaches_nothing_is_named_at_the_step_where_it_begins_to():
    """At once if that is the first step; later after ten steps in a row, since a few groups may be
    equal by chance. Once: it begins again only after a step that has taught something. Without
    groups it is that all rewards are equal."""
    assert list(steps_that_warn([1.0] * 30)) == [1]
    later = steps_that_warn([0.5] * 3 + [1.0] * 9 + [0.9] + [1.0] * 30)
    assert list(later) == [23] and "since step 14 " in later[23]
    assert "on average 0.5" in later[23]
    assert list(steps_that_warn([{"reward_std": x} for x in [1.0, *[1e-9] * 12]])) == [11]
