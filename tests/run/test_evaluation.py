"""Evaluations: alone, with --max_steps 0; each row once; and masks that are fractions."""

import math
from types import SimpleNamespace

import pytest
import torch

import common
import reward
from machinery.base import ranks
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


@pytest.mark.parametrize("size", [1, 2])
def test_rows_of_all_ranks_are_each_there_once(size, monkeypatch):
    """An evaluation counts each held-out prompt once: no filler, which is there so that all ranks
    make the same number of forwards, and no copy from a rank that shares its layers with another:
    they have the same rows."""
    monkeypatch.setattr(ranks, "tensor_parallel_size", lambda: size)
    shares, given = 4 // size, []
    monkeypatch.setattr(ranks, "all_gather_objects", lambda rows: given.extend(rows) or given)
    for rank in range(4):
        monkeypatch.setattr(ranks, "get_rank", lambda rank=rank: rank)
        share = rank // size
        filler = {"row": -1, "row_weight": 0}
        everyones = ranks.each_once([{"row": share, "row_weight": 1}, filler])
    assert sorted(row["row"] for row in everyones) == list(range(shares))


def test_the_deviation_of_scores_keeps_its_digits_far_from_0(monkeypatch):
    """Scores of 100 +- 0.1: sums of their squares in fp32 are wrong by a percent of it."""
    scores = 100 + 0.1 * torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    batches = [(range(500), SimpleNamespace(row_weight=torch.ones(500)))]
    monkeypatch.setattr(common, "eval_loader", lambda *_: batches)
    monkeypatch.setattr(reward, "score_pairs", lambda *_: scores)
    monkeypatch.setattr(reward.pair_scores, "keep", lambda *_: None)
    run = SimpleNamespace(args=None, notes={})
    found = reward.evaluate(run, torch.nn.Identity(), None, None)["eval_score_std"]
    assert found == pytest.approx(scores.double().std(unbiased=False).item(), rel=1e-5)
