"""The built-in task: known limits are only worth something if they are right, and if nothing can be
gamed."""

import json
import sys

import pytest

from tests import kit
from tests.kit import read_lines

TOY = kit.ROOT / "recipes/toy"
sys.path.insert(0, str(TOY))
import gold as rules


def rows(name):
    return read_lines(TOY / "data" / f"{name}.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("script, count", [("toy/make.py", 5), ("arithmetic/generate.py", 8)])
def test_the_same_seed_makes_the_same_bytes(tmp_path, script, count):
    """Everything committed of the toys comes out of the generators again, byte for byte: nothing
    was touched by hand."""
    program = f"recipes/{script}".removesuffix(".py").replace("/", ".")
    done = kit.start(f"{program} --out {tmp_path}")
    assert done.code == 0, done
    names = ["train.jsonl", "test.jsonl", "limits.json", "config.json", "tokenizer.json"]
    made = [file for file in tmp_path.rglob("*") if file.name in names]
    assert len(made) == count
    for file in made:
        kept = (kit.ROOT / "recipes" / script).parent / file.relative_to(tmp_path)
        assert file.read_bytes() == kept.read_bytes(), file


def test_held_out_prompts_ask_about_pairs_never_trained_on():
    """Prompts are held out by combination of animal and place, so that answering them is
    generalising, not remembering."""

    def pairs(name):
        for row in rows(name):
            words = row["prompt"].replace("?", " ").split()
            yield [next(x for x in known if x in words) for known in (rules.ANIMALS, rules.PLACES)]

    held_out, trained = ({*map(tuple, pairs(name))} for name in ("test", "train"))
    assert len(held_out) >= 20 and not held_out & trained


def test_the_ceiling_of_the_reward_model_is_what_the_ideal_judge_reaches():
    """The judge that knows gold is right on the noisy held-out pairs as often as limits.json says,
    ties counting a half."""
    test = rows("test")
    prompts = [row["prompt"] for row in test]
    scores = [rules.gold(prompts, [row[k] for row in test]) for k in ("chosen", "rejected")]
    share = sum((c > r) + 0.5 * (c == r) for c, r in zip(*scores)) / len(test)
    limit = json.loads((TOY / "data/limits.json").read_text())["reward"]["eval_accuracy"]
    assert share == pytest.approx(limit, abs=1e-5)


def test_gold_cannot_be_bought_with_keywords():
    """A policy that stuffs or repeats the right words must not score like one that answers."""
    for response in ("", " otter mill boat", " The otter gets to the mill by boat." * 3):
        assert rules.gold(["How does the otter get to the mill?\nAnswer:"], [response])[0] <= 0.5
