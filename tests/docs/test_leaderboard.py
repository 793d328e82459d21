"""The leaderboard of the course: what counts as reached, after how many responses; its table."""

import re
import sys

import pytest

from tests import kit

sys.path.insert(0, str(kit.ROOT / "course"))
import leaderboard  # noqa: E402

ARGS = {"rows_per_step": 4, "samples_per_prompt": 8}


def run(*evaluations, **more):
    """Returns made-up lines of metrics.jsonl: an evaluation before the first of two steps each."""
    lines = []
    for number, (gold, kl) in enumerate(evaluations):
        lines += [{"step": 2 * number - 1, **more}] * (number > 0)
        lines += [{"step": 2 * number, "eval_gold": gold, "eval_kl": kl, **more}]
    return lines


def test_the_first_evaluation_with_both_counts():
    """32 responses a step. Gold alone is not enough, nor is KL; later ones do not count."""
    far, near, both = (0.97, 2.1), (0.94, 0.5), (0.95, 2.0)
    assert leaderboard.needed(ARGS, run((0.5, 0), far, near, both, both)) == 6 * 32
    assert leaderboard.needed(ARGS, run((0.5, 0), far, near)) is None
    assert leaderboard.needed(ARGS, [{"step": 1, "eval_gold": 1.0}]) is None  # without a KL
    assert leaderboard.needed(ARGS, run((0.5, 0), both, responses=50)) == 100


def test_who_reaches_it_with_all_seeds_comes_first():
    entries = {"b": {"1": 300, "2": 500}, "c": {"1": 10, "2": None}, "a": {"1": 300, "2": 300}}
    lines = leaderboard.table(entries).splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| a", "300 [300, 300]"],
        ["| b", "400 [300, 500]"],
        ["| c", "reached with 1 of 2 seeds"],
    ]


def test_an_entry_cannot_change_what_is_measured():
    """Its other flags are taken, and its commands parse; each seed has its own three runs."""
    sly = "--temperature 0.5 # sly\n--eval_steps=1\n--clip=0.3 --actor_model_name_or_path=elsewhere"
    lab = leaderboard.lab_of("ppo", sly, (7, 8))
    assert {seed for _, seed in lab.chains()} == {7, 8}
    for runs in lab.chains().values():
        for each in runs.values():
            args = kit.parse(each)
        assert (args.temperature, args.eval_steps, args.clip) == (1, 5, 0.3)
        assert args.actor_model_name_or_path != "elsewhere"
    for words in ("--reward_fn toy/gold.py:gold", "--reward_fn=toy/gold.py:gold", "--seed 5"):
        with pytest.raises(SystemExit, match=words[2:6]):
            leaderboard.lab_of("ppo", words)


def test_the_page_shows_what_was_measured():
    """And its entries parse."""
    page = (kit.ROOT / "course/leaderboard.md").read_text()
    [block] = re.findall("<!-- results -->\n(.*)\n<!-- end -->", page, re.S)
    assert block == leaderboard.table(leaderboard.runner.read(leaderboard.RESULTS) or {})
    for file in (kit.ROOT / "course/leaderboard").glob("*.flags"):
        assert file.name in page
        for runs in leaderboard.lab_of("ppo", file.read_text()).chains().values():
            kit.parse(runs["ppo"])
