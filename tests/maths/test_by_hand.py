"""Small numbers that pencil and paper can check: GAE, the two clipped losses, and KL."""

import math

import pytest
import torch

import ppo


def test_gae_of_two_tokens():
    """gamma 1, lam 0.5, r = 0, 1 and V = 0.5, 0.25, and padding:
    delta_1 = 1 + 0    - 0.25 =  0.75      A_1 = 0.75
    delta_0 = 0 + 0.25 - 0.50 = -0.25      A_0 = -0.25 + 0.5 * 0.75 = 0.125
    The returns are A + V."""
    rewards, values = torch.tensor([[0, 1, 777.0]]), torch.tensor([[0.5, 0.25, 777.0]])
    mask = torch.tensor([[1, 1, 0]])
    advantages, returns = ppo.gae(rewards, values, mask, gamma=1.0, lam=0.5)
    assert advantages.tolist() == [[0.125, 0.75, 0]] and returns.tolist() == [[0.625, 1.0, 0]]


# ---- PPO's two losses ----
def with_gradient(f, x):
    """Returns f(x) and df/dx at the number x."""
    x = torch.tensor([[x]], dtype=torch.float64, requires_grad=True)
    y = f(x).sum()
    return y.item(), torch.autograd.grad(y, x)[0].item()


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


# ---- KL: three estimators, one truth ----
PI, REF = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]], dtype=torch.float64)
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
        assert (k < 0).any() == (kind == "k1")  # as a KL never is
    assert (means["k1"], means["k3"]) == pytest.approx((KL, KL), rel=1e-12)
    assert 0.0001 < abs(means["k2"] - KL) < 0.05 * KL
    assert variances["k1"] ** 0.5 > 5 * KL and variances["k3"] < variances["k1"] / 100


def test_k3_is_never_negative_in_fp32():
    """rlhf-book#525: r - 1 - log r was, for half of the tokens where log r is about 1e-5, the size
    that the first steps of a run show."""
    generator = torch.Generator().manual_seed(1)
    for size in (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1, 10):
        log_r = size * torch.randn(10_000, generator=generator)
        k3 = ppo.kl_estimate(torch.zeros(()), log_r, "k3")
        exact = ppo.kl_estimate(torch.zeros(()).double(), log_r.double(), "k3")
        assert (k3 >= 0).all() and torch.allclose(k3.double(), exact, rtol=1e-6, atol=1e-6 * size)


def test_k3_times_the_ratio_has_the_gradient_of_k2_in_the_first_update():
    """TRL#6503: of each token, not of the mean alone."""
    logprobs, ref = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).double()
    logprobs.requires_grad_()
    ratio = (logprobs - logprobs.detach()).exp()
    corrected = (ratio * ppo.kl_estimate(logprobs, ref, "k3")).sum()
    k2 = ppo.kl_estimate(logprobs, ref, "k2").sum()
    assert torch.allclose(*(torch.autograd.grad(loss, logprobs)[0] for loss in (corrected, k2)))


@pytest.mark.parametrize("place", ["loss", "reward"])
@pytest.mark.parametrize("kind", ppo.KL_ESTIMATORS)
def test_the_gradient_of_kl(kind, place):
    """Expected, where tokens come from pi itself, with respect to pi's logits near the reference.

    In the loss that of k2 is the gradient of KL(pi || ref). That of k1 is zero: it is the score
    function, and teaches nothing. That of k3 is the gradient of KL(ref || pi), which is close when
    both are. In the reward an estimate acts through the log-prob of its token. There that of k1 is
    right, and those of k2 and k3, which are as large on either side, vanish near the reference."""
    generator = torch.Generator().manual_seed(1)
    ref, step = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    logits = (ref + 0.01 * step).requires_grad_()
    pi, ref = logits.log_softmax(-1), ref.log_softmax(-1)

    def gradient(x):
        return torch.autograd.grad(x.sum(), logits, retain_graph=True)[0]

    true, backward = gradient(pi.exp() * (pi - ref)), gradient(ref.exp() * (ref - pi))
    estimate = ppo.kl_estimate(pi, ref, kind)
    if place == "reward":
        estimate = estimate.detach() * pi
    found = gradient(pi.detach().exp() * estimate)
    right = {"loss": {"k2": true, "k3": backward}, "reward": {"k1": true}}[place].get(kind)
    if right is None:
        assert found.norm() < 0.02 * true.norm()
    else:
        assert torch.allclose(found, right, atol=1e-12)
