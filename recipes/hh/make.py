"""Divides preference pairs for a run whose result a second judge looks at.

    git clone --depth 1 https://github.com/anthropics/hh-rlhf
    python recipes/hh/make.py hh-rlhf/harmless-base/test.jsonl.gz output/hh/data

ours/train.jsonl is for the three steps, second/train.jsonl for a judge that only evaluates, and
both folders have the same held-out pairs in test.jsonl. No first question of one part is in
another. The files are lines of `chosen` and `rejected`, each a whole dialogue as text.

It also prints how often the chosen response is the shorter one: a reward model that agrees with no
more pairs than that may have learned length alone.
"""

import argparse
import gzip
import json
import zlib
from pathlib import Path

ASSISTANT = "\n\nAssistant:"  # before each response
PARTS = {"ours": 0.61, "second": 0.26, "test": 0.13}  # of the first questions


def part_of(row):
    """Returns the part of PARTS to which a pair goes, by a hash of its first question."""
    question = row["chosen"].split(ASSISTANT)[0]
    place = zlib.crc32(question.encode()) / 2**32
    for name, share in PARTS.items():
        place -= share
        if place < 0:
            return name
    return name


def prefers_shorter(row):
    """Returns whether the chosen response has fewer characters than the rejected one."""
    chosen, rejected = (len(row[c].split(ASSISTANT)[-1]) for c in ("chosen", "rejected"))
    return chosen < rejected


def main():
    parser = argparse.ArgumentParser(description="Divides preference pairs.")
    parser.add_argument("source", type=Path, help="a .jsonl or .jsonl.gz file of pairs")
    parser.add_argument("folder", type=Path, help="where ours/ and second/ are written")
    args = parser.parse_args()
    read = gzip.open if args.source.suffix == ".gz" else open
    parts = {name: [] for name in PARTS}
    for line in read(args.source, "rt", encoding="utf-8"):
        row = json.loads(line)
        parts[part_of(row)].append(row)
    texts = {name: "".join(json.dumps(row) + "\n" for row in parts[name]) for name in parts}
    for name in ("ours", "second"):
        (args.folder / name).mkdir(parents=True, exist_ok=True)
        (args.folder / name / "train.jsonl").write_text(texts[name])
        (args.folder / name / "test.jsonl").write_text(texts["test"])
    for name, rows in parts.items():
        share = sum(map(prefers_shorter, rows)) / len(rows)
        print(f"{name}: {len(rows):,} pairs; the chosen response is the shorter in {share:.3f}")


if __name__ == "__main__":
    main()
