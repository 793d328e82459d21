"""Evaluations: alone, with --max_steps 0; and what is said of scores."""

import math
from types import SimpleNamespace

import pytest
import torch

import ppo
import reward
from machinery.data import batching
from tests import kit, runs


@pytest.mark.parametrize("script, metric", [("sft", "eval_loss"), ("ppo", "eval_reward")])
def test_max_steps_0_evaluates_and_ends(script, metric):
    """How good is this model, on this data? The line of step 0, its picture, the samples and exit
    code 0; no step is made, so no model and no checkpoint is saved: the folder is no finished
    run."""
    done = kit.run(script, *runs.base_flags(script, kit.base()), "--max_steps", 0)
    [line] = kit.metrics(done.folder)
    assert line["step"] == 0 and metric in line
    assert script == "ppo" or line["eval_perplexity"] == pytest.approx(math.exp(line["eval_loss"]))
    own = {"tokens.jsonl"} if script == "ppo" else set()
    left = {file.name for file in done.folder.glob("[!.]*")}
    assert left == {"args.json", "metrics.jsonl", "samples.jsonl", "curves.png"} | own, done


def test_the_deviation_of_scores_keeps_its_digits_far_from_0(monkeypatch):
    """Scores of 100 +- 0.1: sums of their squares in fp32 are wrong by a percent of it."""
    scores = 100 + 0.1 * torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    batches = [(range(500), SimpleNamespace(row_weight=torch.ones(500)))]
    monkeypatch.setattr(batching, "eval_loader", lambda *_: batches)
    monkeypatch.setattr(reward, "score_pairs", lambda *_: scores)
    monkeypatch.setattr(reward.judged, "write_pairs", lambda *_: None)
    run = SimpleNamespace(args=None, notes={})
    found = reward.evaluate(run, torch.nn.Identity(), None, None)["eval_score_std"]
    assert found == pytest.approx(scores.double().std(unbiased=False).item(), rel=1e-5)


def test_an_evaluation_decodes_no_fewer_responses_at_a_time_than_a_rollout(monkeypatch):
    """A static cache has --rollout_batch_size rows: of 64 an evaluation of eight would leave 56
    empty, and decode them all the same."""
    sizes = []
    monkeypatch.setattr(ppo, "roll_out", lambda *given: sizes.append(given[-1]) or [])
    for rollout, evaluation, together in ((64, 8, 64), (8, 32, 32)):
        flags = f"--preset toy --rollout_batch_size {rollout}"
        args = ppo.get_args([*flags.split(), "--per_device_eval_batch_size", str(evaluation)])
        ppo.answered(args, SimpleNamespace(engines={}, actor=None), None, [])
        assert sizes.pop() == together
