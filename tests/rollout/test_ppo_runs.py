"""PPO's own promises, on whole runs of ppo.py: two ranks, tiny models (runs.py)."""

import math

import pytest

from tests import kit, runs
from tests.runs import curve, facts, metrics, run_of, without_clocks


def optimizer_steps(name):
    """Returns {folder of a model: its optimizer steps}."""
    run_of(name)
    return {saved["folder"]: saved["optimizer_steps"] for saved in facts(name)[0]["saved"]}


@pytest.mark.parametrize("name", ["ppo_one_rank", *(f"ppo_zero{stage}" for stage in range(4))])
def test_before_the_first_update_the_ratio_is_exactly_1(name):
    """With one pass over each rollout the weights that train are the weights that sampled: the
    ratio is 1 to the last bits of fp32, nothing is clipped, and the KL of old and new policy is 0.
    If it is not, two passes disagree. (The KL to the reference, which stays, is 0 at first.)"""
    for record in metrics(name)[1:]:
        assert record["ratio_max"] == pytest.approx(1, abs=1e-6)
        assert record["clip_fraction"] == 0 and abs(record["approx_kl"]) < 1e-7
    first, *later = [kl for _, kl in curve(name, "kl_k3")]
    assert first == pytest.approx(0, abs=1e-6) and min(later) > 1e-2


def test_what_main_hands_to_the_parts_of_a_step():
    """No dropout while anything is stored, in evaluations too, and dropout in both models while
    they train. The rows of a step have random numbers of their own, and evaluations (around the
    run, with the microscope) those of step 0."""
    rank, lines = facts("ppo_dropout")[0], metrics("ppo_dropout")[1:]
    assert not any(any(modes) for modes, *_ in rank["score"])
    assert [modes for modes, _ in rank["optimizer_step"]] == [[True, True]] * len(lines)
    in_steps = [step for step in rank["steps"] if step]
    assert in_steps == [line["step"] for line in lines] and rank["steps"][:2] == [0, 0]


SCORED = {  # a run: in which of its steps the actor scores the rollout before the update
    "ppo_one_pass": [True] * 4,  # KL in the reward needs its log-probs
    "ppo_one_rank_grpo": [True, False],  # KL in the loss does not
    "ppo_unstable": [True],
    "ppo_target_kl": [True, True],  # several epochs: the old log-probs are those before the first
}


@pytest.mark.parametrize("name", SCORED)
def test_a_forward_is_spared_only_where_nothing_needs_it(name):
    """The first step has all forwards, to compare sampling with scoring. Evaluations always do."""
    asked = [actor for _, actor in facts(name)[0]["score"]]
    in_steps = [actor for actor in asked if actor is not None]
    batches = len(in_steps) // len(SCORED[name])
    assert in_steps == [actor for actor in SCORED[name] for _ in range(batches)]
    assert len(in_steps) < len(asked)


def test_optimizer_steps_are_as_many_as_the_flags_say():
    """One optimizer step per step, whatever the accumulation. --ppo_epochs, --generation_batches
    and a rollout larger than a training batch multiply it, and then the ratio does move."""
    assert optimizer_steps("sft_1x4") == {".": 5}
    assert set(optimizer_steps("ppo_zero3").values()) == {4}
    moved = optimizer_steps("ppo_unstable")
    assert moved["."] == moved["critic"] == 2 * 2 * 2  # epochs, batches, minibatches
    assert len(facts("ppo_unstable")[0]["update"]) == 8  # of the EMA
    assert all(record["ratio_max"] > 1.001 for record in metrics("ppo_unstable")[1:])


def test_updates_end_once_the_policy_has_moved():
    """--target_kl, far too small: of 4 passes over each rollout the first sees a KL of 0, and the
    second is the last. The schedule, a cosine over 8 updates, counts those that were made: the last
    of each step are the second and the fourth. The critic has a rate of its own."""
    assert optimizer_steps("ppo_target_kl")["."] == 2 * 2
    rates = [rate for _, rate in curve("ppo_target_kl", "learning_rate")]
    assert rates == pytest.approx([5e-4 * (1 + math.cos(math.pi * n / 8)) for n in (1, 3)])
    of_critic = [rate for _, rate in curve("ppo_target_kl", "critic_learning_rate")]
    assert of_critic == pytest.approx([2 * rate for rate in rates])


def test_responses_have_another_order_in_each_epoch_and_step():
    """Rollouts that make several updates are shuffled: into micro-batches once a step, and these
    once an epoch. Where a rollout makes one update responses are sorted by length instead."""
    several, orders = facts("ppo_unstable")[0], facts("ppo_target_kl")[0]["minibatches"]
    assert len(orders) == len({*orders}) == 2 * 2  # passes, steps
    assert len({*several["minibatches"]}) == 2
    assert [seed for seed in several["ordered"] if seed] == [((1234, 1),)]
    assert {*facts("ppo_zero2")[0]["ordered"]} == {(), (None,)}


@pytest.mark.slow
def test_looking_changes_nothing():
    """A run that is evaluated at every step, also by the microscope and by a gold score, trains to
    the bit as one that is evaluated at its ends only: the policy never sees gold. Its critic's
    dropout draws from PyTorch's generator, which an evaluation must leave alone."""
    lines = without_clocks("ppo_looked_at")
    for found, expected in zip(lines, without_clocks("ppo_dropout"), strict=True):
        expected = {k: v for k, v in expected.items() if not k.startswith("eval_")}
        assert {k: found.get(k) for k in expected} == expected
    for folder in (".", "critic"):
        found, expected = (
            kit.weights(run_of(n) / folder) for n in ("ppo_looked_at", "ppo_dropout")
        )
        assert all(found[name].equal(expected[name]) for name in expected), folder
    assert (
        "eval_reward" in lines[2]
        and lines[1]["gold"] > 0
        and "gold" not in metrics("ppo_dropout")[1]
    )


def test_actor_ema_and_critic_are_all_saved():
    """Three models come out of step 3; the EMA lies between where the actor began and ended. (That
    each folder loads: tests/test_promises.py.)"""
    folder, models = run_of("ppo_zero3"), runs.base() / "models"
    start, end, ema = (kit.weights(place) for place in (models / "actor", folder, folder / "ema"))
    before, after = (kit.weights(place) for place in (models / "reward", folder / "critic"))
    assert max((after[key] - before[key]).abs().max() for key in before) > 1e-4
    for key in start:
        travelled = (end[key] - start[key]).norm()
        assert travelled > 1e-4
        assert 0 < (ema[key] - start[key]).norm() < 0.1 * travelled, "four steps of 0.8 % each"


def test_ppo_learns_a_bandit():
    """The smallest task that PPO must solve: a model of random weights, and as reward the share of
    the letters a to m in its response, a function of the user's own (--reward_fn). In 40 steps the
    reward rises far beyond its noise, in training and on prompts never trained on. The function's
    helper process ends by SIGTERM, although the run itself only notes that signal. With --kl_coef 0
    there is no reference, and no KL."""
    rewards = [reward for _, reward in curve("ppo_bandit", "reward")]
    assert len(rewards) == 40 and not curve("ppo_bandit", "kl")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    held_out = [reward for _, reward in curve("ppo_bandit", "eval_reward")]
    assert held_out[-1] > held_out[0] + 0.2
