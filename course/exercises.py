"""What the exercises of course/class.md need: rewards that are easy to earn, and swapped labels.

python course/exercises.py 0.5 output/class/half-swapped     the data of exercise 5
"""

import json
import random
import sys
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "recipes/toy/data"


def letter_o(prompts, completions, **columns):
    """A tenth for each o in a response.

    >>> letter_o(["Who?"], [" Good question! The otter."])
    [0.4]
    """
    return [text.lower().count("o") / 10 for text in completions]


def bonus(prompts, completions, **columns):
    """A tenth for each word of a response.

    >>> bonus(["Who?"], [" Good question! The otter."])
    [0.4]
    """
    return [len(text.split()) / 10 for text in completions]


def large_bonus(prompts, completions, **columns):
    """Three tenths for each word."""
    return [3 * each for each in bonus(prompts, completions)]


def swap(share, folder):
    """Writes the toy's data, with chosen and rejected exchanged in a share of the training pairs.

    The held-out pairs stay as they are, so that the accuracy of a judge is that on right labels.
    """
    draw, folder = random.Random(0), Path(folder)
    rows = [json.loads(line) for line in (DATA / "train.jsonl").read_text().splitlines()]
    for row in rows:
        if draw.random() < share:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text((DATA / "test.jsonl").read_text())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    swap(float(sys.argv[1]), sys.argv[2])
