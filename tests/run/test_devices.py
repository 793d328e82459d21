"""What a GPU would find, found without one: buckets smaller than a weight, collectives that must
match, memory that is given back too early, 64 ranks, operators and waits. devices.py runs it.

What CPU ranks cannot show is in docs/deepspeed.md, "Seen in CI", and `make gpu-check` checks it.
"""

import functools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import common
from machinery.rollout import decoding
from tests import devices, workers
from tests.conftest import generate
from tests.workers import CLOCKS

NO_END = SimpleNamespace(pad_token_id=0, eos_token_id=-1)


@functools.cache
def launch(*groups):
    """Runs these groups of devices.py, once a session; returns the folder of their facts."""
    base = workers.shared_folder()
    command = [sys.executable, devices.__file__, base, *groups]
    _, output = workers.start_command(command, base)
    return base / "facts", output


FAST = ("asynchronous", "ahead", "fake0", "fake63", "alone", "four")
SLOW = ("detail", "eight")


def facts(group, job):
    """What each rank of a group found in a job."""
    folder, output = launch(*(FAST if group in FAST else SLOW))
    errors = [file.read_text() for file in sorted(folder.glob(f"{group}-*.failed"))]
    assert not errors, "\n".join(errors)
    ranks = range(devices.GROUPS[group]["ranks"])
    files = [folder / f"{group}-{job}-{rank}.json" for rank in ranks]
    assert all(file.exists() for file in files), output[-3000:]
    return [json.loads(file.read_text()) for file in files]


# --------------------------------------------------------------------------------------------------
# Memory that another stream still reads
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_tensor_is_freed_while_another_stream_reads_it(stage):
    """On a GPU a tensor's memory goes to the next tensor as soon as Python lets go of it, although
    the kernels that read it may still wait in another stream's queue. With ds_config.json as it is
    shipped this never happens, on three ranks, with weights larger than a bucket."""
    assert facts("asynchronous", f"shipped{stage}") == [[], [], []]


def test_the_known_mistake_of_overlap_comm_is_found():
    """At stage 2 with overlap_comm DeepSpeed (0.19.8) reads a gradient larger than a bucket on
    another stream. A rank that owns no part of it frees it at once. So the search above is one
    that finds: the only such weight here lies on ranks 0 and 1."""
    lost = "model.layers.0.self_attn.q_proj.weight.grad"
    assert facts("asynchronous", "overlap") == [[], [], [[lost, "aten.cat.default"]]]


# --------------------------------------------------------------------------------------------------
# Buckets smaller than a weight; collectives as NCCL demands them
# --------------------------------------------------------------------------------------------------
def run_of(name):
    """The metrics without clocks, and the weights, of a run that ended well."""
    assert [rank["code"] for rank in facts("detail", name)] == [0] * 3
    folder = workers.shared_folder() / "runs" / name
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    beside = {*CLOCKS, "eval_accuracy_ci"}  # a pair, made of numbers that are here
    metrics = [{k: v for k, v in line.items() if k not in beside} for line in lines]
    return metrics, load_file(folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("script", ["sft", "reward", "ppo"])
def test_buckets_smaller_than_a_weight_change_nothing(script, stage):
    """Every real model has weights larger than a bucket, and many buckets; a toy has one bucket.
    With buckets of 600 numbers a run is the same, up to the rounding of sums that are cut in other
    places; at stage 3, which reduces each weight by itself, to the bit.

    All of it under TORCH_DISTRIBUTED_DEBUG=DETAIL: before each collective the ranks compare its
    kind, shapes and order, as NCCL demands and gloo does not. In the second step, and in the
    evaluation of ppo.py, the third rank has filler rows only; responses differ in length."""
    metrics, weights = run_of(f"default_{script}{stage}")
    tiny_metrics, tiny_weights = run_of(f"tiny_{script}{stage}")
    assert len(metrics) == 3
    for expected, found in zip(metrics, tiny_metrics):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(tiny_weights[name], weight, rtol=0, atol=2e-4 * (stage < 3))


def test_an_evaluation_may_come_before_sampling_and_saving():
    """While ZeRO-3 runs a forward, it gathers what the backward will need. An evaluation has none,
    and DeepSpeed's GatheredParameters does not take a weight that is still on its way."""
    assert facts("ahead", "sampled") == [{"ahead": True, "missing": []}] * 2


# --------------------------------------------------------------------------------------------------
# Many ranks
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "group, count", [("four", 4), pytest.param("eight", 8, marks=pytest.mark.slow)]
)
def test_ranks_that_hold_nothing_train_and_save_the_same(group, count):
    """A model of 2 numbers wide, so that some ranks hold only padding of a group of weights, and
    others the end of one weight and the beginning of the next. Stages 1, 2 and 3 give the weights,
    the value head and the EMA of stage 0, where nothing is sharded, on 4 and on 8 ranks."""
    ranks = facts(group, "partitions")
    for stage in (1, 2, 3):
        held = [share for rank in ranks for share in rank[f"zero{stage}"]["held"]]
        assert any(real == 0 and padding > 0 for real, padding in held), "nobody holds nothing"
        real = sum(share for share, _ in held)
        assert real == sum(len(w) for w in ranks[0]["zero0"]["weights"].values())
        for part in ("weights", "ema"):
            whole, sharded = (ranks[0][f"zero{each}"][part] for each in (0, stage))
            assert whole.keys() == sharded.keys()
            for name in whole:
                assert sharded[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name
    heads = {tuple(rank[f"zero{stage}"]["head"]) for rank in ranks for stage in (0, 1, 2, 3)}
    assert len(heads) == 1 and len(ranks) == count


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_of_64_holds_what_the_estimate_says(dtype, stage):
    """A group of 64 ranks of which one is there: what it holds is real, what it would receive is
    not. Its share of the weights is as large as everyone's, with padding where none are left; its
    bytes after an optimizer step, and before one, are those of --estimate.

    In fp32 it keeps the whole gradient of a weight that it shares with its neighbours, which
    --estimate counts in part: with few ranks and large weights, little. In the step DeepSpeed
    squares one gradient at a time in float64."""
    for rank in (0, 63):
        found = facts(f"fake{rank}", f"{dtype}_{stage}")[0]
        parts, weights = found["estimate"], found["weights"]
        held, first = (f["held"] for f in (found, facts("fake0", f"{dtype}_{stage}")[0]))
        assert [sum(share) for share in held] == [sum(share) for share in first]
        assert weights <= 64 * sum(map(sum, held)) < weights + 64 * 2 * len(held)
        assert [padding for _, padding in held] == ([0, 0] if rank == 0 else [0, 4])
        stays = (
            parts["weights"] + parts["optimizer"] + 4 * weights * (dtype == "bf16" and stage < 2)
        )
        assert found["after"] == pytest.approx(stays, rel=0.01)
        gradients = found["before"] - parts["weights"] - parts["optimizer"]
        if dtype == "bf16":
            assert gradients == pytest.approx(parts["gradients"], rel=0.02, abs=500)
        else:
            assert gradients < parts["gradients"] / (64 if stage == 1 else 1) + 4 * 2 * 17600
        assert found["update"] < found["before"] + 8 * weights / 64 + 500
        if (dtype, stage) == ("bf16", 1):  # a copy of all gradients, in bf16
            assert found["reduction"] - found["before"] < 1.02 * 2 * weights
        else:
            assert found["reduction"] < 1.02 * sum(parts.values()) + 4 * 3 * 17600


# --------------------------------------------------------------------------------------------------
# Operators and waits
# --------------------------------------------------------------------------------------------------
def decoded(model, tokens):
    """Operators and waits of sampling so many tokens for each of four rows."""
    ids, mask = common.pad([[5, 6, 7]] * 4, 0)
    uniforms = decoding.row_uniforms(1, 0, range(4), tokens)
    with devices.Counter() as count:
        generate(model, ids, mask, uniforms, NO_END)
    return count.operators, count.waits


def test_a_decoded_token_is_few_operators_and_two_waits(tiny_model):
    """On a GPU a token of a small batch costs as much time as its operators take to be launched,
    and each number that the host reads ends the queue. The bound is a third above what was counted
    on 2026-11-22 with torch 2.13 and transformers 5.23, for two layers of Llama."""
    (few, waits), (many, more) = decoded(tiny_model, 16), decoded(tiny_model, 32)
    print("operators a token", (many - few) / 16, "waits", (more - waits) / 16)
    assert (many - few) / 16 < 280 and (more - waits) / 16 <= 2


@pytest.mark.parametrize(
    "script, operators, waits", [("sft", 1200, 20), ("reward", 1150, 14), ("ppo", 6300, 90)]
)
def test_a_step_is_no_more_operators_and_waits_than_it_was(script, operators, waits):
    """One more step of each script at stage 2, two micro-batches; ppo.py decodes ten tokens in it.
    Bounds as above: a change that reads a number in a loop is seen here, without a clock."""
    found = facts("alone", script)[0]
    print(script, found)
    assert found[0] < operators and found[1] < waits
