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
    """32 responses a step. Gold alone is not enough, nor is KL; later ones do not count. Without
    one, the best of those that are near enough."""
    far, near, both = (0.97, 2.1), (0.94, 0.5), (0.95, 2.0)
    assert leaderboard.needed(ARGS, run((0.5, 0), far, near, both, both)) == (6 * 32, 0.95)
    assert leaderboard.needed(ARGS, run((0.5, 0), far, near)) == (None, 0.94)
    assert leaderboard.needed(ARGS, [{"step": 1, "eval_gold": 1.0}]) == (None, 0)  # without a KL
    assert leaderboard.needed(ARGS, run((0.5, 0), both, responses=50)) == (100, 0.95)


def test_who_reaches_it_with_all_seeds_comes_first():
    """Of those that do not, who comes nearest."""
    counts = {"b": (300, 500), "c": (10, None), "d": (None, None), "e": (None, None)}
    golds = {"b": 0.96, "c": 0.96, "d": 0.9, "e": 0.94}
    entries = {n: {s: (x, golds[n]) for s, x in zip("12", each)} for n, each in counts.items()}
    entries["a"] = {"1": (300, 0.95), "2": (300, 0.97)}
    lines = leaderboard.table(entries).splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| a", "300 [300, 300]"],
        ["| b", "400 [300, 500]"],
        ["| c", "reached with 1 of 2 seeds"],
        ["| e", "reached with 0 of 2 seeds"],
        ["| d", "reached with 0 of 2 seeds"],
    ]
    assert lines[0].endswith("| 0.960 [0.950, 0.970] |")


def test_an_entry_cannot_change_what_is_measured():
    """Its other flags are taken, and its commands parse; each seed has its own three runs."""
    sly = "--temperature 0.5 # sly\n--eval_steps=1\n--clip=0.3 --actor_model_name_or_path=elsewhere"
    lab = leaderboard.lab_of("ppo", sly, (7, 8))
    assert {seed for _, seed in lab.chains()} == {7, 8}
    for runs in lab.chains().values():
        args = [kit.parse(each) for each in runs.values()][-1]
        assert (args.temperature, args.eval_steps, args.clip) == (1, 5, 0.3)
        assert args.actor_model_name_or_path != "elsewhere"
    for words in "--reward_fn=recipes/toy/gold.py:gold", "--seed 5", "--clip 0.3 @my.flags":
        with pytest.raises(SystemExit, match="An entry learns from the reward model"):
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
