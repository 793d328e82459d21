"""Losses, estimators, sampling and the EMA: small numbers that can be checked
with pencil and paper."""

import copy
import itertools
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification

import common
import ppo
import reward
import sft
from machinery.base import ranks, statistics
from machinery.data import rows
from machinery.engine import patches, throughput
from machinery.flags import ppo_rules
from machinery.models import lora, model_folders
from machinery.rollout import decoding, ema, kl_controller, rollout_metrics
from machinery.run import crash, logs
from machinery.run import run as run_module
from machinery.run.run import Run
from tests.conftest import ROOT, generate, micro_batch


def with_gradient(f, x):
    """Returns f(x) and df/dx at the number x."""
    x = torch.tensor([[x]], dtype=torch.float64, requires_grad=True)
    y = f(x).sum()
    return y.item(), torch.autograd.grad(y, x)[0].item()


# --------------------------------------------------------------------------------------------------
# PPO's two losses
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        # the gradient is with respect to log pi: d ratio / d log pi = ratio
        (1.0, 2.0, -2.0, -2.0),  # the first pass: a plain policy gradient, -A
        (1.1, 2.0, -2.2, -2.2),  # inside the clip nothing changes
        # good token, already likelier by more than 20 %: counts as 1.2, no further push
        (1.5, 2.0, -2.4, 0.0),
        (0.5, 2.0, -1.0, -1.0),  # good token became rarer: it went wrong, full pull back
        (1.5, -2.0, 3.0, 3.0),  # bad token became likelier: it went wrong, full push down
        # bad token, already rarer by more than 20 %: counts as 0.8, no further push
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_policy_loss_clips_gains_and_never_losses(ratio, advantage, loss, gradient):
    """The four corners of clip x sign of the advantage, clip = 0.2. The minimum
    is the pessimist's choice: where moving on would only look better the
    gradient is zero, where things went wrong it is whole."""
    old = torch.full((1, 1), -3.0, dtype=torch.float64)
    found = with_gradient(
        lambda x: ppo.policy_loss(x, old, torch.full_like(old, advantage), 0.2)[0],
        -3.0 + math.log(ratio),
    )
    assert found == pytest.approx((loss, gradient))
    assert ppo.policy_loss(old + math.log(ratio), old, old, 0.2)[1].item() == pytest.approx(ratio)


@pytest.mark.parametrize(
    "value, loss, gradient",
    [
        # old value 0, return 1, clip_value 0.2
        (0.1, 0.405, -0.9),  # within the clip: half the squared error, 0.9^2 / 2
        # moved too far towards the return: counts as 0.2, error 0.8, no further push
        (0.5, 0.32, 0.0),
        # moved away from it: the plain error 1.5 is the larger one, full pull back
        (-0.5, 1.125, -1.5),
    ],
)
def test_value_loss_clips_gains_and_never_losses(value, loss, gradient):
    """The larger of the two squared errors: the same pessimist as in the policy loss."""
    zero = torch.zeros(1, 1, dtype=torch.float64)
    assert with_gradient(lambda x: ppo.value_loss(x, zero, zero + 1, 0.2), value) == pytest.approx(
        (loss, gradient)
    )


# --------------------------------------------------------------------------------------------------
# KL: three estimators, one truth
# --------------------------------------------------------------------------------------------------
PI, REF = (
    torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
    torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64),
)
# 0.0253; the third token adds 0.2 * log(1) = 0
KL = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4)


def moments(estimator):
    """Returns mean and variance under pi, exactly: all three tokens, weighted
    by their probabilities."""
    k = ppo.kl_estimate(PI.log(), REF.log(), estimator)
    mean = (PI * k).sum().item()
    return mean, (PI * (k - mean) ** 2).sum().item()


@pytest.mark.parametrize(
    "ratio, advantage, loss",
    [
        # within clip_high 0.3: the gain counts in full, where clip 0.2 would have cut it
        (1.25, 1.0, -1.25),
        (1.50, 1.0, -1.30),
        (0.50, -1.0, 0.80),  # the lower bound is clip's
        (2.00, -1.0, 2.00),  # a bad token that became likely: full loss
        (9.00, -1.0, 3.00),  # but no more than dual_clip times the advantage
    ],
)
def test_clip_high_and_dual_clip(ratio, advantage, loss):
    """clip_high lets rare good tokens rise further (DAPO). dual_clip bounds the
    one side that PPO leaves open."""
    logprobs = torch.tensor([[ratio]]).log()
    found, _ = ppo.policy_loss(
        logprobs,
        torch.zeros(1, 1),
        torch.tensor([[advantage]]),
        clip=0.2,
        clip_high=0.3,
        dual_clip=3.0,
    )
    assert found.item() == pytest.approx(loss, rel=1e-5)


def test_losses_against_the_papers_formulas_in_float64():
    """Random ragged batches: the rewards of Ouyang's equation 2, PPO's equation
    7 and the clipped value loss, one token at a time in plain Python."""
    generator = torch.Generator().manual_seed(0)
    new, old, advantages, values, stored, returns, kl = torch.randn(
        7, 5, 7, generator=generator, dtype=torch.float64
    )
    lengths, scores, penalty = (
        (1, 7, 3, 4, 6),
        3 * torch.randn(5, generator=generator, dtype=torch.float64),
        torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0]),
    )
    mask = torch.tensor([[float(j < n) for j in range(7)] for n in lengths], dtype=torch.float64)
    last = torch.tensor([[float(j == n - 1) for j in range(7)] for n in lengths])
    on_last = scores[:, None] * last, penalty[:, None] * last
    rewards = ppo.token_rewards(on_last[0], kl, mask, 0.1, 2.0, on_last[1])
    to_come = ppo.reinforce(rewards, mask, 0.9)
    loss, ratio = ppo.policy_loss(new * mask, old * mask, advantages * mask, 0.2)
    errors = ppo.value_loss(values, stored, returns, 0.2)
    for i, n in enumerate(lengths):
        paid = [
            -0.1 * kl[i, j].item()
            + (j == n - 1) * (min(max(scores[i].item(), -2), 2) - penalty[i].item())
            for j in range(n)
        ]
        assert rewards[i].tolist() == pytest.approx(paid + [0.0] * (7 - n))
        assert to_come[i].tolist() == pytest.approx(
            [sum(0.9 ** (k - j) * paid[k] for k in range(j, n)) for j in range(n)] + [0.0] * (7 - n)
        )
    for i, j in itertools.product(range(5), range(7)):
        if not mask[i, j]:
            assert loss[i, j] == 0
            continue
        r, a = math.exp(new[i, j] - old[i, j]), advantages[i, j].item()
        assert ratio[i, j].item() == pytest.approx(r)
        assert loss[i, j].item() == pytest.approx(-min(r * a, min(max(r, 0.8), 1.2) * a))
        v, v0, g = values[i, j].item(), stored[i, j].item(), returns[i, j].item()
        assert errors[i, j].item() == pytest.approx(
            max((v - g) ** 2, (v0 + min(max(v - v0, -0.2), 0.2) - g) ** 2) / 2
        )


def test_kl_costs_and_entropy_pays():
    """With --kl_in loss the actor pays for KL, and --entropy_coef rewards
    entropy: signs and weights, by hand. `clipped` marks the one token whose
    ratio left the range in the direction of its advantage."""
    args = ppo.get_args("--preset toy --kl_in loss --kl_estimator k2 --entropy_coef 0.5".split())
    new, ref = torch.tensor([[0.5, 0.1, 0.5]]), torch.tensor([[0.1, 0.1, 0.5]])
    batch = micro_batch(
        old_logprobs=torch.tensor([[0.0, 0.1, 0.5]]),
        ref_logprobs=ref,
        advantages=torch.tensor([[1.0, 1.0, -1.0]]),
    )
    loss, ratio, clipped = ppo.actor_loss(
        args, batch, new, torch.tensor([[2.0, 0.0, 0.0]]), kl_coef=0.3
    )
    assert loss[0].tolist() == pytest.approx([-1.2 + 0.3 * 0.4**2 / 2 - 0.5 * 2.0, -1.0, 1.0])
    assert clipped[0].tolist() == [True, False, False] and ratio[0, 0].item() == pytest.approx(
        math.exp(0.5)
    )
    paid_in_reward = ppo.get_args("--preset toy".split())
    assert ppo.actor_loss(paid_in_reward, batch, new, None, kl_coef=0.3)[0][
        0
    ].tolist() == pytest.approx([-1.2, -1.0, 1.0])


def test_a_temperature_is_applied_in_fp32():
    """The rollout divides fp32 logits. Divided in bf16, logits of 20 would be
    off by up to 0.06 nats: another policy."""
    logits, targets = (
        (20 * torch.randn(6, 50, generator=torch.Generator().manual_seed(0))).bfloat16(),
        torch.zeros(6, dtype=torch.long),
    )
    exact = (logits.double() / 0.7).log_softmax(-1)
    assert torch.allclose(
        common.TokenLogprobs.apply(logits, targets, 0.7).double(), exact[..., 0], atol=1e-4
    )
    assert torch.allclose(
        common.entropy(logits, 0.7).double(), -(exact.exp() * exact).sum(-1), atol=1e-4
    )
    inputs = torch.randn(6, 50, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: common.TokenLogprobs.apply(x.float(), targets, 0.7), inputs, eps=1e-3, atol=1e-3
    )


def test_what_the_rollout_was_like_by_hand():
    """Means over answers, fillers left out; advantage's deviation and explained variance over real
    tokens only. Here returns vary by 4 and the critic's errors by 1: it explains three quarters."""
    batch = micro_batch(
        scores=torch.tensor([[1.0, 0.0], [3.0, 0.0], [9.0, 0.0]]),
        kl=torch.tensor([[0.5, 0.0], [1.0, 0.5], [9.0, 0.0]]),
        kl_k3=torch.tensor([[0.2, 0.0], [0.4, 0.0], [9.0, 0.0]]),
        gold=torch.tensor([[1.0, 0.0]] * 3),
        ended=torch.tensor([1.0, 0.0, 1.0]),
        row_weight=torch.tensor([1.0, 1.0, 0.0]),
        response_mask=torch.tensor([[1.0, 0], [1, 0], [0, 0]]),
        raw_advantages=torch.tensor([[1.0, 9], [-1, 9], [9, 9]]),
        returns=torch.tensor([[2.0, 9], [-2, 9], [9, 9]]),
        entropy=torch.tensor([[0.5, 9], [1.5, 9], [9, 9]]),
    )
    assert rollout_metrics.of_all_ranks([batch]) == pytest.approx(
        {
            "reward": 2.0,
            "gold": 1.0,
            "kl": 1.0,
            "kl_k3": 0.3,
            "response_length": 1.0,
            "eos_rate": 0.5,
            "entropy": 1.0,
            "advantage_std": 1.0,
            "explained_variance": 0.75,
        }
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_of_kl_in_the_loss(estimator):
    """Where tokens come from pi itself, the expected gradient of k2 is that of KL(pi
    || ref). That of k1 is zero: it is the score function, and teaches nothing. That
    of k3 is the gradient of KL(ref || pi), which is close when both are."""
    logits, ref = torch.randn(2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits.requires_grad_()
    pi, ref = logits.log_softmax(-1), ref.log_softmax(-1)

    def expected(x):
        return torch.autograd.grad((pi.detach().exp() * x).sum(), logits, retain_graph=True)[0]

    found = expected(ppo.kl_estimate(pi, ref, estimator))
    gradients = {
        "k1": torch.zeros(6, dtype=torch.float64),
        "k2": torch.autograd.grad((pi.exp() * (pi - ref)).sum(), logits, retain_graph=True)[0],
        "k3": torch.autograd.grad((ref.exp() * (ref - pi)).sum(), logits, retain_graph=True)[0],
    }
    assert torch.allclose(found, gradients[estimator], atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_of_kl_in_the_reward(estimator):
    """There an estimate acts through the log-prob of the token that it stands on. For k1 the
    expected gradient is that of KL(pi || ref). For k2 and k3, which are as large on either side,
    it vanishes near the reference: a warning says so."""
    ref, away = torch.randn(2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = (ref + 0.01 * away).requires_grad_()
    pi, ref = logits.log_softmax(-1), ref.log_softmax(-1)
    penalty = ppo.kl_estimate(pi, ref, estimator).detach()
    acts = (pi.detach().exp() * penalty * pi).sum()
    [found] = torch.autograd.grad(acts, logits, retain_graph=True)
    [true] = torch.autograd.grad((pi.exp() * (pi - ref)).sum(), logits)
    if estimator == "k1":
        assert torch.allclose(found, true, atol=1e-12)
    else:
        assert found.norm() < 0.02 * true.norm()


@pytest.mark.parametrize(
    "flags, warning",
    [
        ("--kl_estimator k3", "--kl_estimator k3 in the reward"),
        ("--kl_in loss --kl_estimator k3", None),
        ("--advantage rloo --samples_per_prompt 4 --gamma 0.9", "--gamma does not act"),
        ("--advantage reinforce --lam 0.9", "--lam does not act with --advantage reinforce"),
        ("--advantage reinforce --gamma 0.9", None),
        ("--lam 0.9 --clip_value 1", None),
    ],
)
def test_flags_that_do_little_or_nothing_are_named(flags, warning, capsys):
    ppo_rules.warn(ppo.get_args(["--preset", "toy", *flags.split()]))
    said = capsys.readouterr().out
    assert warning in said if warning else "warning" not in said


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    """The mean over tokens drawn from pi is KL(pi || ref) for k1 and k3; k2 is
    off by a little, here under 5 %."""
    assert moments("k1")[0] == pytest.approx(KL, rel=1e-12)
    assert moments("k3")[0] == pytest.approx(KL, rel=1e-12)
    assert 0.0001 < abs(moments("k2")[0] - KL) < 0.05 * KL


def test_k3_is_far_less_noisy_than_k1():
    """k1's deviation is ten times the KL itself; k3 has the same mean with a
    hundredth of the variance."""
    assert moments("k1")[1] ** 0.5 > 5 * KL
    assert moments("k3")[1] < moments("k1")[1] / 100


def test_only_k1_can_be_negative():
    """A token that pi makes rarer has a negative k1; a KL never is, and neither are k2 and k3."""
    logprobs, ref = torch.tensor([-2.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0, -2.0])
    assert ppo.kl_estimate(logprobs, ref, "k1").tolist() == [-1, 0, 1]
    assert ppo.kl_estimate(logprobs, ref, "k2").tolist() == [0.5, 0, 0.5]
    assert ppo.kl_estimate(logprobs, ref, "k3").tolist() == pytest.approx(
        [math.e - 2, 0, 1 / math.e]
    )


@pytest.mark.parametrize(
    "kl, expected", [(6.0, 0.1), (6.6, 0.101), (12.0, 0.102), (5.4, 0.099), (0.0, 0.098)]
)
def test_the_kl_penalty_follows_its_target(kl, expected):
    """Target 6: 10 % above it raises the penalty by 1 %; the error is clipped to
    20 %, so one step moves it by 2 % at most."""
    assert kl_controller.adapt_kl_coef(0.1, kl, target=6.0) == pytest.approx(expected)


def test_entropy_is_that_of_the_softmax():
    """log 3 nats for three equal logits, 0 for a sure one, and -sum p log p in
    between (p = 1/2, 1/4, 1/4: 1.5 log 2)."""
    logits = torch.tensor([[0.0, 0.0, 0.0], [1000.0, 0.0, 0.0], [math.log(2), 0.0, 0.0]])
    assert common.entropy(logits).tolist() == pytest.approx(
        [math.log(3), 0, 1.5 * math.log(2)], abs=1e-6
    )


# --------------------------------------------------------------------------------------------------
# The reward model's loss
# --------------------------------------------------------------------------------------------------
def test_pair_loss_is_log_two_at_equal_scores():
    """A new reward model knows nothing, so training starts at 0.693 a pair,
    whatever the common score."""
    scores, real = torch.tensor([0.0, 4.0]), torch.ones(2)
    assert reward.pair_loss_sum(scores, scores, real).item() == pytest.approx(2 * math.log(2))


def test_pair_loss_and_gradient_by_hand():
    """Chosen wins by log 3, so P(chosen beats rejected) = 3/4: the loss is -log
    0.75, the gradient -(1 - 0.75) and 0.25."""
    chosen, rejected = (
        torch.tensor([math.log(3)], requires_grad=True),
        torch.zeros(1, requires_grad=True),
    )
    loss = reward.pair_loss_sum(chosen, rejected, torch.ones(1))
    assert loss.item() == pytest.approx(-math.log(0.75))
    loss.backward()
    assert (chosen.grad.item(), rejected.grad.item()) == pytest.approx((-0.25, 0.25))


def test_pair_loss_sees_only_the_difference_and_centring_sees_the_sum():
    """Scores 3, 1 and 103, 101 are the same to the first term; centring adds
    0.01 * (3 + 1)^2 = 0.16 and 0.01 * 204^2."""

    def loss(c, r, coefficient):
        return reward.pair_loss_sum(
            torch.tensor([c]), torch.tensor([r]), torch.ones(1), coefficient
        ).item()

    assert loss(103.0, 101.0, 0.0) == pytest.approx(loss(3.0, 1.0, 0.0), rel=1e-5)
    assert loss(3.0, 1.0, 0.01) - loss(3.0, 1.0, 0.0) == pytest.approx(0.16)
    assert loss(103.0, 101.0, 0.01) - loss(103.0, 101.0, 0.0) == pytest.approx(416.16)


def test_fillers_count_nothing():
    """Neither in the loss, nor in its gradient, nor in the accuracy."""
    chosen, rejected = torch.tensor([1.0, -9.0], requires_grad=True), torch.tensor([0.0, 9.0])
    real = torch.tensor([1.0, 0.0])
    loss = reward.pair_loss_sum(chosen, rejected, real, center_coef=0.5)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1)) + 0.5)
    assert chosen.grad[1] == 0
    assert reward.correct_sum(chosen, rejected, real) == 1


def test_a_tie_counts_one_half():
    """Right, wrong, tie: 1.5 of 3. A model that gives every answer the same
    score gets 0.5, a coin's accuracy."""
    assert (
        reward.correct_sum(
            torch.tensor([2.0, 1.0, 1.0]), torch.tensor([1.0, 2.0, 1.0]), torch.ones(3)
        )
        == 1.5
    )


@pytest.mark.parametrize(
    "share, count, low, high",
    [
        (0.5, 10, 0.2366, 0.7634),  # half of ten says next to nothing ...
        (0.5, 1000, 0.4691, 0.5309),  # ... half of a thousand says "a coin"
        # ten of ten is not certainty; the plain normal interval would say [1, 1]
        (1.0, 10, 0.7225, 1.0),
        (0.0, 10, 0.0, 0.2775),
    ],
)
def test_wilson_interval(share, count, low, high):
    """Known values of Wilson's 95 % interval (as R's prop.test(correct=FALSE) prints them)."""
    assert statistics.wilson_interval(share, count) == pytest.approx([low, high], abs=1e-4)


# --------------------------------------------------------------------------------------------------
# Log-probs of tokens
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 5, 64, 65, 3 * 64 - 1])
def test_token_logprobs_are_log_softmax_in_fp32(dtype, tokens, monkeypatch):
    """Values and gradient agree with torch's in every chunk, and a bf16 model's
    logits are not rounded once more on the way: log-probs differ from one pass to the
    next by tiny amounts that bf16 could not hold. Fillers alone: no token at all."""
    torch.manual_seed(0)
    monkeypatch.setattr(common, "CPU_CHUNK", 64 * 50 * 4)  # 64 tokens
    logits = (4 * torch.randn(tokens, 50)).to(dtype)
    targets, weights = torch.randint(50, (tokens,)), torch.randn(tokens)
    entropies = -((logits.float() / 0.7).softmax(-1) * (logits.float() / 0.7).log_softmax(-1)).sum(
        -1
    )
    assert torch.allclose(common.entropy(logits, 0.7), entropies, atol=1e-5)
    ours, theirs = logits.clone().requires_grad_(), logits.float().requires_grad_()
    found = common.TokenLogprobs.apply(ours, targets)
    expected = theirs.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected, atol=1e-5)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad.dtype == dtype
    assert torch.allclose(
        ours.grad.float(), theirs.grad, atol=1e-6 if dtype == torch.float32 else 1e-2
    )


def test_the_size_of_a_chunk_changes_no_bit(monkeypatch):
    """Each token is for itself. A chunk is as many tokens as fill a CPU's cache, or a GPU."""
    torch.manual_seed(0)
    logits, targets = torch.randn(700, 600), torch.randint(600, (700,))
    found = []
    for size in (1, 64 * 600 * 4, 2**20, 2**27):
        monkeypatch.setattr(common, "CPU_CHUNK", size)
        ours = logits.clone().requires_grad_()
        logprobs = common.TokenLogprobs.apply(ours, targets, 0.7)
        logprobs.square().sum().backward()
        found.append((logprobs, ours.grad, common.entropy(logits)))
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others))
    for device, tokens in (("cpu", 2), ("meta", 261)):  # of Llama-3's vocabulary
        monkeypatch.undo()
        step = common.chunks(torch.empty(2000, 128256, device=device, dtype=torch.bfloat16))[0]
        assert step == slice(0, tokens)


def test_gradients_of_logits_sum_to_zero():
    """onehot(target) - softmax: what the target gains the others lose."""
    logits = torch.randn(6, 7, requires_grad=True)
    common.TokenLogprobs.apply(logits, torch.randint(7, (6,))).sum().backward()
    assert torch.allclose(logits.grad.sum(-1), torch.zeros(6), atol=1e-6)
    assert logits.grad.abs().max() > 0.1


# --------------------------------------------------------------------------------------------------
# One mean over the optimizer step
# --------------------------------------------------------------------------------------------------
# 10, 2, 3 and 1 tokens: micro-batches of unlike weight
ANSWERS = [[7] * 9 + [1], [8, 1], [9, 9, 1], [1]]


def gradient(model, answers, scale):
    """Returns d (scale * loss sum over `answers`) / d output matrix. scale
    None: the mean over these answers alone."""
    batch = sft.collate(
        [
            {"prompt_ids": [5, 6], "prompt_loss_mask": [0, 0], "responses": [a], "row_weight": 1}
            for a in answers
        ],
        pad_id=0,
    )
    logprobs = common.last_logprobs(model, batch["ids"], batch["mask"], batch["loss_mask"])
    loss = sft.sft_loss_sum(logprobs, batch["loss_mask"]) * (
        1 / batch["loss_mask"].sum() if scale is None else scale
    )
    return torch.autograd.grad(loss, model.lm_head.weight)[0]


@pytest.mark.parametrize("count, micro_steps", [(1, 1), (1, 4), (2, 2), (4, 1), (1, 2)])
def test_micro_batches_and_ranks_add_up_to_one_token_mean(
    tiny_model, monkeypatch, count, micro_steps
):
    """DeepSpeed divides each loss by the accumulation steps and averages gradients
    over the ranks. With both undone by `loss_scale`, any cut of the batch has the
    gradient of the mean over its 16 tokens: no layout changes a result."""
    monkeypatch.setattr(ranks, "get_world_size", lambda: count)
    scale = common.loss_scale(16, micro_steps)
    size = len(ANSWERS) // (count * micro_steps)
    parts = [ANSWERS[i : i + size] for i in range(0, len(ANSWERS), size)]
    as_deepspeed = sum(gradient(tiny_model, part, scale) / micro_steps for part in parts) / count
    assert torch.allclose(as_deepspeed, gradient(tiny_model, ANSWERS, 1 / 16), atol=1e-6)


def test_the_mean_of_means_is_something_else(tiny_model):
    """Averaging four micro-batch means gives the lone token of the shortest answer ten times
    the weight of each token of the longest: a different gradient, by a third and more."""
    means = sum(gradient(tiny_model, [a], None) for a in ANSWERS) / 4
    exact = gradient(tiny_model, ANSWERS, 1 / 16)
    assert (means - exact).norm() > 0.3 * exact.norm()


def test_a_step_without_tokens_is_no_division_by_zero():
    """It can happen with masks of the user's making; then the sum is 0 and the
    scale is of no account."""
    assert math.isfinite(common.loss_scale(0, 4))


# --------------------------------------------------------------------------------------------------
# Throughput
# --------------------------------------------------------------------------------------------------
# Of tiny_model in rows of 100 tokens: a multiplication and an addition for each weight and token,
# and for each position that is looked back at. (Norms are left out here: under 1 %.)
LAYERS = 2 * 2 * (4 * 32 * 32 + 3 * 32 * 64)  # 2 layers of 32, MLP 64
ATTENTION = 4 * 2 * 32 * 100
ADAPTERS = 2 * 2 * (4 * (32 + 32) + 3 * (32 + 64))  # of rank 1 beside each of the 14 matrices


@pytest.mark.parametrize(
    "options, layers, attention, output, adapters",
    [
        ({}, 1, 1, 1, 1),
        # gradients of what goes in, and of the weights
        ({"trains": True}, 3, 3, 3, 3),
        ({"trains": True, "checkpointing": True}, 4, 4, 3, 4),
        ({"checkpointing": True}, 1, 1, 1, 1),  # nothing to compute again
    ],
)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_flops_by_hand(tiny_model, options, layers, attention, output, adapters, adapted, tied):
    """100 tokens of one row, 25 of them scored: the output matrix is multiplied for those alone,
    the input embedding never. With LoRA the frozen matrices have no gradients of their own: about
    two forwards' worth of work in place of three."""
    model = copy.deepcopy(tiny_model).requires_grad_(True)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    if adapted:
        args = sft.get_args([])
        lora.add_adapters(model, args, "somewhere", dim=1)
        trains = "trains" in options
        layers, output = layers - trains, output - trains
    head = 2 * 32 * model.config.vocab_size
    expected = 100 * (layers * LAYERS + attention * ATTENTION) + 25 * output * head
    expected += 100 * adapters * ADAPTERS * adapted
    found = throughput.count_flops(model, 100, 100, 25, **options)
    assert found == pytest.approx(expected, rel=0.01)


def test_a_value_model_has_no_output_matrix(tiny_model):
    """Its head is one row, read at every token; the number of scored tokens is of no account."""
    value = LlamaForSequenceClassification(tiny_model.config)
    expected = 100 * (LAYERS + ATTENTION)
    for scored in (0, 25):
        found = throughput.count_flops(value, 100, 100, scored)
        assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    "trains, keeps, passes", [(False, False, 2), (True, False, 4), (True, True, 3)]
)
def test_an_actor_that_waits_for_its_critic_has_no_backward(tiny_model, trains, keeps, passes):
    """A step of PPO: the rollout, the reference and a judge, the forward that stores (unless one
    pass is both), and what trains: one update, as --target_kl left the other epochs out. In
    --critic_warmup_steps the actor does not."""
    logged = []
    args = ppo.get_args("--preset toy --allow_unstable 1 --ppo_epochs 4".split())
    run = SimpleNamespace(args=args, step=2, log=lambda *given: logged.extend(given))
    weight = torch.tensor([1.0, 0.0])  # the second row is a filler
    mask, response_mask = torch.ones(2, 100), torch.zeros(2, 25)
    response_mask[0] = 1
    batch = micro_batch(mask=mask, response_mask=response_mask, row_weight=weight)
    means = SimpleNamespace(of_all_ranks=lambda: {"critic_loss": 0.0}, updates=1)
    actor = SimpleNamespace(engine=tiny_model, trains=trains, keeps=keeps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_metrics, "of_all_ranks", lambda batches: {})
        rollout_metrics.log(run, 0.1, means, [0, 1, 2, 3], [actor], [tiny_model], [batch])
    _, tokens, flops = logged
    forward = throughput.count_flops(tiny_model, 100, 100, 25)
    assert tokens == 100 and flops == pytest.approx((2 + passes + 1) * forward)


@pytest.mark.parametrize(
    "scores, warned", [([0.0, 0.0, 9.0], True), ([0.0, 1.0, 0.0], False), ([2.5, 2.5, 0.0], True)]
)
def test_a_judge_that_finds_all_equal_is_named(scores, warned, capsys):
    """Two responses and a filler, whose score says nothing."""
    scores = torch.tensor(scores)[:, None]
    weight = torch.tensor([1.0, 1.0, 0.0])
    rollout_metrics.warn_of_equal_scores([micro_batch(scores=scores, row_weight=weight)])
    said = capsys.readouterr().out
    assert ("all 2 scores of the first step are" in said) == warned


def test_sft_scores_what_its_loss_covers(tokenizer):
    """Two rows, one of them a filler: the prompt's tokens take part, and get no logits."""
    rows = [
        {"prompt_ids": [5, 6], "prompt_loss_mask": [0, 0], "responses": [[7, 8, 1]]},
        {"prompt_ids": [5], "prompt_loss_mask": [0], "responses": [[7, 1]]},
    ]
    weighted = [{**row, "row_weight": weight} for row, weight in zip(rows, (1, 0))]
    batch = sft.collate(weighted, pad_id=0)
    assert Run.count_tokens(SimpleNamespace(micro_batches=[batch])) == [5, 1, 3]


def test_seconds_are_all_of_a_steps_time(monkeypatch):
    """Loading (3 seconds here), what the body does (10) and writing the line before (1) are in
    `seconds`; an evaluation (100) is not."""
    clock, lines = [0.0], []

    def takes(seconds, value=None):
        def work(*args, **options):
            clock[0] += seconds
            return value

        return work

    def micro_batches():
        for _ in range(3):
            takes(3)()
            yield [{}]

    nothing = SimpleNamespace(frozen_weights=takes(0))
    fakes = {
        "checkpoints": nothing,
        "errors": nothing,
        "signal": SimpleNamespace(signal=takes(0), SIGTERM=15, SIGINT=2),
    }
    fakes |= {"time": SimpleNamespace(time=lambda: clock[0]), "ranks": ranks}
    fakes |= {"fingerprint": takes(0), "monitors": SimpleNamespace(take_over=takes(0))}
    fakes["logs"] = SimpleNamespace(draw_curves=takes(20))
    speed = SimpleNamespace(speed=lambda *given: {"seconds": given[-1]})
    fakes |= {"throughput": speed, "refusals": SimpleNamespace(warn_of_stages=takes(0))}
    for name, fake in fakes.items():
        monkeypatch.setattr(run_module, name, fake)
    run = Run.__new__(Run)
    args = dict(seed=1, resume=False, eval_steps=2, log_steps=1, max_hours=0, save_steps=0)
    args["keep_best"] = None
    run.args, run.last_step, run.steps_per_epoch = SimpleNamespace(**args), 3, 3
    run.phase, run.signals, run.began = SimpleNamespace(note=takes(0)), [], 0
    run.train, run.held_out, run.legend_shown = [], [], None
    run.folder = SimpleNamespace(take=takes(0), settle=takes(0))
    run.print_banner, run.texts = takes(0), tuple
    run.open_epoch = lambda *given: (None, micro_batches())
    run.write = lambda record, engine=None: (takes(1)(), lines.append(record))
    for _ in run.steps({"model": None}, None, takes(100, {}), []):
        takes(10)()
        run.log({}, 1, 1)
    assert [line.get("seconds") for line in lines] == [None, 13, 14, 13]


def test_the_rate_of_each_model_is_its_own():
    """An actor that has made no step (--critic_warmup_steps) learns at no rate; the critic does."""
    schedule = SimpleNamespace(last_epoch=1, base_lrs=[0.1], lr_lambdas=[lambda step: 1 - step])
    critic = SimpleNamespace(global_steps=1, lr_scheduler=schedule, was_step_applied=lambda: True)
    actor = SimpleNamespace(global_steps=0)
    assert (throughput.learning_rate(actor), throughput.learning_rate(critic)) == (0, 0.1)


# --------------------------------------------------------------------------------------------------
# Sampling
# --------------------------------------------------------------------------------------------------
class Fixed(nn.Module):
    """A "model" with the same next-token probabilities everywhere."""

    base_model, config = property(lambda self: self), LlamaConfig(num_hidden_layers=1)

    def __init__(self, probs):
        super().__init__()
        self.probs = torch.tensor(probs)

    def forward(
        self,
        input_ids,
        attention_mask=None,
        past_key_values=None,
        use_cache=None,
        position_ids=None,
    ):
        return SimpleNamespace(logits=self.probs.log().expand(*input_ids.shape, -1))


def sample(probs, uniforms, **options):
    """Returns one token for each number of `uniforms`."""
    ids = torch.full((len(uniforms), 1), 2)
    answer, _ = generate(
        Fixed(probs),
        ids,
        torch.ones_like(ids),
        torch.tensor(uniforms).unsqueeze(1),
        SimpleNamespace(pad_token_id=0, eos_token_id=99),
        **options,
    )
    return answer[:, 0].tolist()


def counts(probs, **options):
    """Returns how often each token is drawn by 1000 evenly spaced numbers: the
    probabilities, without noise."""
    return np.bincount(
        sample(probs, [(i + 0.5) / 1000 for i in range(1000)], **options), minlength=len(probs)
    ).tolist()


def test_sampling_is_the_inverse_of_the_cumulative_distribution():
    """p = 0.2, 0.5, 0.3: the tokens own [0, 0.2), [0.2, 0.7) and [0.7, 1). The
    same number always gives the same token."""
    assert sample([0.2, 0.5, 0.3], [0.0, 0.19, 0.21, 0.69, 0.71, 0.9999999]) == [0, 0, 1, 1, 2, 2]
    assert counts([0.2, 0.5, 0.3]) == [200, 500, 300]


def test_an_impossible_token_is_never_drawn():
    """Also not by the numbers at the ends, where a cumulative distribution stands still."""
    assert set(sample([0.0, 0.5, 0.5, 0.0], [0.0, 0.5, 0.99999994])) == {1, 2}


def test_temperature_sharpens_and_flattens():
    """p^(1/T), scaled to sum to 1: at T = 0.5, 0.2 : 0.4 : 0.4 becomes 1 : 4 : 4 ninths."""
    assert counts([0.2, 0.4, 0.4], temperature=0.5) == pytest.approx(
        [1000 / 9, 4000 / 9, 4000 / 9], abs=1
    )


def test_top_k_and_top_p_by_hand():
    """top_k 2 keeps the two likeliest. top_p 0.75 keeps tokens until their sum
    reaches 0.75: 0.5 does not, 0.8 does."""
    probs = torch.tensor([[0.15, 0.5, 0.05, 0.3]])

    def kept(top_k, top_p):
        return decoding.filter_top(probs, top_k, top_p)[0].tolist()

    assert kept(0, 1.0) == pytest.approx([0.15, 0.5, 0.05, 0.3])
    assert kept(2, 1.0) == pytest.approx([0, 0.5, 0, 0.3])
    assert kept(9, 1.0) == pytest.approx([0.15, 0.5, 0.05, 0.3])
    assert kept(0, 0.75) == pytest.approx([0, 0.5, 0, 0.3])
    assert kept(0, 0.9) == pytest.approx([0.15, 0.5, 0, 0.3])
    assert kept(0, 0.01) == pytest.approx([0, 0.5, 0, 0])  # the likeliest token always stays
    assert kept(2, 0.6) == pytest.approx([0, 0.5, 0, 0])  # 0.5 of the 0.8 that top_k left is 0.625
    assert counts([0.15, 0.5, 0.05, 0.3], top_k=2) == pytest.approx([0, 625, 0, 375], abs=1)


def test_random_numbers_belong_to_the_row():
    """A row's numbers depend on (seed, step, row) only: not on its slot, its neighbours
    or its rank. So the answers stay the same when the number of GPUs changes."""
    all_rows = decoding.row_uniforms(7, 3, [0, 1, 2, 3], 5)
    assert torch.equal(decoding.row_uniforms(7, 3, [3, 1], 5), all_rows[[3, 1]])
    assert ((0 <= all_rows) & (all_rows < 1)).all() and len(all_rows.unique()) == 20
    for other in (
        decoding.row_uniforms(8, 3, [0], 5),
        decoding.row_uniforms(7, 4, [0], 5),
        all_rows[1:2],
    ):
        assert not torch.isin(other, all_rows[:1]).any()


def test_an_answer_does_not_depend_on_its_neighbours(tiny_model):
    """The same row alone, and in a batch whose longer prompt pads it: the same
    answer, token for token."""
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    uniforms = decoding.row_uniforms(0, 0, [0, 1], 8)
    alone, alone_mask = generate(tiny_model, *common.pad([[5, 6]], 0), uniforms[:1], tokenizer)
    batch, batch_mask = generate(
        tiny_model, *common.pad([[5, 6], [7, 8, 9, 10, 11]], 0), uniforms, tokenizer
    )
    count = int(alone_mask.sum())
    assert count == int(batch_mask[0].sum()) >= 2
    assert alone[0, :count].tolist() == batch[0, :count].tolist()


def test_the_cache_does_not_change_what_is_sampled(tiny_model):
    """Token by token with a key-value cache, or all over again from the whole
    text: the same answer."""
    uniforms = decoding.row_uniforms(0, 0, [3], 8)
    answer, _ = generate(
        tiny_model,
        *common.pad([[5, 6, 7]], 0),
        uniforms,
        SimpleNamespace(pad_token_id=0, eos_token_id=-1),
    )
    text = [5, 6, 7]
    with torch.no_grad():
        for u in uniforms[0].tolist():
            cdf = tiny_model(torch.tensor([text])).logits[0, -1].double().softmax(-1).cumsum(-1)
            text.append(int((cdf <= u).sum()))
    assert answer[0].tolist() == text[3:]


def test_an_answer_can_be_kept_from_ending_early(tiny_model, tokenizer):
    """--min_new_tokens 4: EOS has no probability before. Uniforms of 0 would
    draw the first token that has any: 0, or EOS."""
    ids, mask = common.pad([[5, 6, 7], [8, 9]], 0)
    with torch.no_grad():
        cdf = tiny_model(ids[:1]).logits[0, -1].softmax(-1).double().cumsum(-1)
    uniforms = torch.full((2, 6), cdf[:2].mean().item())  # in EOS's share of row 0's first token
    assert generate(tiny_model, ids, mask, uniforms, tokenizer)[0][0, 0] == tokenizer.eos_token_id
    answer, answer_mask = generate(tiny_model, ids, mask, uniforms, tokenizer, min_new_tokens=4)
    assert (answer[:, :4] != tokenizer.eos_token_id).all() and (answer_mask[:, :4] == 1).all()


def test_ids_that_no_token_uses_are_never_sampled(tiny_model):
    """An embedding is often padded beyond the tokenizer; the reward model's may
    be padded less, and could not read such an id. Nor does a NaN lead outside:
    it is the check on what was scored that stops the run."""
    ids, mask = common.pad([[5, 6, 7]], 0)
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=-1)
    uniforms = torch.full((1, 3), 0.9999)
    assert generate(tiny_model, ids, mask, uniforms, tokenizer)[0].max() > 20, (
        "else nothing is tested"
    )
    assert generate(tiny_model, ids, mask, uniforms, tokenizer, known=20)[0].max() < 20
    broken = copy.deepcopy(tiny_model)
    broken.lm_head.weight.data.fill_(float("nan"))
    assert generate(broken, ids, mask, uniforms, tokenizer, known=20)[0].tolist() == [[19, 19, 19]]


def test_a_stop_text_ends_an_answer(tiny_model, tokenizer):
    """--stop: the answer ends with the token that completes the text, though it
    took two tokens to write. Its neighbour, which never writes it, goes on."""
    ids, mask = common.pad([[5, 6, 7], [8, 9]], 0)
    uniforms = decoding.row_uniforms(1, 1, [0, 1], 10)
    free, free_mask = generate(tiny_model, ids, mask, uniforms, tokenizer)
    text = tokenizer.decode(free[0, 2:4])
    assert free_mask.sum(1).tolist() == [10, 10] and text not in tokenizer.decode(
        free[1]
    ) + tokenizer.decode(free[0, :3])
    answer, answer_mask = generate(tiny_model, ids, mask, uniforms, tokenizer, stop=[text])
    assert answer_mask.sum(1).tolist() == [4, 10]
    assert answer[0, :4].tolist() == free[0, :4].tolist() and answer[1].tolist() == free[1].tolist()


# --------------------------------------------------------------------------------------------------
# The average of the weights
# --------------------------------------------------------------------------------------------------
def average_of(model):
    """The EMA of a model's weights (decay 0.992), and the engine that it follows."""
    engine = SimpleNamespace(module=model, was_step_applied=lambda: True)
    return ema.Ema(SimpleNamespace(enable_ema=1, ema_decay=0.992), model, {}), engine


def ema_after_one_step(dtype, by):
    """Returns how far the EMA (decay 0.992) of a weight of 1 moves when the
    weight moves by `by`."""
    model = nn.Linear(1, 1, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.fill_(1.0)
        average, engine = average_of(model)
        model.weight.add_(by)
    average.update(engine)
    assert average.shards["weight"].dtype == torch.float32
    return average.shards["weight"].item() - 1.0


def test_ema_moves_by_one_minus_decay_of_the_difference():
    """decay 0.992: 0.8 % of the way, every optimizer step; half of the way after 86 steps."""
    assert ema_after_one_step(torch.float32, 0.5) == pytest.approx(0.008 * 0.5, rel=1e-4)


def test_ema_of_a_bf16_model_is_kept_in_fp32():
    """0.8 % of 0.0625 is 0.0005. Near 1 bf16 knows no number closer than
    0.0039: an EMA in bf16 would stand still."""
    assert ema_after_one_step(torch.bfloat16, 0.0625) == pytest.approx(0.0005, rel=1e-3)
    assert (torch.tensor(1.0, dtype=torch.bfloat16) + 0.0005).item() == 1.0


def test_ema_starts_as_a_copy():
    """A view would follow the weights, and the average would be the model itself. Under ZeRO-3
    the fp32 shard (`ds_tensor`) is easily taken for a copy: here it is played by a view."""
    model = nn.Linear(2, 2, bias=False)
    model.weight.ds_tensor = model.weight.detach().flatten()
    average, engine = average_of(model)
    before = average.shards["weight"].clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    assert torch.equal(average.shards["weight"], before)
    average.update(engine)
    assert torch.allclose(average.shards["weight"], before + 0.008, atol=1e-6)


# --------------------------------------------------------------------------------------------------
# Optimizer steps are counted
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "micro_batches, accumulation, epochs, steps",
    [(1, 1, 1, 1), (4, 4, 1, 1), (4, 2, 1, 2), (4, 2, 3, 6)],
)
def test_minibatches_make_the_optimizer_steps_they_promise(
    micro_batches, accumulation, epochs, steps
):
    """epochs * micro-batches / accumulation lists, and every micro-batch once in each epoch."""
    lists = list(ppo.minibatches(list(range(micro_batches)), accumulation, epochs, (1, 2)))
    assert [len(x) for x in lists] == [accumulation] * steps
    per_epoch = steps // epochs
    for e in range(epochs):
        assert sorted(sum(lists[e * per_epoch : (e + 1) * per_epoch], [])) == list(
            range(micro_batches)
        )


# --------------------------------------------------------------------------------------------------
# When numbers go wrong
# --------------------------------------------------------------------------------------------------
class Overflowing:
    """What `skip_together` needs of an engine and its optimizer: whether its
    fp16 gradients overflowed. Each micro-batch is the last one of an update."""

    def __init__(self, overflow):
        self.optimizer, self.overflow = self, overflow

    def has_overflow(self, partition_gradients=True):
        return self.overflow

    def is_gradient_accumulation_boundary(self):
        return True


@pytest.mark.parametrize(
    "actor, critic", [(False, False), (True, False), (False, True), (True, True)]
)
def test_in_fp16_both_skip_or_none(actor, critic):
    """An overflow in one engine makes both skip the update; else the critic
    would go on without the actor. The next update is asked anew."""
    fp16, engines = SimpleNamespace(dtype="fp16"), [Overflowing(actor), Overflowing(critic)]
    patches.skip_together(fp16, engines)
    assert [e.has_overflow() for e in engines] == [actor or critic] * 2
    for engine in engines:
        engine.overflow = False
    patches.skip_together(fp16, engines)
    assert [e.has_overflow() for e in engines] == [False] * 2


def test_a_nan_stops_the_run_and_leaves_its_rows_behind(tmp_path, capsys):
    """The message names step and number; the rows that were being worked on are
    a .jsonl file that --data_path takes. Where nothing is known of rows, an
    evaluation for example, none is written."""
    args = ppo.get_args(["--preset", "toy", "--output_dir", str(tmp_path)])
    lines = [{"prompt": f"Why {n}?", "completion": " So.", "topic": 7} for n in range(2)]
    crash.stop_unless_finite(args, {"step": 6, "values": 1.0}, lines)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
        patch.setattr(crash, "finish", lambda args, code: sys.exit(code))
        crash.stop_unless_finite(
            args, {"step": 7, "values": float("nan"), "reward": float("inf"), "entropy": 1.0}, lines
        )
    assert stop.value.code == 1
    message = capsys.readouterr().out
    assert "step 7: values, reward not finite" in message
    first = "generation_batch_size training_batch_size ppo_epochs generation_batches ZeRO --dtype"
    places = [message.index(word) for word in first.split()]  # what to check, in this order
    assert places == sorted(places)
    file = tmp_path / "nonfinite_rank0.jsonl"
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {**row, "step": 7} for row in lines
    ]
    again = ppo.get_args(["--preset", "toy", "--data_path", str(file), "--data_split", "0,0,1"])
    train, held_out = rows.load_rows(
        again, model_folders.load_tokenizer(str(ROOT / "toy/model")), "ppo", 32
    )
    assert (
        sorted([*train["prompt"], *held_out["prompt"]]) == ["Why 0?", "Why 1?"]
        and json.loads(train[0]["extra"])["topic"] == 7
    )
    file.unlink()
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr(crash, "finish", lambda args, code: sys.exit(code))
        logs.write(args, {"step": 0, "eval_loss": float("nan")}, ["step"])
    assert not list(tmp_path.iterdir())
