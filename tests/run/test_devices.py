"""What a GPU would find, found without one: buckets smaller than a weight, collectives that must
match.

What CPU ranks cannot show is in docs/deepspeed.md, "Seen in CI", and `make gpu-check` checks it.
"""

import argparse

import pytest
import torch

import common
from tests import kit, runs

IDS = torch.arange(2, 20).view(2, 9)
TINY = {
    "reduce_bucket_size": 600,  # a matrix has 1,024 to 16,896 weights
    "allgather_bucket_size": 700,
    "stage3_prefetch_bucket_size": 800,
    "stage3_max_reuse_distance": 900,
    "stage3_max_live_parameters": 25000,  # so many that gathers run ahead, and not all fit
}


# --------------------------------------------------------------------------------------------------
# Buckets smaller than a weight; collectives as NCCL demands them
# --------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buckets_smaller_than_a_weight_change_nothing(stage, tmp_path):
    """Every real model has weights larger than a bucket, and many buckets; a toy has one bucket.
    With buckets of 600 numbers a run is the same, up to the rounding of sums that are cut in other
    places; at stage 3, which reduces each weight by itself, to the bit.

    All of it under TORCH_DISTRIBUTED_DEBUG=DETAIL: before each collective the ranks compare its
    kind, shapes and order, as NCCL demands and gloo does not. In the second step, and in the
    evaluation, the third rank has filler rows only; responses differ in length."""
    found = []
    for name, zero in (("default", {}), ("tiny", TINY)):
        config = kit.knobs(tmp_path / f"{name}.json", **zero)
        flags = f"--ds_config {config} --max_steps 2 --eval_steps 2"
        made = runs.run("ppo", flags, zero=stage, rows=5, accumulation=1)
        place = f"{name}_buckets{stage}"
        args = kit.base(), place, "ppo", made["flags"]
        done = kit.fork(runs.make_run, 3, *args, meet="", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
        assert done.code == 0 and [rank["code"] for rank in done.results] == [0] * 3, done
        folder = kit.base() / "runs" / place
        found.append((kit.metrics(folder, clocks=False), kit.weights(folder)))
    (metrics, weights), (tiny_metrics, tiny_weights) = found
    assert len(metrics) == 3
    for expected, record in zip(metrics, tiny_metrics):
        assert record == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(tiny_weights[name], weight, rtol=0, atol=2e-4 * (stage < 3))


def sampled_after_evaluation(base, config):
    """Makes an evaluation at stage 3, whose gathers run ahead; then samples, and saves."""
    from machinery import folders, saving, zero3

    engine = runs.tiny_engine(base, 3, options=["--ds_config", config])
    tokenizer, ahead = folders.load_tokenizer(kit.TOKENIZER), []
    for step in range(2):
        runs.train_one_step(engine, step)
        with torch.no_grad():
            engine(IDS)
        ahead.append(any(p.ds_status.name == "INFLIGHT" for p in engine.module.parameters()))
        with zero3.gather_for_generation(engine) as (model, _):
            missing = [name for name, p in model.named_parameters() if p.shape != p.ds_shape]
        with torch.no_grad():
            engine(IDS)
        saving.save_model(engine, tokenizer, base / "saved_ahead")
    return ahead[-1], missing


def test_an_evaluation_may_come_before_sampling_and_saving(tmp_path):
    """While ZeRO-3 runs a forward, it gathers what the backward will need. An evaluation has none,
    and DeepSpeed's GatheredParameters does not take a weight that is still on its way."""
    config = kit.knobs(tmp_path / "knobs.json", **TINY)
    assert kit.on_ranks(sampled_after_evaluation, 2, kit.base(), config) == [(True, [])] * 2


# --------------------------------------------------------------------------------------------------
# Many ranks
# --------------------------------------------------------------------------------------------------
def partitions(base, config):
    """Trains two steps under stages 0 to 3. Returns {stage: value head, weights, EMA}. The model is
    so small that some ranks hold nothing, and others parts of two weights."""
    from machinery import ema, folders

    tokenizer, found = folders.load_tokenizer(kit.TOKENIZER), {}
    head = dict(tokenizer=tokenizer, value_head="score")
    for stage in (0, 1, 2, 3):
        engine = runs.tiny_engine(base, stage, "speck", ["--ds_config", config], **head)
        average = ema.Ema(argparse.Namespace(enable_ema=1, ema_decay=0.9), engine.module, {})
        drawn = runs.whole_weights(engine)["model.score.weight"]
        for step in range(2):
            ids = runs.rows_of_rank(step, 23)
            mask = torch.ones_like(ids)
            engine.backward(engine(ids, mask, common.position_ids(mask)).square().mean())
            engine.step()
            average.update(engine)
        averages = {n: average.full_tensor(n, p) for n, p in engine.module.named_parameters()}
        averages = {n: average for n, average in averages.items() if average is not None}
        found[stage] = drawn, runs.whole_weights(engine), averages
    return found


def test_ranks_that_hold_nothing_train_and_save_the_same(tmp_path):
    """A model of 2 numbers wide, so that some ranks hold only padding of a group of weights, and
    others the end of one weight and the beginning of the next. Stages 1, 2 and 3 give the weights,
    the value head and the EMA of stage 0, where nothing is sharded, on four ranks."""
    shape = dict(hidden_size=2, intermediate_size=3, num_hidden_layers=1, num_attention_heads=1)
    speck = kit.tiny_config(**shape, vocab_size=23, eos_token_id=2)
    speck.save_pretrained(kit.base() / "models/speck")
    config = kit.knobs(tmp_path / "knobs.json", reduce_bucket_size=6, allgather_bucket_size=6)
    ranks = kit.on_ranks(partitions, 4, kit.base(), config)
    head, weights, averages = ranks[0][0]
    assert averages and min(weight.numel() for weight in weights.values()) < len(ranks)
    for stage in (1, 2, 3):
        torch.testing.assert_close(ranks[0][stage][1:], (weights, averages), rtol=1e-5, atol=1e-6)
    assert all(rank[stage][0].equal(head) for rank in ranks for stage in (0, 1, 2, 3))
