"""What an optimizer step takes: one mean, whatever the layout; each response once; the EMA."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import common
import ppo
import sft
from machinery import ema, ranks

# 10, 2, 3 and 1 tokens: micro-batches of unlike weight
RESPONSES = [[7] * 9 + [1], [8, 1], [9, 9, 1], [1]]


def gradient(model, responses, scale):
    """Returns d (scale * loss sum over `responses`) / d output matrix."""
    prompt = {"prompt_ids": [5, 6], "prompt_loss_mask": [0, 0], "row_weight": 1}
    batch = sft.collate([{**prompt, "responses": [response]} for response in responses], pad_id=0)
    logprobs = common.response_logprobs(model, batch, batch.loss_mask)
    loss = sft.sft_loss_sum(logprobs, batch.loss_mask) * scale
    return torch.autograd.grad(loss, model.lm_head.weight)[0]


@pytest.mark.parametrize("count, micro_steps", [(1, 4), (2, 2), (4, 1), (1, 2)])
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


@pytest.mark.parametrize(
    "generated, samples, prompts, batches", [(8, 2, 4, 4), (2, 4, 1, 2), (4, 4, 1, 4)]
)
def test_a_rollout_is_divided_by_hand(generated, samples, prompts, batches):
    """8 micro-batches of 4 responses and an accumulation of 2 make 4 updates in each epoch. A group
    that is larger than a generation batch counts as one. A row that is drawn twice makes two
    groups: found by their row its responses would be one group of four."""
    flags = dict(per_device_generation_batch_size=generated, samples_per_prompt=samples)
    flags |= dict(per_device_training_batch_size=generated // 2, gradient_accumulation_steps=2)
    sizes = ppo.Sizes(SimpleNamespace(**flags, generation_batches=2, ppo_epochs=3))
    assert (sizes.prompts, sizes.batches_per_step) == (prompts, batches)
    assert sizes.responses == 4 * generated == batches * prompts * samples
    assert (sizes.micro_batches, sizes.updates_per_epoch, sizes.updates) == (8, 4, 12)
    requests = sizes.requests([[{"row": 5}], [{"row": 5}]])
    found = [(request["row"], request["sample"], request["group"]) for request in requests]
    assert found == [(5, n, group) for group in (0, 1) for n in range(samples)]


@pytest.mark.parametrize("count, accumulation", [(1, 1), (4, 4), (4, 2)])
def test_minibatches_take_every_micro_batch_once_in_an_order_of_the_seed(count, accumulation):
    """count / accumulation optimizer steps an epoch. A part of a minibatch would add gradients,
    move no weight, and so end up in the next step."""
    found = list(ppo.minibatches(list(range(count)), accumulation, (1, 2)))
    assert [len(minibatch) for minibatch in found] == [accumulation] * (count // accumulation)
    assert sorted(sum(found, [])) == list(range(count))
    orders = [sum(ppo.minibatches(list(range(9)), 3, (1, 2, epoch)), []) for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    with pytest.raises(AssertionError, match="whole minibatches"):
        list(ppo.minibatches(list(range(accumulation + 1)), accumulation + 2, 0))


def test_responses_are_shuffled_where_a_rollout_makes_several_minibatches():
    """Each once, in an order of the seed. Sorted by length, as where one update takes them all, one
    update would see short responses only."""
    rows = [{"prompt_ids": [5] * (n // 2), "response_ids": [6] * (n - n // 2)} for n in range(20)]
    one, again, other = (ppo.ordered(rows[::-1], 1, (1, step)) for step in (2, 2, 3))
    assert one == again != other and rows not in (one, one[::-1])
    assert sorted(map(str, one)) == sorted(map(str, rows)) and ppo.ordered(rows[::-1]) == rows


@pytest.mark.parametrize(
    "dtype, by, moved", [(torch.float32, 0.5, 0.004), (torch.bfloat16, 0.0625, 0.0005)]
)
def test_the_ema_moves_by_its_share_of_the_difference_in_fp32(dtype, by, moved):
    """decay 0.992: 0.8 % of the way, every optimizer step, but where fp16 has skipped it. Near 1
    bf16 knows no number closer than 0.0039: an EMA in bf16 would stand still."""
    model = nn.Linear(1, 1, bias=False).to(dtype)
    model.weight.data.fill_(1.0)
    average = ema.Ema(SimpleNamespace(enable_ema=1, ema_decay=0.992), model, {})
    model.weight.data.add_(by)
    for applied in (False, True):
        engine = SimpleNamespace(module=model, was_step_applied=functools.partial(bool, applied))
        average.update(engine)
        found = average.shards["weight"].item() - 1.0
        assert found == pytest.approx(moved * applied, rel=1e-3)
