"""The losses of steps 2 and 3, and KL: small numbers that pencil and paper can check."""

import math
from types import SimpleNamespace

import pytest
import torch

import ppo
import reward
from tests.conftest import micro_batch


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
        (1.0, 2.0, -2.0, -2.0),  # the first update: a plain policy gradient, -A
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
    """The four corners of clip x sign of the advantage, clip = 0.2. The minimum is the pessimist's
    choice: where moving on would only look better the gradient is zero, where things went wrong it
    is whole."""
    old = torch.full((1, 1), -3.0, dtype=torch.float64)
    advantages, now = torch.full_like(old, advantage), -3.0 + math.log(ratio)
    found = with_gradient(lambda x: ppo.policy_loss(x, old, advantages, 0.2)[0], now)
    assert found == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    "ratio, advantage, loss",
    [
        # within clip_high 0.3: the gain counts in full, where clip 0.2 would have cut it
        (1.25, 1.0, -1.25),
        (1.50, 1.0, -1.30),
        (0.50, -1.0, 0.80),  # the lower bound is clip's
    ],
)
def test_clip_high_lets_rare_good_tokens_rise_further(ratio, advantage, loss):
    """As in DAPO."""
    logprobs, advantages = torch.tensor([[ratio]]).log(), torch.tensor([[advantage]])
    found = ppo.policy_loss(logprobs, torch.zeros(1, 1), advantages, clip=0.2, clip_high=0.3)[0]
    assert found.item() == pytest.approx(loss, rel=1e-5)


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
    found = with_gradient(lambda x: ppo.value_loss(x, zero, zero + 1, 0.2), value)
    assert found == pytest.approx((loss, gradient))


def test_kl_costs_and_entropy_pays():
    """With --kl_in loss the actor pays for KL, and --entropy_coef rewards entropy: signs and
    weights, by hand. `clipped` marks the one token whose ratio left the range in the direction of
    its advantage."""
    args = ppo.get_args(
        "--preset toy --kl_coef 0.3 --kl_in loss --kl_estimator k2 --entropy_coef 0.5".split()
    )
    new, ref = torch.tensor([[0.5, 0.1, 0.5]]), torch.tensor([[0.1, 0.1, 0.5]])
    old, advantages = torch.tensor([[0.0, 0.1, 0.5]]), torch.tensor([[1.0, 1.0, -1.0]])
    batch = micro_batch(old_logprobs=old, ref_logprobs=ref, advantages=advantages)
    entropy = torch.tensor([[2.0, 0.0, 0.0]])
    loss, ratio, clipped = ppo.actor_loss(args, batch, new, entropy)
    assert loss[0].tolist() == pytest.approx([-1.2 + 0.3 * 0.4**2 / 2 - 0.5 * 2.0, -1.0, 1.0])
    assert clipped[0].tolist() == [True, False, False]
    assert ratio[0, 0].item() == pytest.approx(math.exp(0.5))
    paid_in_reward = ppo.get_args("--preset toy --kl_coef 0.3".split())
    loss, _, _ = ppo.actor_loss(paid_in_reward, batch, new, None)
    assert loss[0].tolist() == pytest.approx([-1.2, -1.0, 1.0])


def test_a_response_that_was_cut_off_counts_in_no_divisor():
    """--mask_truncated 1: its tokens are no part of any loss's mean."""
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 1, 1]])
    args = SimpleNamespace(mask_truncated=1, loss_mean="tokens", max_answer_seq_len=3)
    for ended, tokens, responses in (([0.0, 1, 0], 3, 1), ([0.0, 0, 0], 0, 0)):
        batch = SimpleNamespace(ended=torch.tensor(ended), response_mask=mask)
        masks = [ppo.trained_mask(args, batch)]
        weights, divisor = ppo.loss_weights(args, masks)
        assert divisor == tokens and weights[0].sum() == tokens
        args.loss_mean = "responses"
        weights, divisor = ppo.loss_weights(args, masks)
        assert divisor == responses and weights[0].sum() == pytest.approx(responses)
        args.loss_mean = "tokens"


# --------------------------------------------------------------------------------------------------
# KL: three estimators, one truth
# --------------------------------------------------------------------------------------------------
PI = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REF = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
# 0.0253; the third token adds 0.2 * log(1) = 0
KL = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4)


def test_the_estimators_of_kl():
    """Mean and variance under pi, exactly: all three tokens, weighted by their probabilities. k1
    and k3 are unbiased; k2 is off by a little, here under 5 %. k1's deviation is many times the KL
    itself; k3 has a hundredth of its variance."""
    means, variances = {}, {}
    for kind in ppo.KL_ESTIMATORS:
        k = ppo.kl_estimate(PI.log(), REF.log(), kind)
        means[kind] = (PI * k).sum().item()
        variances[kind] = (PI * (k - means[kind]) ** 2).sum().item()
    assert (means["k1"], means["k3"]) == pytest.approx((KL, KL), rel=1e-12)
    assert 0.0001 < abs(means["k2"] - KL) < 0.05 * KL
    assert variances["k1"] ** 0.5 > 5 * KL and variances["k3"] < variances["k1"] / 100


def test_only_k1_can_be_negative():
    """A token that pi makes rarer has a negative k1; a KL never is, and neither are k2 and k3."""
    logprobs, ref = torch.tensor([-2.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0, -2.0])
    expected = dict(k1=[-1, 0, 1], k2=[0.5, 0, 0.5], k3=[math.e - 2, 0, 1 / math.e])
    for kind, numbers in expected.items():
        assert ppo.kl_estimate(logprobs, ref, kind).tolist() == pytest.approx(numbers)


LOGITS, REF_LOGITS = torch.randn(
    2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64
)


def gradients(logits):
    """Returns log-probs of pi and ref, and what takes a gradient with respect to pi's logits."""
    logits = logits.clone().requires_grad_()
    gradient = lambda x: torch.autograd.grad(x.sum(), logits, retain_graph=True)[0]  # noqa: E731
    return logits.log_softmax(-1), REF_LOGITS.log_softmax(-1), gradient


def test_the_gradient_of_kl_in_the_loss():
    """Where tokens come from pi itself, the expected gradient of k2 is that of KL(pi || ref). That
    of k1 is zero: it is the score function, and teaches nothing. That of k3 is the gradient of
    KL(ref || pi), which is close when both are."""
    pi, ref, gradient = gradients(LOGITS)
    expected = {"k1": 0 * pi, "k2": pi.exp() * (pi - ref), "k3": ref.exp() * (ref - pi)}
    for kind, kl in expected.items():
        found = gradient(pi.detach().exp() * ppo.kl_estimate(pi, ref, kind))
        assert torch.allclose(found, gradient(kl), atol=1e-12), kind


def test_the_gradient_of_kl_in_the_reward():
    """There an estimate acts through the log-prob of the token that it is placed on. For k1 the
    expected gradient is that of KL(pi || ref). For k2 and k3, which are as large on either side,
    it vanishes near the reference."""
    pi, ref, gradient = gradients(REF_LOGITS + 0.01 * LOGITS)
    true = gradient(pi.exp() * (pi - ref))
    for kind in ppo.KL_ESTIMATORS:
        penalty = ppo.kl_estimate(pi, ref, kind).detach()
        found = gradient(pi.detach().exp() * penalty * pi)
        if kind == "k1":
            assert torch.allclose(found, true, atol=1e-12)
        else:
            assert found.norm() < 0.02 * true.norm()


# --------------------------------------------------------------------------------------------------
# The reward model's loss
# --------------------------------------------------------------------------------------------------
def test_pair_loss_and_gradient_by_hand():
    """A new reward model knows nothing, so training starts at log 2 a pair, whatever the common
    score. Where chosen wins by log 3, P(chosen beats rejected) = 3/4: the loss is -log 0.75, and
    the gradients are -(1 - 0.75) and 0.25."""
    scores = torch.tensor([0.0, 4.0])
    assert reward.pair_loss_sum(scores, scores, torch.ones(2)).item() == pytest.approx(math.log(4))
    chosen = torch.tensor([math.log(3)], requires_grad=True)
    rejected = torch.zeros(1, requires_grad=True)
    loss = reward.pair_loss_sum(chosen, rejected, torch.ones(1))
    loss.backward()
    found = loss.item(), chosen.grad.item(), rejected.grad.item()
    assert found == pytest.approx((-math.log(0.75), -0.25, 0.25))


def test_pair_loss_sees_only_the_difference_and_centring_sees_the_sum():
    """Scores 3, 1 and 103, 101 are the same to the first term; centring adds 0.01 * (3 + 1)^2 =
    0.16 and 0.01 * 204^2."""

    def loss(chosen, rejected, coefficient):
        scores = torch.tensor([chosen]), torch.tensor([rejected])
        return reward.pair_loss_sum(*scores, torch.ones(1), coefficient).item()

    assert loss(103.0, 101.0, 0.0) == pytest.approx(loss(3.0, 1.0, 0.0), rel=1e-5)
    assert loss(3.0, 1.0, 0.01) - loss(3.0, 1.0, 0.0) == pytest.approx(0.16)
    assert loss(103.0, 101.0, 0.01) - loss(103.0, 101.0, 0.0) == pytest.approx(416.16)


def test_fillers_count_nothing_and_a_tie_one_half():
    """A filler counts neither in the loss, nor in its gradient, nor in the accuracy. Right, wrong,
    tie: 1.5 of 3; a model that gives every response the same score gets a coin's accuracy."""
    chosen, rejected = torch.tensor([1.0, -9.0], requires_grad=True), torch.tensor([0.0, 9.0])
    real = torch.tensor([1.0, 0.0])
    loss = reward.pair_loss_sum(chosen, rejected, real, center_coef=0.5)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1)) + 0.5)
    assert chosen.grad[1] == 0
    assert reward.correct_sum(chosen, rejected, real) == 1
    three = torch.tensor([2.0, 1.0, 1.0]), torch.tensor([1.0, 2.0, 1.0])
    assert reward.correct_sum(*three, torch.ones(3)) == 1.5
