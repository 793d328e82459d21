"""Checkpoints: a run that goes on, the best model, and what a checkpoint alone is good for."""

import json

import pytest
import torch

from tests import kit, runs
from tests.runs import curve, metrics, run_of, without_clocks
from tools import export

RESUMED = {
    "sft_zero3": "sft_zero3_resumed",  # at the end of an epoch
    "ppo_zero2": "ppo_zero2_resumed",  # after SIGTERM
    "sft_dropout": "sft_dropout_resumed",  # in the middle of an epoch, with dropout
    "ppo_dropout": "ppo_dropout_resumed",
    "reward_checkpoints": "reward_resumed",  # ZeRO 0
    # where the pass that scores is the pass that trains, but for a run's first step
    "ppo_one_pass": "ppo_one_pass_resumed",
}


@pytest.mark.parametrize("whole", RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_one(whole):
    """Weights, optimizer, schedule, dropout and its random numbers, place in the data, EMA: if any
    of them were lost, the next loss would differ. After --resume all metrics, samples and final
    weights are the same to the bit."""
    found, expected = (kit.outcome(run_of(name)) for name in (RESUMED[whole], whole))
    assert found == expected
    for resumed, uninterrupted in zip(runs.facts(RESUMED[whole]), runs.facts(whole)):
        later, all_draws = resumed["draws"], uninterrupted["draws"]  # of Python and NumPy
        assert 0 < len(later) < len(all_draws) and later.items() <= all_draws.items()
    models = [name for name in expected if name.endswith("model.safetensors")]
    assert len(models) == (3 if whole.startswith("ppo") else 1)


def test_dropout_differs_by_rank():
    """Where all drew the same masks two ranks would drop the same weights for all rows."""
    assert [rank["seed"] for rank in runs.facts("sft_dropout")] == [1234, 1235]


def test_a_resumed_run_takes_the_kl_penalty_that_it_is_given():
    assert [value for _, value in curve("ppo_dearer", "kl_coef")] == [0.05, 0.05, 0.3, 0.3]
    assert json.loads((run_of("ppo_dearer") / "args.json").read_text())["kl_coef"] == 0.3
    codes = [rank["code"] for rank in runs.facts("ppo_zero2_interrupted")]
    assert codes == [1, 1], "as SIGTERM ends a run"


def test_taking_a_checkpoint_changes_nothing():
    """A run that saves on the way is the same run. (Which of its checkpoints stay:
    test_reliability.py.)"""
    assert without_clocks("sft_zero3_checkpoints") == without_clocks("sft_zero3")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_holds_what_trains(stage):
    """With LoRA that is a few adapters. The frozen weights come from where they came from at first:
    of two models of 8B they would be 64 GB at each save, at stage 2 twice."""
    states = run_of(f"m_fp32{stage}_lora").glob("checkpoints/*/model/state/*model_states.pt")
    state = torch.load(min(states), weights_only=False)
    assert sum("lora_" in key for key in state["module"]) == len(state["module"]) == 2 * 7 * 2
    assert not state["frozen_param_fragments"]


# --------------------------------------------------------------------------------------------------
# A checkpoint as a model
# --------------------------------------------------------------------------------------------------
def content(file):
    """The bytes of a file; of adapters' config, whose lists have any order, the values."""
    if file.name != "adapter_config.json":
        return file.read_bytes()
    values = json.loads(file.read_text()).items()
    return {key: sorted(value) if isinstance(value, list) else value for key, value in values}


EXPORTED = {"reward_lora3": 5, "ppo_one_pass": 4, "ppo_dropout": 4, "ppo_lora_checkpoints": 4}
SAVED = {name: 2 for name, run in runs.MATRIX.items() if "--save_steps" in run["flags"]}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SAVED]


@pytest.mark.parametrize("name", [*EXPORTED, *SLOW])
def test_a_checkpoint_is_a_model(name, tmp_path):
    """Of a run that stopped there is often no more than its checkpoints. What export makes of the
    last one is what the run itself has saved at its end, to the byte: weights, configs, tokenizer,
    of all models, from two ranks' shards under every stage, in fp32 and bf16, with LoRA."""
    run = run_of(name)
    export.export(run / f"checkpoints/step-{(EXPORTED | SAVED)[name]}", tmp_path / "model")
    files = [f for part in ("", "ema", "critic") for f in (run / part).glob("*") if f.is_file()]
    models = [f for f in files if f.suffix == ".safetensors"]
    assert len(models) == (3 if name.startswith("ppo") else 1)
    left = {"args.json", ".lock"}  # what a run leaves beside its models
    for file in files:
        if file.name not in left and file.suffix != ".jsonl":
            assert content(tmp_path / "model" / file.relative_to(run)) == content(file), file


# --------------------------------------------------------------------------------------------------
# --keep_best
# --------------------------------------------------------------------------------------------------
def test_the_best_model_is_kept(tmp_path):
    """By the held-out metric, the first of equals, and not the untrained model of step 0. It is the
    model of that step; a run that is resumed from before it finds it again; and keeping it changes
    nothing in the run."""
    scores = dict(curve("reward_best", "eval_accuracy")[1:])
    step = max(scores, key=scores.get)  # the first of them
    whole, resumed = run_of("reward_best"), run_of("reward_best_resumed")
    export.export(whole / f"checkpoints/step-{step}", tmp_path)
    kept, last = (whole / name for name in ("best/model.safetensors", "model.safetensors"))
    assert (tmp_path / "model.safetensors").read_bytes() == kept.read_bytes()
    if step > 1:
        assert (resumed / "best/model.safetensors").read_bytes() == kept.read_bytes()
    for folder in (resumed, run_of("reward_zero3")):
        assert (folder / "model.safetensors").read_bytes() == last.read_bytes()
    assert json.loads((whole / "best/evaluation.json").read_text())["step"] == step
    for file in ("config.json", "model.safetensors"):  # also after its last checkpoint
        found, expected = (run_of(n) / file for n in ("reward_ended_resumed", "reward_best"))
        assert found.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("name", ["reward_zero0", "reward_zero3", "reward_one_rank"])
def test_step_2_reports_its_scores(name):
    """Means and deviation of the held-out scores, by the pairs that judge.jsonl has."""
    last, rows = metrics(name)[-1], kit.read_lines(run_of(name) / "judge.jsonl")
    names = "chosen_score", "rejected_score"
    scores = torch.tensor([[row[name] for name in names] for row in rows]).double()
    margin = scores[:, 0] - scores[:, 1]
    expected = dict(zip([f"eval_{name}" for name in names], scores.mean(0).tolist()))
    expected["eval_score_mean"] = scores.mean().item()
    expected["eval_score_std"] = scores.std(correction=0).item()
    expected["eval_margin"] = margin.mean().item()
    expected["eval_loss"] = (-margin).exp().log1p().mean().item()
    expected["eval_accuracy"] = ((margin > 0) + 0.5 * (margin == 0)).mean().item()
    assert {name: last[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    low, high = last["eval_accuracy_ci"]
    assert low < last["eval_accuracy"] < high
