"""Copies the toy's data, with chosen and rejected exchanged in a share of the training pairs.

    python course/swapped.py 0.5 output/class/half-swapped

The held-out pairs stay as they are, so that the accuracy of a judge is that on right labels.
course/class.md has the exercise.
"""

import json
import random
import sys
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "toy/data"


def swapped(lines, share):
    """Returns lines of JSON. Each pair is exchanged with the probability `share`.

    >>> swapped(['{"prompt": "Who?", "chosen": "a", "rejected": "b"}'], 1.0)
    ['{"prompt": "Who?", "chosen": "b", "rejected": "a"}']
    """
    draw, out = random.Random(0), []
    for row in map(json.loads, lines):
        if draw.random() < share:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
        out.append(json.dumps(row))
    return out


def main(share, folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    train = (DATA / "train.jsonl").read_text().splitlines()
    (folder / "train.jsonl").write_text("\n".join(swapped(train, float(share))) + "\n")
    (folder / "test.jsonl").write_text((DATA / "test.jsonl").read_text())
    print(f"{folder}: {share} of {len(train):,} training pairs are exchanged")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
