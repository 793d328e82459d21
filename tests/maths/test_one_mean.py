"""One mean over an optimizer step, whatever the layout; and the average of the weights."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import common
import ppo
import sft
from machinery import ema, metrics, ranks
from tests.conftest import micro_batch

# 10, 2, 3 and 1 tokens: micro-batches of unlike weight
RESPONSES = [[7] * 9 + [1], [8, 1], [9, 9, 1], [1]]


def gradient(model, responses, scale):
    """Returns d (scale * loss sum over `responses`) / d output matrix."""
    prompt = {"prompt_ids": [5, 6], "prompt_loss_mask": [0, 0], "row_weight": 1}
    batch = sft.collate([{**prompt, "responses": [response]} for response in responses], pad_id=0)
    logprobs = common.response_logprobs(model, batch, batch.loss_mask)
    loss = sft.sft_loss_sum(logprobs, batch.loss_mask) * scale
    return torch.autograd.grad(loss, model.lm_head.weight)[0]


@pytest.mark.parametrize("count, micro_steps", [(1, 1), (1, 4), (2, 2), (4, 1), (1, 2)])
def test_micro_batches_and_ranks_add_up_to_one_token_mean(
    tiny_model, monkeypatch, count, micro_steps
):
    """DeepSpeed divides each loss by the accumulation steps and averages gradients over the ranks.
    With both undone by `mean_factor`, any cut of the batch has the gradient of the mean over its 16
    tokens: no layout changes a result."""
    monkeypatch.setattr(ranks, "get_world_size", lambda: count)
    engine = SimpleNamespace(gradient_accumulation_steps=lambda: micro_steps)
    scale = common.mean_factor(engine, 16)
    size = len(RESPONSES) // (count * micro_steps)
    parts = [RESPONSES[i : i + size] for i in range(0, len(RESPONSES), size)]
    as_deepspeed = sum(gradient(tiny_model, part, scale) / micro_steps for part in parts) / count
    assert torch.allclose(as_deepspeed, gradient(tiny_model, RESPONSES, 1 / 16), atol=1e-6)


@pytest.mark.parametrize("truncated", [0, 1])
@pytest.mark.parametrize("loss_mean", ["tokens", "responses", "constant"])
def test_the_means_of_the_actors_loss_against_loops(loss_mean, truncated):
    """Six responses, the third and the last of them cut off, and one whose tokens a tool wrote. The
    same loss in any micro-batches and on any ranks, whose sums add up; with --mask_truncated 1 it
    is as if what was cut off were not there. Token t of n has a loss of t n."""
    args = SimpleNamespace(loss_mean=loss_mean, mask_truncated=truncated, max_answer_seq_len=12)
    lengths, ended = torch.tensor([9, 2, 4, 0, 1, 9]), torch.tensor([1.0, 1, 0, 1, 1, 0])
    masks, losses = (
        (torch.arange(9) < lengths[:, None]).float(),
        torch.arange(1, 10) * lengths[:, None],
    )
    counted = [n for n, end in zip(lengths.tolist(), ended) if n and (end or not truncated)]
    sums = [sum(t * n for t in range(1, n + 1)) for n in counted]
    expected = {
        "tokens": sum(sums) / sum(counted),
        "responses": sum(s / n for s, n in zip(sums, counted)) / len(sums),
        "constant": sum(s / 12 for s in sums) / len(sums),
    }[loss_mean]
    for sizes in ([6], [1] * 6, [2, 3, 1]):
        parts = zip(masks.split(sizes), ended.split(sizes), losses.split(sizes))
        found = divisors = 0.0
        for mask, ends, loss in parts:
            batch = micro_batch(response_mask=mask, ended=ends)
            [weight], divisor = ppo.loss_weights(args, [ppo.trained_mask(args, batch)])
            found, divisors = found + (weight * loss).sum().item(), divisors + divisor
        assert found / divisors == pytest.approx(expected), sizes


def models_of_stubs():
    """Returns an actor and a critic that compute gradients, and keep their weights."""
    engine = SimpleNamespace(
        backward=torch.Tensor.backward, step=lambda: None, gradient_accumulation_steps=lambda: 1
    )
    return ppo.Models(engine, engine, None, [], {}, None, None)


def give_forwards(monkeypatch, logprobs, values):
    """Has an update's forwards of the actor, whose entropy is 0, and of the critic return these."""
    monkeypatch.setattr(ppo, "actor_forward", lambda *_: (logprobs, torch.zeros_like(logprobs)))
    monkeypatch.setattr(common, "values_before_tokens", lambda *_: values)


def test_actor_and_critic_learn_the_mean_over_the_tokens_that_count(monkeypatch):
    """With --mask_truncated 1 the second response, which was cut off, is in neither sum and in
    neither divisor. Each of the other's two tokens has half of its own gradient: -A, and the error
    of its value."""
    args = ppo.get_args("--preset toy --mask_truncated 1".split())
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 1]])
    logprobs, values = torch.zeros(2, 3).requires_grad_(), torch.zeros(2, 3).requires_grad_()
    batch = micro_batch(
        [0, 1],
        response_mask=mask,
        ended=torch.tensor([1.0, 0.0]),
        old_logprobs=torch.zeros(2, 3),
        old_values=torch.zeros(2, 3),
        advantages=torch.tensor([[2.0, -4, 9], [5, 5, 5]]),
        returns=torch.tensor([[1.0, 3, 9], [5, 5, 5]]),
    )
    give_forwards(monkeypatch, logprobs, values)
    ppo.optimizer_step(args, models_of_stubs(), [batch], metrics.TokenMeans())
    assert logprobs.grad.tolist() == [[-1, 2, 0], [0, 0, 0]]
    assert values.grad.tolist() == [[-0.5, -1.5, 0], [0, 0, 0]]


def test_an_optimizer_step_clips_and_penalises_as_its_flags_say(monkeypatch):
    """By hand. Ratios of 1.25 and 1.4 with a clip_high of 0.3: the first has its whole gradient,
    the second none. k2 pulls both towards the reference, a nat away, at 0.3. Values that moved by
    0.5 and 0.25 towards a return of 1, with a clip_value of 0.3: the first has no gradient, the
    second its error. Each token counts one half."""
    flags = (
        "--kl_coef 0.3 --clip 0.2 --clip_high 0.3 --clip_value 0.3 --kl_in loss --kl_estimator k2"
    )
    args = ppo.get_args(["--preset", "toy", *flags.split()])
    logprobs, values = torch.zeros(1, 2).requires_grad_(), torch.tensor([[0.5, 0.25]])
    values.requires_grad_()
    batch = micro_batch(
        [0],
        response_mask=torch.ones(1, 2),
        ended=torch.ones(1),
        old_logprobs=-torch.tensor([[1.25, 1.4]]).log(),
        ref_logprobs=torch.tensor([[1.0, -1.0]]),
        old_values=torch.zeros(1, 2),
        advantages=torch.ones(1, 2),
        returns=torch.ones(1, 2),
    )
    give_forwards(monkeypatch, logprobs, values)
    ppo.optimizer_step(args, models_of_stubs(), [batch], metrics.TokenMeans())
    assert logprobs.grad[0].tolist() == pytest.approx([-0.625 - 0.15, 0.15])
    assert values.grad[0].tolist() == pytest.approx([0, -0.375])


def test_an_update_that_makes_its_own_forwards_learns_the_same(monkeypatch):
    """Where nothing before it needed the old log-probs they are those of this forward, as numbers:
    the ratio is 1, and its gradient that of the log-prob. Nothing that is kept has a graph."""
    logprobs, values = torch.full((1, 2), -0.5).requires_grad_(), torch.zeros(1, 2).requires_grad_()
    monkeypatch.setattr(ppo, "actor_forward", lambda *_: (1 * logprobs, -logprobs))
    monkeypatch.setattr(common, "values_before_tokens", lambda *_: values)
    batch = micro_batch(
        [0],
        response_mask=torch.ones(1, 2),
        ended=torch.ones(1),
        old_values=torch.zeros(1, 2),
        advantages=torch.tensor([[2.0, -4]]),
        returns=torch.tensor([[1.0, 3]]),
    )
    args = ppo.get_args(["--preset", "toy"])
    ppo.optimizer_step(args, models_of_stubs(), [batch], metrics.TokenMeans())
    assert logprobs.grad.tolist() == [[-1, 2]] and values.grad.tolist() == [[-0.5, -1.5]]
    assert batch.ratio.tolist() == [[1, 1]] and batch.old_logprobs.tolist() == [[-0.5, -0.5]]
    kept = batch.ratio, batch.old_logprobs, batch.entropy
    assert not any(each.requires_grad for each in kept)


@pytest.mark.parametrize("count, accumulation", [(1, 1), (4, 4), (4, 2)])
def test_minibatches_take_every_micro_batch_once_in_an_order_of_the_seed(count, accumulation):
    """count / accumulation optimizer steps an epoch."""
    found = list(ppo.minibatches(list(range(count)), accumulation, (1, 2)))
    assert [len(minibatch) for minibatch in found] == [accumulation] * (count // accumulation)
    assert sorted(sum(found, [])) == list(range(count))
    orders = [sum(ppo.minibatches(list(range(9)), 3, (1, 2, epoch)), []) for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_a_rollout_is_divided_by_hand():
    """8 micro-batches of 4 responses and an accumulation of 2 make 4 updates in each epoch."""
    sizes = ppo.Sizes(
        SimpleNamespace(
            per_device_generation_batch_size=8,
            per_device_training_batch_size=4,
            gradient_accumulation_steps=2,
            generation_batches=2,
            samples_per_prompt=2,
            ppo_epochs=3,
        )
    )
    assert (sizes.prompts, sizes.batches_per_step, sizes.responses) == (4, 4, 32)
    assert (sizes.micro_batches, sizes.updates_per_epoch, sizes.updates) == (8, 4, 12)
    requests = sizes.requests([[{"row": 5}], [{"row": 7}]])
    found = [(request["row"], request["sample"], request["group"]) for request in requests]
    assert found == [(5, 0, 0), (5, 1, 0), (7, 0, 1), (7, 1, 1)]


def test_responses_are_shuffled_where_a_rollout_makes_several_minibatches():
    """Each once, in an order of the seed. Sorted by length, as where one update takes them all, one
    update would see short responses only."""
    rows = [{"prompt_ids": [5] * n, "response_ids": []} for n in range(20)]
    one, again, other = (ppo.ordered(rows[::-1], 1, (1, step)) for step in (2, 2, 3))
    assert one == again != other and rows not in (one, one[::-1])
    assert sorted(map(str, one)) == sorted(map(str, rows)) and ppo.ordered(rows[::-1]) == rows


# --------------------------------------------------------------------------------------------------
# The average of the weights
# --------------------------------------------------------------------------------------------------
def average_of(model):
    """The EMA of a model's weights (decay 0.992), and the engine that it follows."""
    args = SimpleNamespace(enable_ema=1, ema_decay=0.992)
    return ema.Ema(args, model, {}), SimpleNamespace(module=model)


@pytest.mark.parametrize(
    "dtype, by, moved", [(torch.float32, 0.5, 0.004), (torch.bfloat16, 0.0625, 0.0005)]
)
def test_the_ema_moves_by_its_share_of_the_difference_in_fp32(dtype, by, moved):
    """decay 0.992: 0.8 % of the way, every optimizer step, but where fp16 has skipped it. Near 1
    bf16 knows no number closer than 0.0039: an EMA in bf16 would stand still."""
    model = nn.Linear(1, 1, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.fill_(1.0)
        average, engine = average_of(model)
        model.weight.add_(by)
    for applied in (False, True):
        engine.was_step_applied = functools.partial(bool, applied)
        average.update(engine)
        found = average.shards["weight"].item() - 1.0
        assert found == pytest.approx(moved * applied, rel=1e-3)
