"""What a step is said to have cost: its FLOPs, its tokens, its seconds."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForSequenceClassification

import common
import sft
from machinery import lora, metrics
from machinery import run as run_module
from tests import kit, runs
from tests.conftest import micro_batch

# Of tiny_model in rows of 100 tokens: a multiplication and an addition for each weight and token,
# and for each position that is looked back at. (Norms are left out here: under 1 %.)
LAYERS = 2 * 2 * (4 * 32 * 32 + 3 * 32 * 64)  # 2 layers of 32, MLP 64
ATTENTION = 4 * 2 * 32 * 100
ADAPTERS = 2 * 2 * (4 * (32 + 32) + 3 * (32 + 64))  # of rank 1 beside each of the 14 matrices


@pytest.mark.parametrize("checkpointing", [0, 1])
@pytest.mark.parametrize("kind", ["whole", "adapted", "tied", "value"])
def test_flops_by_hand(tiny_model, kind, checkpointing):
    """A forward multiplies each matrix once, but for an input embedding. A backward does so twice:
    for the gradients of what goes in, and for those of the weights, which with LoRA the adapters
    alone have. With checkpointing the forward is made twice."""
    model = copy.deepcopy(tiny_model).requires_grad_(True)
    forward = LAYERS + 2 * 32 * model.config.vocab_size
    if kind == "tied":
        model.lm_head.weight = model.model.embed_tokens.weight
    if kind == "value":  # its head is one row
        model, forward = LlamaForSequenceClassification(model.config), LAYERS
    trained = forward
    if kind == "adapted":
        lora.add_adapters(model, sft.get_args(["--lora_dim", "1"]), "somewhere")
        trained, forward = ADAPTERS, forward + ADAPTERS
    expected = (2 + checkpointing) * (forward + ATTENTION) + trained + ATTENTION
    args = SimpleNamespace(gradient_checkpointing=checkpointing)
    found = metrics.flops_per_token(args, model, 100)
    assert found == pytest.approx(expected, rel=0.01)


def test_speed_by_hand(tiny_model, monkeypatch):
    """A step of PPO on four devices in two seconds: a forward and a backward of each model that
    trains, on prompt and response. Fillers count nothing, nor do tokens that an update leaves out.
    """
    args = SimpleNamespace(gradient_checkpointing=False)
    weight, lengths = torch.tensor([1.0, 0.0]), torch.tensor([25, 25])
    mask = torch.zeros(2, 25)
    batch = micro_batch([0, 0], response_mask=mask, row_weight=weight, length=lengths)
    for response in batch.responses:
        response["prompt_ids"] = [5] * 75
    models = tiny_model, LlamaForSequenceClassification(tiny_model.config)
    tokens, flops = metrics.work(args, models, [batch, batch])
    each = sum(metrics.flops_per_token(args, model, 100) for model in models)
    assert tokens == 200 and flops == pytest.approx(200 * each)
    monkeypatch.setattr(metrics.ranks, "get_world_size", lambda: 4)
    found = metrics.speed(tokens, flops, 2)
    assert found["tokens_per_second"] == 100
    assert found["tflops"] == pytest.approx(200 * each / 2 / 4 / 1e12)


def timed_run(argv):
    """A run of step 1 by a clock that moves where work is done, and nowhere else."""
    clock = [0.0]
    run_module.time = SimpleNamespace(monotonic=lambda: clock[0])
    costs = (sft, "collate", 3), (common, "mean_factor", 10), (sft, "evaluate", 100)
    for holder, name, seconds in (*costs, (run_module.Run, "write", 1)):
        own = getattr(holder, name)

        def work(*given, own=own, seconds=seconds, **options):
            clock[0] += seconds
            return {} if seconds == 100 else own(*given, **options)

        setattr(holder, name, work)
    kit.call_main("sft", argv)


def test_seconds_are_all_of_a_steps_time(tmp_path):
    """Loading (3 seconds here), what the body does (10) and writing the line before (1) are in
    `seconds`; an evaluation (100) is not. The rate of this run warms up for two steps, from 0."""
    flags = """--max_steps 3 --eval_steps 2 --num_samples 0 --num_warmup_steps 2
               --gradient_accumulation_steps 1 --output_dir"""
    argv = [*runs.base_flags("sft", runs.base()), *flags.split(), str(tmp_path / "out")]
    done = kit.fork(timed_run, 1, argv, meet="never")
    assert done.code == 0, done
    lines = kit.metrics(tmp_path / "out")
    assert [line.get("seconds") for line in lines] == [None, 13, 14, 13]
    assert [line["learning_rate"] for line in lines[1:]] == [0, 1.5e-3, 3e-3]
