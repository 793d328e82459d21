"""What a step is said to have cost: its FLOPs, its tokens, its seconds."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForSequenceClassification

import common
import ppo
import sft
from helpers import metrics
from machinery.engine import throughput
from machinery.models import lora
from machinery.run import run as run_module
from tests import kit, runs
from tests.conftest import micro_batch

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
@pytest.mark.parametrize("kind", ["whole", "adapted", "tied"])
def test_flops_by_hand(tiny_model, options, layers, attention, output, adapters, kind):
    """100 tokens of one row, 25 of them scored: the output matrix is multiplied for those alone,
    the input embedding never. With LoRA the frozen matrices have no gradients of their own: about
    two forwards' worth of work in place of three."""
    model = copy.deepcopy(tiny_model).requires_grad_(True)
    expected = 0
    if kind == "tied":
        model.lm_head.weight = model.model.embed_tokens.weight
    if kind == "adapted":
        lora.add_adapters(model, sft.get_args(["--lora_dim", "1"]), "somewhere")
        frozen = "trains" in options
        layers, output, expected = layers - frozen, output - frozen, 100 * adapters * ADAPTERS
    expected += 100 * (layers * LAYERS + attention * ATTENTION)
    expected += 25 * output * 2 * 32 * model.config.vocab_size
    found = throughput.count_flops(model, 100, 100, 25, **options)
    assert found == pytest.approx(expected, rel=0.01)


def test_a_value_model_has_no_output_matrix(tiny_model):
    """Its head is one row, read at every token; how many tokens are scored does not matter."""
    value = LlamaForSequenceClassification(tiny_model.config)
    for scored in (0, 25):
        found = throughput.count_flops(value, 100, 100, scored)
        assert found == pytest.approx(100 * (LAYERS + ATTENTION), rel=0.01)


@pytest.mark.parametrize("scoring", [0, 1])
def test_a_step_of_ppo_by_hand(tiny_model, scoring):
    """The rollout, the reference and a judge, the forward that scores (unless it is trained on),
    and one update, where --target_kl left the other epochs out."""
    args = ppo.get_args("--preset toy --allow_unstable 1 --ppo_epochs 4".split())
    response_mask = torch.zeros(2, 25)
    response_mask[0] = 1  # the second row is a filler
    weight, lengths = torch.tensor([1.0, 0.0]), torch.tensor([25, 25])
    batch = micro_batch([0, 0], response_mask=response_mask, row_weight=weight, length=lengths)
    for response in batch.responses:
        response["prompt_ids"] = [5] * 75
    models = ppo.Models(tiny_model, None, None, [tiny_model], {}, None, None)
    passes = metrics.passes(args, models, 1, scoring, 0)
    tokens, flops = throughput.work([batch], passes)
    forward = throughput.count_flops(tiny_model, 100, 100, 25)
    assert tokens == 100 and flops == pytest.approx((2 + 1 + scoring + 3) * forward)


def timed_run(argv):
    """A run of step 1 by a clock that moves where work is done, and nowhere else."""
    clock = [0.0]

    def takes(seconds, holder, name, works=True):
        function = getattr(holder, name)

        def work(*given, **options):
            clock[0] += seconds
            return function(*given, **options) if works else {}

        setattr(holder, name, work)

    run_module.time = SimpleNamespace(monotonic=lambda: clock[0])
    takes(3, sft, "collate")
    takes(10, common, "mean_factor")  # once in a step of one micro-batch
    takes(100, sft, "evaluate", works=False)
    takes(1, run_module.Run, "write")
    kit.call_main("sft", argv)


def test_seconds_are_all_of_a_steps_time(tmp_path):
    """Loading (3 seconds here), what the body does (10) and writing the line before (1) are in
    `seconds`; an evaluation (100) is not. The rate of this run warms up for two steps, from 0."""
    flags = "--max_steps 3 --eval_steps 2 --num_samples 0 --num_warmup_steps 2 --output_dir".split()
    argv = [*runs.base_flags("sft", runs.base()), *flags, str(tmp_path / "out")]
    done = kit.fork(timed_run, 1, [*argv, "--gradient_accumulation_steps", "1"], meet="never")
    assert done.code == 0, done
    lines = kit.metrics(tmp_path / "out")
    assert [line.get("seconds") for line in lines] == [None, 13, 14, 13]
    assert [line["learning_rate"] for line in lines[1:]] == [0, 1.5e-3, 3e-3]


def test_speed_by_hand(monkeypatch):
    """8e12 FLOPs of four devices in two seconds: each has made 1e12 a second."""
    monkeypatch.setattr(throughput.ranks, "get_world_size", lambda: 4)
    speed = throughput.speed(100, 8e12, 2)
    assert (speed["tokens_per_second"], speed["tflops"]) == (50, 1)
