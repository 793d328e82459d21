"""Inside DeepSpeed's engines: the value head, generating from sharded weights.

Functions that are handed to kit.on_ranks run in each of two ranks, and assert there.
"""

import argparse
import functools

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import get_z3_leaf_modules
from transformers import AutoModelForCausalLM

import common
from machinery import checkpoints, folders, lora, patches, ranks, zero3
from machinery.zero3 import unwrap_model
from tests import kit, runs
from tests.runs import rows_of_rank, tiny_engine, train_one_step


def test_with_lora_nothing_else_trains_beside_a_reference(tiny_model):
    """It is the actor without its adapters, so it would move with what else a fork trains."""
    args = argparse.Namespace(lora_dim=8)
    with pytest.raises(AssertionError, match="the reference would move"):
        common.reference_of(tiny_model, args, 1)
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    assert isinstance(common.reference_of(frozen, args, 1), lora.WithoutAdapters)


# --------------------------------------------------------------------------------------------------
# Loading, and the value head
# --------------------------------------------------------------------------------------------------
def value_heads(base):
    """Returns the weights of a new head on loaded weights, and of a trained one, under stage 3.
    What is loaded there is in shards from the start."""
    tokenizer, found = folders.load_tokenizer(kit.TOKENIZER), []
    for name in ("actor", "reward"):
        path, args = f"{base}/models/{name}", runs.tiny_args(base, 3)
        model = kit.load_model(path, args, 3, tokenizer=tokenizer, value_head="score")
        assert all(hasattr(weight, "ds_id") for weight in model.parameters())
        with deepspeed.zero.GatheredParameters([model.model.score.weight]):
            found.append(model.model.score.weight.detach().flatten().clone())
    return found


def test_a_value_head_is_the_same_on_all_ranks_and_a_trained_one_is_kept():
    """ZeRO-3 partitions weights while they are made, and a layer that is added on top, too. A new
    head is written on rank 0 and must reach every rank, with the numbers that it has without
    sharding (test_value_heads.py says which; from scratch: test_devices.py). A head that comes with
    a checkpoint is what its file holds."""
    actor = kit.load_model(
        f"{runs.base()}/models/actor",
        runs.tiny_args(runs.base(), 0),
        0,
        tokenizer=folders.load_tokenizer(kit.TOKENIZER),
        value_head="score",
    )
    trained = kit.weights(runs.base() / "models/reward")["score.weight"].flatten()
    for head, kept in kit.on_ranks(value_heads, 2, runs.base()):
        assert head.equal(actor.model.score.weight.flatten()) and kept.equal(trained)


# --------------------------------------------------------------------------------------------------
# A single rank
# --------------------------------------------------------------------------------------------------
def counted(engine, name):
    """Has the calls of an engine's method noted. Returns the list."""
    calls, own = [], getattr(engine, name)
    setattr(engine, name, lambda *given, **options: calls.append(1) or own(*given, **options))
    return calls


def in_one_rank(base):
    """Returns for each stage how often DeepSpeed's hook runs in two forwards of a rollout, and in
    the forward of a training step after it; for frozen models of stages 0 and 3 how many parts are
    in train mode; and in bf16, as DeepSpeed does it and as we do, how many buffers two backwards
    reduce, and the sums of their gradients."""
    hooks, reduced = [], []
    for stage in range(4):
        engine = tiny_engine(base, stage)
        calls = counted(engine, "_forward_prologue")
        with zero3.gather_for_generation(engine) as (model, _), torch.no_grad():
            model(rows_of_rank(0)), model(rows_of_rank(1))
        during = len(calls)
        train_one_step(engine)
        hooks.append((during, len(calls) - during))
    frozen = [common.frozen_model(runs.tiny_args(base, stage), 2) for stage in (0, 3)]
    training = [sum(part.training for part in unwrap_model(model).modules()) for model in frozen]
    for repaired in (False, True):
        engine = tiny_engine(base, 1, options=["--dtype", "bf16"])
        if not repaired:
            del engine._reduce_non_expert_gradients
        calls = counted(engine, "allreduce_bucket")
        for seed in (0, 1):
            ids = rows_of_rank(seed)
            engine.backward(engine(ids, labels=ids).loss)
        sums = torch.cat([each.flatten() for each in engine.optimizer.fp32_groups_gradients_flat])
        reduced.append((len(calls), sums))
    return hooks, training, reduced


@functools.cache
def found_in_one_rank():
    return kit.on_ranks(in_one_rank, 1, runs.base())[0]


def test_no_hook_runs_at_a_decoded_token():
    """At any stage: its Python is work for the host at each token, and tells nobody anything. Then
    they are back."""
    assert found_in_one_rank()[0] == [(0, 1)] * 4


def test_frozen_models_are_in_eval_mode():
    """Dropout would be noise in the KL penalty and in the scores. A new model, as here, comes in
    train mode."""
    assert found_in_one_rank()[1] == [0, 0]


def test_a_single_rank_reduces_nothing():
    """DeepSpeed joins all gradients for an all-reduce of one rank, and copies them back. In bf16 it
    takes the fp32 sums through bf16, which loses their last bits."""
    (many, theirs), (none, ours) = found_in_one_rank()[2]
    assert many, "it leaves them alone now: reduce_nothing may go"
    assert none == 0 and theirs.equal(theirs.bfloat16().float())
    assert not ours.equal(ours.bfloat16().float())
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)


# --------------------------------------------------------------------------------------------------
# Sharded weights: generating, loading
# --------------------------------------------------------------------------------------------------
def sampled(base):
    """Checks responses by sharded weights where rank 0 stops at once and rank 1 goes on."""
    tokenizer, rank = folders.load_tokenizer(kit.TOKENIZER), ranks.get_rank()
    known = len(tokenizer)  # the model has rows for more, which are never sampled
    plain = AutoModelForCausalLM.from_pretrained(f"{base}/models/actor").eval()
    prompts = [[10 + rank, 11, 12], [20, 21 + rank]]
    ids, mask = common.pad(prompts, 0)
    uniforms = kit.uniforms(2, 9, step=rank)
    # the number in the middle of EOS's share of the first token's cdf
    for row, prompt in enumerate(prompts if rank == 0 else ()):
        with torch.no_grad():
            logits = plain(torch.tensor([prompt])).logits[0, -1, :known].float()
        cdf = torch.softmax(logits, -1).double().cumsum(-1)
        uniforms[row, 0] = cdf[tokenizer.eos_token_id - 1 : tokenizer.eos_token_id + 1].mean()

    def responses(model, synced=False):
        found = kit.generate(model, ids, mask, uniforms, tokenizer, synced, range(known))
        return [row[: count.sum()].tolist() for row, count in zip(*found)]

    expected = responses(plain)
    assert max(map(len, expected)) > 2 if rank else list(map(len, expected)) == [1, 1]
    accelerator = get_accelerator()
    memory, installed, lost = accelerator.available_memory, deepspeed.__version__, []
    for way in ("gathered", "one by one", "module by module"):
        engine = tiny_engine(base, 3)
        if way == "module by module":
            accelerator.available_memory = lambda *_: 0
        if way == "one by one":
            deepspeed.__version__ = "0.18.5"
        engine.eval()
        with zero3.gather_for_generation(engine) as (model, synced):
            assert synced == (way == "module by module")
            assert responses(model, synced) == expected
        accelerator.available_memory, deepspeed.__version__ = memory, installed
        assert all(p.numel() == 0 for p in engine.module.parameters()), "they are released again"
        assert len(get_z3_leaf_modules(engine.module)) == 2, "a layer is gathered in one go"
        assert torch.nn.functional.linear is patches.quick_linear
        losses = [train_one_step(each) for each in (engine, plain, engine)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[2] < losses[0]
        lost.append(losses[2])
    return lost


def fits(free, need):
    """Whether so many bytes fit, where the host has so many free."""
    get_accelerator().available_memory = lambda *_: free
    return bool(zero3.fit_on_every_rank([], room=need))


def test_ranks_of_one_host_share_its_memory():
    """Each would fill all of it: three ranks that gather a model each need it three times. Of 300
    bytes one has 100, of which 0.8 count."""
    found = [kit.on_ranks(fits, ranks, 300, need) for ranks, need in ((3, 79), (3, 80), (1, 80))]
    assert found == [[True] * 3, [False] * 3, [True]]


def test_sharded_generation_equals_the_plain_model():
    """Rank 0's responses end at once, rank 1's go on. With all weights gathered (one by one with
    DeepSpeed 0.18.5) each rank stops alone; where they do not fit they are gathered module by
    module, and rank 0 keeps step until rank 1 is done. Either way the tokens are those of the
    unsharded model, and afterwards the model trains as before."""
    for losses in kit.on_ranks(sampled, 2, runs.base()):
        assert len(set(losses)) == 1


@pytest.mark.parametrize("stage, split, place", [(0, 1, "meta"), (2, 1, "meta"), (2, 2, "cpu")])
def test_weights_are_loaded_straight_to_the_device(monkeypatch, stage, split, place):
    """A machine with 8 devices would else hold a model 8 times in its memory. `meta` plays the
    device. With tensor parallelism the whole model comes first."""
    monkeypatch.setattr(ranks, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(common.zero3, "refuse_unless_split", lambda *_: None)
    args = runs.tiny_args(runs.base(), stage)
    args.model_name_or_path, args.dropout = f"{runs.base()}/models/actor", None
    args.tensor_parallel_size = split
    assert {p.device.type for p in common.load_model(args).parameters()} == {place}


# --------------------------------------------------------------------------------------------------
# Stage 3: what an offload leaves behind, and prefetching
# --------------------------------------------------------------------------------------------------
def stage_3(base, folder):
    engine = tiny_engine(base, 3)
    trace = engine.optimizer.parameter_offload.get_param_coordinator()
    for mended in (False, True):
        for step in range(3):
            with torch.no_grad():
                engine(rows_of_rank(step))  # scores
            if mended and step == 0:
                patches.record_backward(engine)
            train_one_step(engine, step)
        assert trace.is_complete_trace() == mended, "it records a backward: the patch may go"

    def buffers():
        states = engine.basic_optimizer.state.values()
        return sorted({name for state in states for name in state if "buffer" in name})

    args = runs.tiny_args(base, 3, "--output_dir", str(folder))
    args.offload_states = True
    facts = {"rows_per_step": 1, "data_rows": 1, "data_fingerprint": ""}
    zero3.states_to_cpu(args, [engine])
    zero3.states_to_device(args, [engine])
    assert buffers() == ["exp_avg_offload_buffer", "exp_avg_sq_offload_buffer"]
    checkpoints.save(args, {"model": engine}, 1, {"state": {}, "facts": facts})
    checkpoints.load(args, {"model": engine}, {}, facts, 9)
    assert buffers() == []


def test_stage_3_prefetches_in_a_backward_and_its_checkpoint_holds_the_moments_once(tmp_path):
    """DeepSpeed records the order of modules between two forwards, and prefetches by it. Where
    forwards that score and passes that train take turns, no record held a backward.

    After --offload_states stage 3 keeps the buffers on the CPU among Adam's state, for the next
    time. In a checkpoint they would be a second copy, and a resumed run would load them onto the
    device: then an offload moves moments from there to there."""
    kit.on_ranks(stage_3, 2, runs.base(), tmp_path)
