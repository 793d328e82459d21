"""Rewards per token and generalized advantage estimation, worked by hand and against slow sums.

V_t is the critic's outlook before token t; after the last real token it is 0.
delta_t = r_t + gamma * V_{t+1} - V_t.
"""

import random

import pytest
import torch

import ppo
from machinery import flags as declaring
from machinery import metrics, ranks
from tests.conftest import micro_batch

JUNK = 777.0


def with_kl(args, kl_coef):
    """Returns a copy of the flags with another penalty."""
    return declaring.with_flags(args, kl_coef=kl_coef)


def rows(*lists):
    return torch.tensor(lists, dtype=torch.float64)


# --------------------------------------------------------------------------------------------------
# Rewards of the tokens
# --------------------------------------------------------------------------------------------------
def test_every_token_pays_for_its_kl_and_the_last_one_gets_the_score():
    """kl_coef 0.1, KL of 1 and 2 nats, score 3: r = -0.1 * 1 and -0.1 * 2 + 3.
    Padding earns nothing."""
    rewards = ppo.token_rewards(
        torch.tensor([[0.0, 3.0, 0.0]]),
        torch.tensor([[1.0, 2.0, JUNK]]),
        torch.tensor([[1.0, 1.0, 0.0]]),
        0.1,
    )
    assert torch.allclose(rewards, torch.tensor([[-0.1, 2.8, 0.0]]))


def test_scores_are_clipped_and_kl_is_not():
    """Scores of 9 and -9 count as 5 and -5; the KL penalty is added after
    that, so it can go beyond."""
    args, (batch, _) = rollout("--advantage rloo")
    batch.scores = torch.tensor([[0.0, 9.0], [-9.0, 0.0]])
    batch.old_logprobs, batch.ref_logprobs = torch.full((2, 2), 10.0), torch.zeros(2, 2)
    ppo.set_rewards(with_kl(args, 0.1), batch)
    assert torch.allclose(batch.rewards, torch.tensor([[-1.0, 5 - 1], [-5 - 1, 0]]))


def test_a_filler_earns_nothing():
    """Its response mask is 0 everywhere, so there is no last token for the score to land on."""
    assert ppo.token_rewards(
        torch.tensor([[0.0, 3.0]]), torch.ones(1, 2), torch.zeros(1, 2), 0.1
    ).tolist() == [[0, 0]]


# --------------------------------------------------------------------------------------------------
# GAE
# --------------------------------------------------------------------------------------------------
def test_two_tokens_by_hand():
    """gamma 1, lam 0.5, r = 0, 1 and V = 0.5, 0.25:
    delta_1 = 1 + 0    - 0.25 =  0.75      A_1 = 0.75
    delta_0 = 0 + 0.25 - 0.50 = -0.25      A_0 = -0.25 + 0.5 * 0.75 = 0.125
    The returns are A + V."""
    advantages, returns = ppo.gae(
        rows([0, 1, JUNK]), rows([0.5, 0.25, JUNK]), rows([1, 1, 0]), gamma=1.0, lam=0.5
    )
    assert advantages.tolist() == [[0.125, 0.75, 0]]
    assert returns.tolist() == [[0.625, 1.0, 0]]


def test_three_tokens_by_hand_with_a_discount():
    """gamma 0.5, lam 0.5, r = 1, 2, 4 and V = 1, 1, 2:
    delta_2 = 4           - 2 = 2      A_2 = 2
    delta_1 = 2 + 0.5 * 2 - 1 = 2      A_1 = 2   + 0.25 * 2   = 2.5
    delta_0 = 1 + 0.5 * 1 - 1 = 0.5    A_0 = 0.5 + 0.25 * 2.5 = 1.125"""
    advantages, returns = ppo.gae(
        rows([1, 2, 4]), rows([1, 1, 2]), rows([1, 1, 1]), gamma=0.5, lam=0.5
    )
    assert advantages.tolist() == [[1.125, 2.5, 2]]
    assert returns.tolist() == [[2.125, 3.5, 4]]


def test_an_answer_of_one_token():
    """Only EOS: its advantage is its reward minus what the critic foresaw."""
    advantages, returns = ppo.gae(
        rows([3, JUNK]), rows([1, JUNK]), rows([1, 0]), gamma=1.0, lam=0.95
    )
    assert (advantages.tolist(), returns.tolist()) == ([[2, 0]], [[3, 0]])


def slow_advantage(rewards, values, t, gamma, lam):
    """[Schulman 2016] eq. 11-16, straight from the definition: the average of the k-step estimates

        A^(k) = -V_t + r_t + gamma r_{t+1} + ... + gamma^(k-1) r_{t+k-1} + gamma^k V_{t+k}

    weighted (1 - lam) lam^(k-1). The answer ends, so all k >= n - t give the
    same estimate, and their weights add up to lam^(n-t-1)."""
    n = len(rewards)
    total = 0.0
    for k in range(1, n - t + 1):
        estimate = (
            sum(gamma**i * rewards[t + i] for i in range(k))
            - values[t]
            + (gamma**k * values[t + k] if t + k < n else 0.0)
        )
        total += estimate * (lam ** (k - 1) if k == n - t else (1 - lam) * lam ** (k - 1))
    return total


def ragged(seed, shape=(5, 9)):
    """Returns rewards, values, mask (float64): rows of 1 to R real tokens, junk in the padding."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, shape[1]) for _ in range(shape[0])]
    mask = rows(*[[float(t < n) for t in range(shape[1])] for n in lengths])
    draw = [rows(*[[rng.gauss(0, 1) for _ in range(shape[1])] for _ in lengths]) for _ in range(2)]
    return *(torch.where(mask > 0, x, JUNK) for x in draw), mask


@pytest.mark.parametrize(
    "gamma, lam", [(1.0, 0.95), (0.99, 0.9), (0.7, 0.3), (1.0, 1.0), (0.9, 0.0)]
)
def test_the_recursion_is_the_average_of_k_step_estimates(gamma, lam):
    """GAE's one-line recursion and its definition, on random ragged batches, in float64."""
    for seed in range(5):
        rewards, values, mask = ragged(seed)
        advantages, returns = ppo.gae(rewards, values, mask, gamma, lam)
        for b, n in enumerate(mask.sum(1).int().tolist()):
            r, v = rewards[b, :n].tolist(), values[b, :n].tolist()
            slow = [slow_advantage(r, v, t, gamma, lam) for t in range(n)]
            assert advantages[b, :n].tolist() == pytest.approx(slow, abs=1e-12)
            assert returns[b, :n].tolist() == pytest.approx(
                [a + x for a, x in zip(slow, v)], abs=1e-12
            )
            assert (advantages[b, n:] == 0).all() and (returns[b, n:] == 0).all()


def test_credit_crosses_tokens_that_the_actor_has_not_written():
    """A tool's tokens (mask 0) between two turns are no steps: advantages and returns are those of
    the same response without them, whatever stands there."""
    rewards, values, mask = rows([0, 0.1, 2]), rows([0.5, 0.25, -1]), rows([1, 1, 1])
    whole = ppo.gae(rewards, values, mask, 0.9, 0.8)
    places = [0, 3, 4]
    with_gap = [torch.full((1, 6), JUNK, dtype=torch.float64) for _ in range(2)]
    gap_mask = torch.zeros(1, 6, dtype=torch.float64)
    for wide, narrow in zip((*with_gap, gap_mask), (rewards, values, mask)):
        wide[:, places] = narrow
    for found, expected in zip(ppo.gae(*with_gap, gap_mask, 0.9, 0.8), whole):
        assert torch.allclose(found[:, places], expected)
        assert not found[:, [1, 2, 5]].any()


def test_lam_one_trusts_the_rewards():
    """lam 1: the return is the plain sum of the rewards to come; the critic is
    only a baseline. r = 1, 2, 4"""
    for values in ([0, 0, 0], [3, -1, 8]):
        advantages, returns = ppo.gae(
            rows([1, 2, 4]), rows(values), rows([1, 1, 1]), gamma=1.0, lam=1.0
        )
        assert returns.tolist() == [[7, 6, 4]]
        assert advantages.tolist() == [[7 - values[0], 6 - values[1], 4 - values[2]]]


def test_lam_zero_trusts_the_critic():
    """lam 0: one step of reward, and the critic's word for all the rest: A = delta."""
    advantages, _ = ppo.gae(rows([1, 2, 4]), rows([3, -1, 8]), rows([1, 1, 1]), gamma=1.0, lam=0.0)
    assert advantages.tolist() == [[1 - 1 - 3, 2 + 8 + 1, 4 - 8]]


def test_a_critic_that_foresees_all_leaves_no_advantage():
    """r = 1, 2, 4 and V = the true sums to come: there is nothing to learn, whatever lam."""
    advantages, _ = ppo.gae(rows([1, 2, 4]), rows([7, 6, 4]), rows([1, 1, 1]), gamma=1.0, lam=0.6)
    assert advantages.tolist() == [[0, 0, 0]]


def test_what_stands_in_the_padding_never_matters():
    """The critic says something about padding too; nobody listens, and the last
    real token has nothing after it."""
    rewards, values, mask = ragged(1)
    first = ppo.gae(rewards, values, mask, 1.0, 0.95)
    second = ppo.gae(
        torch.where(mask > 0, rewards, -1e6), torch.where(mask > 0, values, 1e6), mask, 1.0, 0.95
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))


# --------------------------------------------------------------------------------------------------
# Whitening
# --------------------------------------------------------------------------------------------------
def real_tokens(values, masks):
    return torch.cat([v[m > 0] for v, m in zip(values, masks)])


def test_whitening_by_hand():
    """Real tokens 1, 3 | 5, 7: mean 4, deviation sqrt((9 + 1 + 1 + 9) / 4) =
    sqrt(5). Padding stays 0."""
    white = ppo.whitened([rows([1, 3, JUNK]), rows([5, 7])], [rows([1, 1, 0]), rows([1, 1])])
    expected = [x / 5**0.5 for x in (-3, -1, 1, 3)]
    assert real_tokens(white, [rows([1, 1, 0]), rows([1, 1])]).tolist() == pytest.approx(expected)
    assert white[0][0, 2] == 0


def test_padding_never_changes_a_whitened_advantage():
    """Other junk, and three more columns of it: the real tokens' numbers stay."""
    _, values, mask = ragged(3)
    wider = torch.cat(
        [torch.where(mask > 0, values, -5.0), torch.full((5, 3), 1e4, dtype=torch.float64)], 1
    )
    wider_mask = torch.cat([mask, torch.zeros(5, 3, dtype=torch.float64)], 1)
    one, two = ppo.whitened([values], [mask]), ppo.whitened([wider], [wider_mask])
    assert torch.allclose(real_tokens(one, [mask]), real_tokens(two, [wider_mask]), atol=1e-12)


def test_whitening_is_over_all_ranks(monkeypatch):
    """Two ranks, played by hand: `all_sum` adds the other rank's sums. Each
    then holds its part of the whole's answer."""
    (_, here, here_mask), (_, there, there_mask) = ragged(4), ragged(5)
    together = ppo.whitened([here, there], [here_mask, there_mask])
    other = []
    all_sum = ranks.all_sum
    monkeypatch.setattr(
        ranks, "all_sum", lambda *values: other.append(all_sum(*values)) or other[-1]
    )
    ppo.whitened([there], [there_mask])
    monkeypatch.setattr(ranks, "all_sum", lambda *values: all_sum(*values) + other[0])
    assert torch.allclose(ppo.whitened([here], [here_mask])[0], together[0], atol=1e-12)


def test_equal_advantages_do_not_explode():
    """No spread means no signal: 0, not 0 / 0."""
    assert ppo.whitened([rows([2, 2, 2])], [rows([1, 1, 1])])[0].tolist() == [[0, 0, 0]]


def test_small_advantages_are_scaled_up():
    """Deviation 1 is what they have afterwards, however small they were."""
    white = ppo.whitened([rows([1e-3, -1e-3])], [rows([1, 1])])[0]
    assert white.tolist() == [[pytest.approx(1, abs=1e-4), pytest.approx(-1, abs=1e-4)]]


def test_where_no_token_counts_nothing_is_whitened():
    """A fork's own mask may leave out every token of a rollout."""
    assert ppo.whitened([rows([2, 5])], [rows([0, 0])])[0].tolist() == [[0, 0]]


# --------------------------------------------------------------------------------------------------
# Advantages without a critic
# --------------------------------------------------------------------------------------------------
def test_reinforce_is_the_reward_still_to_come():
    """r = 1, 0, 4 and gamma 0.5: A_2 = 4, A_1 = 0 + 0.5 * 4 = 2, A_0 = 1 + 0.5 * 2 = 2.
    Padding has no advantage."""
    advantages = ppo.reinforce(rows([1, 0, 4, JUNK]), rows([1, 1, 1, 0]), gamma=0.5)
    assert advantages.tolist() == [[2, 2, 4, 0]]


def test_rloo_compares_an_answer_with_the_others():
    """Rewards 1, 2, 6 for one prompt: 1 - (2+6)/2 = -3, 2 - (1+6)/2 = -1.5, 6 - (1+2)/2 = 4.5.
    Another prompt's 5 and 5 are no better than each other. The order of the answers does not
    matter."""
    groups = torch.tensor([0, 1, 0, 1, 0])
    assert ppo.rloo(torch.tensor([1.0, 5.0, 2.0, 5.0, 6.0]), groups).tolist() == [
        -3,
        0,
        -1.5,
        0,
        4.5,
    ]


def test_grpo_normalises_within_a_prompt():
    """Rewards 1, 2, 3: mean 2, deviation 1 (of a sample: n - 1), so -1, 0, 1. Equal rewards:
    0, not 0 / 0. And a prompt whose rewards are ten times as large counts no more."""
    advantages = ppo.grpo(
        torch.tensor([1.0, 2.0, 3.0, 7.0, 7.0, 10.0, 20.0, 30.0]),
        torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]),
    )
    one, ten = 1 / (1 + 1e-4), 10 / (10 + 1e-4)  # 1e-4 keeps the division from 0
    assert torch.allclose(advantages, torch.tensor([-one, 0, one, 0, 0, -ten, 0, ten]), atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", ["rloo", "grpo"])
def test_responses_that_are_equally_good_teach_nothing(name, size):
    """Their advantage is 0 to the bit, whatever the reward: a mean that is rounded would leave a
    small number, which GRPO divides by a deviation as small. In fp32, with 8 responses, scores of
    3.7 gave -0.19."""
    args = ppo_args(f"--kl_in loss --advantage {name} --samples_per_prompt 2")
    for score in (3.7, 0.7, -1.3, 0.1, 2.9999):
        batch = scored(groups=[5] * size, scores=torch.full((size, 1), score))
        ppo.set_advantages(with_kl(args, 0.0), [batch])
        assert batch.advantages.dtype == torch.float32 and not batch.advantages.any(), score


@pytest.mark.parametrize("seed", range(5))
def test_group_estimators_against_loops(seed):
    """Ragged groups in random order, in float64, against the papers' sums written as loops."""
    rng = random.Random(seed)
    groups = [g for g in range(4) for _ in range(rng.randint(2, 5))]
    rng.shuffle(groups)
    rewards = [rng.gauss(0, 3) for _ in groups]
    loo, normalised = (
        f(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)).tolist()
        for f in (ppo.rloo, ppo.grpo)
    )
    for i, group in enumerate(groups):
        others = [r for j, (r, g) in enumerate(zip(rewards, groups)) if g == group and j != i]
        together = others + [rewards[i]]
        mean = sum(together) / len(together)
        deviation = (sum((r - mean) ** 2 for r in together) / (len(together) - 1)) ** 0.5
        assert loo[i] == pytest.approx(rewards[i] - sum(others) / len(others))
        assert normalised[i] == pytest.approx((rewards[i] - mean) / (deviation + 1e-4))
    assert sum(loo) == pytest.approx(0, abs=1e-9)


# --------------------------------------------------------------------------------------------------
# Part 5 of a step
# --------------------------------------------------------------------------------------------------
def ppo_args(flags=""):
    return ppo.get_args(["--preset", "toy", *flags.split()])


def scored(groups, scores, kl=None, mask=None, ended=None, values=None):
    """A micro-batch as part 4 leaves it. scores: (B, R), a response's on its last token."""
    mask = torch.ones_like(scores) if mask is None else mask
    last = mask * (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
    kl = torch.zeros_like(scores) if kl is None else kl
    return micro_batch(
        groups,
        response_mask=mask,
        last=last,
        scores=scores,
        old_logprobs=kl,  # k1 is their difference
        ref_logprobs=torch.zeros_like(scores),
        ended=torch.ones(len(scores)) if ended is None else ended,
        old_values=torch.zeros_like(scores) if values is None else values,
    )


def rollout(flags):
    """Two micro-batches of two responses: prompts 7 and 8, one response to each in either.

    Responses to 7 have two tokens and a KL of one nat on the second; the last one to 8 was cut off.
    """
    mask, kl = torch.tensor([[1.0, 1], [1, 0]]), torch.tensor([[0.0, 1], [0, 0]])
    scores = torch.tensor([[[0.0, 1], [0, 0]], [[0, 3], [0, 0]]])
    ended = torch.tensor([[1.0, 1], [1, 0]])
    batches = [scored([7, 8], scores[i], kl, mask, ended[i]) for i in (0, 1)]
    return ppo_args(f"--samples_per_prompt 2 {flags}"), batches


def test_responses_to_a_prompt_find_each_other_across_micro_batches():
    """Micro-batches are sorted by length, so the responses to one prompt lie apart. Prompt 7 got 1
    and 3 (its KL of one nat costs both the same), so its advantages are -2 and 2, on every token
    and on nothing else."""
    args, batches = rollout("--advantage rloo")
    ppo.set_advantages(with_kl(args, 0.1), batches)
    expected = torch.tensor([[[-2.0, -2], [0, 0]], [[2, 2], [0, 0]]])
    assert torch.allclose(torch.stack([b.advantages for b in batches]), expected)


@pytest.mark.parametrize(
    "flags, whitens",
    [
        ("gae", True),
        ("gae --whiten 0", False),
        ("reinforce", True),
        ("rloo", False),
        ("grpo", False),
        ("rloo --whiten 1", True),
    ],
)
def test_an_estimator_says_whether_advantages_are_whitened(flags, whitens):
    """And a flag may say otherwise. What is logged is how they were before."""
    args, batches = rollout(f"--advantage {flags}")
    for batch in batches:
        batch.old_values = torch.full((2, 2), 0.25)
    ppo.set_advantages(with_kl(args, 0.1), batches)
    masks = [batch.response_mask for batch in batches]
    found = real_tokens([batch.advantages for batch in batches], masks).double()
    raw = real_tokens([batch.raw_advantages for batch in batches], masks).double()
    unit = found.mean().abs() < 1e-6 and abs(found.std(correction=0) - 1) < 1e-6
    assert unit == whitens and torch.equal(found, raw) != whitens
    assert args.has_critic == ("gae" in flags) == (batches[0].returns is not None)


def test_without_a_reference_there_is_no_kl():
    batch = micro_batch(response_mask=torch.ones(1, 2), old_logprobs=torch.zeros(1, 2))
    assert not any(batch.kl(kind).any() for kind in ppo.KL_ESTIMATORS)
    for flags, has in (("", True), ("--kl_coef 0", False), ("--kl_coef 0 --log_kl 1", True)):
        assert ppo_args(flags).has_reference == has


def test_a_prompt_that_is_drawn_twice_makes_two_groups():
    """The same row of the data in two generation batches: its responses are compared within each
    draw. Found by their row they would be one group of four."""
    args = ppo_args("--advantage rloo --samples_per_prompt 2")
    requests = ppo.Sizes(args).requests([[{"row": 5}], [{"row": 5}]])
    assert [request["group"] for request in requests] == [0, 0, 1, 1]
    assert [request["sample"] for request in requests] == [0, 1, 0, 1]


def test_a_response_that_is_left_out_of_the_loss_counts_in_its_groups_baseline():
    """--mask_truncated 1: prompt 7 got 1, and 3 for a response that was cut off. The other is worth
    2 less than it, as without the flag: to be long is no reason to be left out of what the
    prompt's responses earn."""
    args, batches = rollout("--advantage rloo --mask_truncated 1")
    batches[1].ended = torch.tensor([0.0, 1.0])
    ppo.set_advantages(with_kl(args, 0.0), batches)
    assert [b.advantages[0].tolist() for b in batches] == [[-2, -2], [2, 2]]
    assert ppo.trained_mask(args, batches[1]).tolist() == [[0, 0], [1, 0]]


def test_a_response_that_was_cut_off_pays_for_it():
    """--missing_eos_penalty 4: prompt 8 got 0 twice, and one of the two never ended. A response of
    two tokens pays once, on the last."""
    args, batches = rollout("--advantage rloo --missing_eos_penalty 4")
    ppo.set_advantages(with_kl(args, 0.0), batches)
    assert [b.advantages[1, 0].item() for b in batches] == [4, -4]
    batches[0].ended = torch.tensor([0.0, 1.0])
    ppo.set_rewards(with_kl(args, 0.0), batches[0])
    assert batches[0].rewards.tolist() == [[0, 1 - 4], [0, 0]]


@pytest.mark.parametrize(
    "flags, equal", [("", 0.5), ("--missing_eos_penalty 4", 0.0), ("--clip_reward 0.5", 1.0)]
)
def test_a_group_is_equal_where_what_it_earns_is(flags, equal):
    """Prompt 8 got 0 twice, but one response was cut off: with a penalty for that the two differ,
    and teach. Prompt 7 got 1 and 3: clipped to 0.5 they are equal, and teach nothing. The KL of its
    responses, which is in the reward, is no difference in what they earn."""
    args, batches = rollout(f"--advantage rloo {flags}")
    ppo.set_advantages(with_kl(args, 0.1), batches)
    assert metrics.group_means(batches)["equal_groups"] == equal


def test_advantages_are_whitened_over_the_tokens_that_train():
    """--mask_truncated 1 with REINFORCE: a response that was cut off got less than the others, and
    counts in no loss. It may not move the mean of those that do: they would all be reinforced."""
    scores = torch.tensor([[0.0, 1], [0, 3], [0, -5]])
    args = ppo_args("--advantage reinforce --mask_truncated 1")
    batch = scored([7, 8, 9], scores, ended=torch.tensor([1.0, 1, 0]))
    ppo.set_advantages(with_kl(args, 0.0), [batch])
    assert batch.advantages.tolist() == [[-1, -1], [1, 1], [0, 0]]


def test_the_kl_penalty_is_applied_once():
    """In the reward or in the loss, never in both: with --kl_in loss one nat of KL leaves the
    rewards alone."""
    paid = {}
    for where in ("reward", "loss"):
        args, batches = rollout(f"--kl_in {where} --lam 1 --whiten 0")
        ppo.set_advantages(with_kl(args, 0.5), batches)
        paid[where] = batches[0].returns[0, 0].item()
    assert paid == {"reward": 0.5, "loss": 1.0}


def test_the_estimator_of_kl_in_the_reward_is_the_flags():
    """One nat costs half of the coefficient with k2."""
    args, batches = rollout("--kl_in reward --kl_estimator k2 --lam 1 --whiten 0")
    ppo.set_advantages(with_kl(args, 0.5), batches)
    assert batches[0].returns[0, 0].item() == 1 - 0.5 * 0.5


@pytest.mark.parametrize("name, expected", [("gae", [-0.28125, 0.75]), ("reinforce", [0.5, 1])])
def test_gamma_and_lambda_reach_their_estimator(name, expected):
    """By hand: delta is 0.5 * 0.25 - 0.5 = -0.375 and 1 - 0.25 = 0.75, and GAE's first advantage
    -0.375 + 0.5 * 0.25 * 0.75. REINFORCE has no lambda."""
    args = ppo_args(f"--advantage {name} --gamma 0.5 --lam 0.25 --whiten 0 --kl_in loss")
    batch = scored([7], torch.tensor([[0.0, 1]]), values=torch.tensor([[0.5, 0.25]]))
    ppo.set_advantages(with_kl(args, 0.0), [batch])
    assert batch.advantages.tolist() == [expected]
