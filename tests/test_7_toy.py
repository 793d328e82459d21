"""The built-in task: known limits are only worth something if they are right,
and if nothing can be gamed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOY = Path(__file__).resolve().parent.parent / "toy"
sys.path.insert(0, str(TOY))
from gold import gold  # noqa: E402


def rows(name):
    return [json.loads(line) for line in open(TOY / "data" / f"{name}.jsonl")]


def test_the_same_seed_makes_the_same_bytes(tmp_path):
    """Everything committed in toy/ comes out of `python toy/make.py` again,
    byte for byte: nothing was touched by hand."""
    subprocess.run(
        [sys.executable, TOY / "make.py", "--out", tmp_path], check=True, capture_output=True
    )
    for file in (
        "data/train.jsonl",
        "data/test.jsonl",
        "data/limits.json",
        "model/config.json",
        "model/tokenizer.json",
    ):
        assert (tmp_path / file).read_bytes() == (TOY / file).read_bytes(), file


def test_the_toy_is_small():
    """Data, tokenizer and config together stay under 3 MB: they are cloned by everyone."""
    assert (
        sum(f.stat().st_size for f in TOY.rglob("*") if f.is_file() and "__pycache__" not in str(f))
        < 3e6
    )


def test_held_out_prompts_ask_about_pairs_never_trained_on():
    """Prompts are held out by combination of animal and place, so that
    answering them is generalising, not remembering."""

    def pairs(name):
        words = [set(row["prompt"].replace("?", " ").split()) for row in rows(name)]
        import gold as rules

        return {
            (next(a for a in rules.ANIMALS if a in w), next(p for p in rules.PLACES if p in w))
            for w in words
        }

    assert not pairs("train") & pairs("test")
    assert len(pairs("test")) >= 20


def test_the_ceiling_of_the_reward_model_is_what_the_ideal_judge_reaches():
    """The judge that knows gold is right on the noisy held-out pairs as often
    as limits.json says, ties counting a half."""
    test = rows("test")
    prompts = [r["prompt"] for r in test]
    chosen, rejected = (gold(prompts, [r[k] for r in test]) for k in ("chosen", "rejected"))
    share = sum((c > r) + 0.5 * (c == r) for c, r in zip(chosen, rejected)) / len(test)
    assert share == pytest.approx(
        json.loads((TOY / "data/limits.json").read_text())["reward"]["eval_accuracy"], abs=1e-5
    )


def test_supervised_answers_leave_room_to_improve():
    """Answers of mixed quality average about half of the largest gold score:
    PPO has something to find."""
    train = rows("train")
    scores = gold([r["prompt"] for r in train], [r["response"] for r in train])
    assert 0.35 < sum(scores) / len(scores) < 0.65
    assert max(scores) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        " otter mill boat",
        " otter otter otter mill mill mill",
        " asdf qwer!",
        " Happy to help!",
        " Happy to help! Happy to help! Happy to help!",
        " The otter gets to the mill by boat." * 3,
    ],
)
def test_gold_cannot_be_bought_with_keywords(answer):
    """A policy that stuffs or repeats the right words must not score like one that answers."""
    assert gold(["How does the otter get to the mill?\nAnswer:"], [answer])[0] <= 0.5
