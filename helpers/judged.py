"""Step 2 writes judge.jsonl: what the reward model says of each held-out pair."""

import json
from pathlib import Path

from machinery.base import ranks

COLUMNS = "row chosen_score rejected_score chosen_length rejected_length".split()


def write_pairs(args, held_out, pairs):
    """Writes a line for each pair, in place of those of the evaluation before. All ranks call it.

    held_out: the rows of all ranks. pairs: (n, 3), of this rank's: number of the row, chosen score,
    rejected score. A length is the number of tokens of a response, EOS included. The line has the
    data's own columns, too, and `place`, the file and its line: this is how to find the pairs that
    the judge gets wrong.
    """
    # Ranks that share layers have the same pairs.
    scores = {int(number): own for number, *own in ranks.all_gather_objects(pairs.tolist())}
    output = Path(args.output_dir)
    if ranks.get_rank() > 0 or not output.is_dir():  # a benchmark has no folder
        return
    lines = []
    for number in sorted(scores):
        row = held_out[number]
        texts = {"place": row["place"], "prompt": row["prompt"], **json.loads(row["extra"])}
        numbers = zip(COLUMNS, (number, *scores[number], *map(len, row["responses"])))
        lines.append(json.dumps(texts | dict(numbers)) + "\n")
    (output / "judge.jsonl").write_text("".join(lines))
