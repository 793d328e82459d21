"""Parts 5 and 6 of ppo.py against plain loops, on random rollouts.

The loops are slow, and as close to the papers as Python can be: numbers, lists, one token at a
time. Prompts have responses in several micro-batches; some are fillers, some were cut off, and a
tool wrote some of the tokens. What stands in the padding is junk.
"""

import itertools
import math
import random
from collections import Counter
from statistics import fmean, pstdev, stdev
from types import SimpleNamespace

import pytest
import torch

import common
import ppo
import reward
from machinery import metrics, ranks
from tests.conftest import micro_batch

R, JUNK = 5, 777.0
FLAGS = dict(
    advantage=["gae", "reinforce", "rloo", "grpo"],
    gamma=[1.0, 0.9],
    lam=[0.95, 0.3, 1.0],
    kl_in=["reward", "loss"],
    kl_estimator=[*ppo.KL_ESTIMATORS],
    kl_coef=[0.0, 0.3],
    clip_reward=[1.0, math.inf],
    missing_eos_penalty=[0.0, 2.0],
    whiten=[0, 1],
    mask_truncated=[0, 1],
    loss_mean=[*ppo.LOSS_MEANS],
    clip=[0.2],
    clip_high=[None, 0.5],
    clip_value=[0.3],
    entropy_coef=[0.0, 0.1],
)
SEEDS = range(24)


def rollout(seed):
    """Random flags, and three micro-batches as part 4 leaves them."""
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    args = SimpleNamespace(**{name: rng.choice(values) for name, values in FLAGS.items()})
    args.dtype, args.max_answer_seq_len = "fp32", R
    args.advantage, args.mask_truncated = FLAGS["advantage"][seed % 4], seed % 2
    numbers = [4] * 3 + [2] * 2 + [7] * 3 + [9] * 2  # of the groups; 9 are fillers
    rng.shuffle(numbers)
    ending = 0.0 if seed == 5 else 0.7  # then no token trains

    def drawn(mask, padding=JUNK):
        numbers = torch.randn(mask.shape, generator=torch_rng, dtype=torch.float64)
        return numbers.where(mask > 0, padding)

    batches = []
    for groups in (numbers[:3], numbers[3:4], numbers[4:]):
        mask = (torch.rand(len(groups), R, generator=torch_rng) < 0.7).float()
        mask *= torch.tensor([[float(group != 9)] for group in groups])
        batch = micro_batch(groups, response_mask=mask)
        batch.last = mask * (mask.cumsum(1) == mask.sum(1, keepdim=True))
        batch.ended = torch.tensor([float(rng.random() < ending) for _ in groups])
        batch.scores = 3 * batch.last * drawn(mask) + 0.3 * drawn(mask, 0)
        batch.old_logprobs, batch.ref_logprobs = drawn(mask, 0), drawn(mask, 0)
        batch.old_values, batch.returns, batch.advantages = (drawn(mask) for _ in range(3))
        # what the forwards of an update will say
        batch.new = (batch.old_logprobs + drawn(mask, 0)).requires_grad_()
        batch.value, batch.entropies = (drawn(mask).requires_grad_() for _ in range(2))
        batches.append(batch)
    return args, batches


def rows_of(batches, *names):
    """Yields each response: a dict of its group, `ended`, and lists of its counted tokens."""
    for batch in batches:
        for b, response in enumerate(batch.responses):
            real = [t for t in range(R) if batch.response_mask[b, t]]
            lists = {name: [getattr(batch, name)[b, t].item() for t in real] for name in names}
            ended = batch.ended[b].item()
            yield SimpleNamespace(group=response["group"], ended=ended, count=len(real), **lists)


def kl_loop(logprob, ref_logprob, estimator):
    r = math.exp(ref_logprob - logprob)
    return {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}[estimator]


def shaped_loop(args, row):
    """The clipped scores; who was cut off pays for it, once."""
    scores = [max(-args.clip_reward, min(score, args.clip_reward)) for score in row.scores]
    if scores and not row.ended:
        scores[-1] -= args.missing_eos_penalty
    return scores


def rewards_loop(args, row):
    """[Ouyang 2022] eq. 2: these, less the penalty for KL, which nothing clips."""
    coef = args.kl_coef if args.kl_in == "reward" else 0.0
    kl = map(kl_loop, row.old_logprobs, row.ref_logprobs, [args.kl_estimator] * row.count)
    return [score - coef * k for score, k in zip(shaped_loop(args, row), kl)]


def gae_loop(rewards, values, t, gamma, lam):
    """[Schulman 2016] eq. 11-16, straight from the definition: the average of the k-step estimates

        A^(k) = -V_t + r_t + gamma r_{t+1} + ... + gamma^(k-1) r_{t+k-1} + gamma^k V_{t+k}

    weighted (1 - lam) lam^(k-1). The response ends, so all k >= n - t give the same estimate, and
    their weights add up to lam^(n-t-1).
    """
    n, total = len(rewards), 0.0
    for k in range(1, n - t + 1):
        estimate = sum(gamma**i * rewards[t + i] for i in range(k)) - values[t]
        estimate += gamma**k * values[t + k] if t + k < n else 0.0
        total += estimate * (lam ** (k - 1) if k == n - t else (1 - lam) * lam ** (k - 1))
    return total


def advantages_loop(args, rows):
    """The advantages of each response's tokens before whitening, a list each."""
    rewards = [rewards_loop(args, row) for row in rows]
    if args.advantage in ("gae", "reinforce"):
        lam = args.lam if args.advantage == "gae" else 1.0
        values = [row.old_values if args.advantage == "gae" else [0] * row.count for row in rows]
        given = zip(rows, rewards, values)
        return [
            [gae_loop(r, v, t, args.gamma, lam) for t in range(row.count)] for row, r, v in given
        ]
    out = []
    for i, row in enumerate(rows):
        alike = [j for j, other in enumerate(rows) if other.group == row.group]
        total, totals = sum(rewards[i]), [sum(rewards[j]) for j in alike]
        if args.advantage == "rloo":
            advantage = total - fmean(sum(rewards[j]) for j in alike if j != i)
        else:
            advantage = (total - fmean(totals)) / (stdev(totals) + 1e-4)
        out.append([advantage] * row.count)
    return out


def trains(args, row):
    return bool(row.ended) or not args.mask_truncated


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_against_loops(seed):
    """Rewards, advantages by each estimator, and whitening over the tokens that train.

    Who is left out of the loss counts in the baseline of the group all the same.
    """
    args, batches = rollout(seed)
    for batch in batches:
        batch.returns = None
    ppo.set_advantages(args, batches)
    names = "scores old_logprobs ref_logprobs old_values".split()
    made = "shaped_scores rewards raw_advantages advantages".split()
    rows = list(rows_of(batches, *names, *made))
    expected = advantages_loop(args, rows)
    for row, advantages in zip(rows, expected, strict=True):
        assert row.shaped_scores == pytest.approx(shaped_loop(args, row), abs=1e-5)
        assert row.rewards == pytest.approx(rewards_loop(args, row), abs=1e-5)
        assert row.raw_advantages == pytest.approx(advantages, abs=1e-4)
    trained = [x for row, part in zip(rows, expected) for x in part if trains(args, row)]
    if args.whiten and trained:
        mean, scale = fmean(trained), pstdev(trained)
        expected = [[(x - mean) / scale for x in part] for part in expected]
    for row, advantages in zip(rows, expected):
        if args.whiten and not trains(args, row):
            advantages = [0] * row.count
        assert row.advantages == pytest.approx(advantages, abs=1e-3)
    for batch in batches:
        padding = batch.response_mask == 0
        assert not batch.advantages[padding].any() and not batch.rewards[padding].any()
        clipped = (batch.scores.abs() > args.clip_reward).any(1)
        assert batch.score_clipped.equal(clipped)
        assert (batch.returns is not None) == (args.advantage == "gae")
        if batch.returns is not None:
            sums = (batch.raw_advantages + batch.old_values) * batch.response_mask
            assert torch.allclose(batch.returns, sums)


def test_whitening_is_over_all_ranks(monkeypatch):
    """Two ranks, played by hand: what all_sum finds on one is added on the other."""
    draw, all_sum = torch.Generator().manual_seed(1), ranks.all_sum
    here, there = ([torch.randn(2, 3, generator=draw)] for _ in range(2))
    ones = [torch.ones(2, 3)]
    together, sums = ppo.whitened(here + there, 2 * ones), []
    monkeypatch.setattr(ranks, "all_sum", lambda *x: sums.append(all_sum(*x)) or sum(sums))
    ppo.whitened(there, ones)
    assert torch.allclose(ppo.whitened(here, ones)[0], together[0], atol=1e-6)


# ---- Part 6 ----
def models_of_stubs(accumulation=1):
    """Returns an actor and a critic that compute gradients, as DeepSpeed does, and keep weights."""
    engine = SimpleNamespace(
        backward=lambda loss: (loss / accumulation).backward(),
        step=lambda: None,
        gradient_accumulation_steps=lambda: accumulation,
    )
    return ppo.Models(engine, engine, None, [], {}, None, None)


def actor_loop(args, token):
    """Of a token: loss, d loss / d logprob, and whether clipping stops the ratio's gradient.

    [Schulman 2017] eq. 7, with a penalty on KL and a bonus for entropy.
    """
    ratio, A = math.exp(token.new - token.old_logprobs), token.advantages
    high = 1 + (args.clip if args.clip_high is None else args.clip_high)
    clipped = ratio > high if A > 0 else ratio < 1 - args.clip
    bounded = max(1 - args.clip, min(ratio, high)) if clipped else ratio
    loss, slope = -bounded * A, 0.0 if clipped else -ratio * A
    if args.kl_in == "loss":
        log_r = token.ref_logprobs - token.new
        slopes = {"k1": 1, "k2": -log_r, "k3": 1 - math.exp(log_r)}
        loss += args.kl_coef * kl_loop(token.new, token.ref_logprobs, args.kl_estimator)
        slope += args.kl_coef * slopes[args.kl_estimator]
    return loss - args.entropy_coef * token.entropies, slope, clipped and A != 0


def critic_loop(args, token):
    """Of a token: loss, and d loss / d value. The larger of two squared errors."""
    low, high = token.old_values - args.clip_value, token.old_values + args.clip_value
    error = token.value - token.returns
    clipped = max(low, min(token.value, high)) - token.returns
    if clipped**2 > error**2:
        return clipped**2 / 2, 0.0
    return error**2 / 2, error


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_update_against_loops(seed, scored, monkeypatch):
    """The gradients of actor and critic, by the mean that --loss_mean names, and what is logged.

    Where part 4 has not scored the actor, the old log-probs are those of this forward, as numbers:
    the ratio is 1, and nothing that is kept has a graph.
    """
    args, batches = rollout(seed)
    forwards = lambda args, actor, batch: (batch.new * 1, batch.entropies * 1)  # noqa: E731
    monkeypatch.setattr(ppo, "actor_forward", forwards)
    monkeypatch.setattr(common, "values_before_tokens", lambda critic, batch: batch.value * 1)
    for batch in () if scored else batches:
        batch.old_logprobs = None
    means = metrics.TokenMeans()
    update = ppo.optimizer_step(args, models_of_stubs(len(batches)), batches, means)

    for batch in batches:
        kept = batch.ratio, batch.old_logprobs, batch.entropy
        assert not any(each.requires_grad for each in kept if each is not None)
        no_bonus = torch.zeros_like(batch.new)
        batch.slope, batch.slope_of_value = batch.new.grad, batch.value.grad
        batch.slope_of_entropy = batch.entropies.grad if args.entropy_coef else no_bonus
        for slope in (batch.slope, batch.slope_of_value, batch.slope_of_entropy):
            assert not slope[batch.response_mask == 0].any()
    names = "new old_logprobs ref_logprobs advantages entropies value old_values returns".split()
    rows = list(rows_of(batches, *names, "slope", "slope_of_value", "slope_of_entropy"))
    trained = [row for row in rows if row.count and trains(args, row)]
    all_tokens = sum(row.count for row in trained)
    log, ratios = Counter(), []
    for row in rows:
        divisors = {
            "tokens": all_tokens,
            "responses": len(trained) * row.count,
            "constant": len(trained) * R,
        }
        weight, weight_of_value = (
            (row in trained) / max(divisors[mean], 1) for mean in (args.loss_mean, "tokens")
        )
        for t in range(row.count):
            token = SimpleNamespace(**{name: getattr(row, name)[t] for name in names})
            loss, slope, clipped = actor_loop(args, token)
            loss_of_value, error = critic_loop(args, token)
            found = row.slope[t], row.slope_of_entropy[t], row.slope_of_value[t]
            expected = slope * weight, -args.entropy_coef * weight, error * weight_of_value
            assert found == pytest.approx(expected, abs=1e-5)
            ratios.append(math.exp(token.new - token.old_logprobs))
            log["actor_loss"] += loss
            log["critic_loss"] += loss_of_value
            log["approx_kl"] += kl_loop(token.old_logprobs, token.new, "k3")
            log["clip_fraction"] += clipped
            log["clip_fraction_low"] += clipped and token.advantages < 0
            log["clip_fraction_high"] += clipped and token.advantages > 0
    expected = {name: total / len(ratios) for name, total in log.items()}
    assert update == pytest.approx(expected, abs=1e-5)
    expected["loss"] = expected["actor_loss"] + expected["critic_loss"]
    expected["ratio_max"] = max(ratios) if scored else 1
    assert means.of_all_updates() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name, size", itertools.product(["rloo", "grpo"], [2, 3, 8]))
def test_responses_that_are_equally_good_teach_nothing(name, size):
    """Their advantage is 0 to the bit, whatever the reward: a mean that is rounded would leave a
    small number, which GRPO divides by a deviation as small. In fp32, with 8 responses, scores of
    3.7 gave -0.19."""
    args, _ = rollout(0)
    args.advantage, args.kl_coef, args.whiten, args.clip_reward = name, 0.0, 1, math.inf
    one = torch.ones(size, 1)
    for score in (3.7, 0.7, -1.3, 0.1, 2.9999):
        batch = micro_batch([5] * size, response_mask=one, last=one, ended=one[:, 0])
        batch.scores = score * one
        ppo.set_advantages(args, [batch])
        assert batch.advantages.dtype == torch.float32 and not batch.advantages.any(), score


def test_the_reward_models_loss():
    """-log sigmoid(chosen - rejected) of each pair, and with --center_coef the square of the sum.

    Fillers count nothing, also in the accuracy, where a tie is a half."""
    rng = random.Random(0)
    chosen, rejected = ([rng.gauss(0, 2) for _ in range(9)] for _ in range(2))
    chosen[3] = rejected[3]
    weights = [float(i % 4 != 2) for i in range(9)]
    for coef in (0.0, 0.1):
        pair = [torch.tensor(x, dtype=torch.float64).requires_grad_() for x in (chosen, rejected)]
        found = reward.pair_loss_sum(*pair, torch.tensor(weights), coef)
        found.backward()
        loss = right = 0.0
        for i, (c, r, weight) in enumerate(zip(chosen, rejected, weights)):
            sure = 1 / (1 + math.exp(r - c))
            loss += weight * (-math.log(sure) + coef * (c + r) ** 2)
            right += weight * (0.5 if c == r else c > r)
            for scores, sign in zip(pair, (1, -1)):
                slope = weight * (-sign * (1 - sure) + 2 * coef * (c + r))
                assert scores.grad[i].item() == pytest.approx(slope)
        assert found.item() == pytest.approx(loss)
        assert reward.correct_sum(*pair, torch.tensor(weights)).item() == right
