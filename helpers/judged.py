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
    judged = [{"pair": pair, "row_weight": 1} for pair in pairs.tolist()]
    judged, output = ranks.each_once(judged), Path(args.output_dir)
    if ranks.get_rank() > 0 or not output.is_dir():  # a benchmark has no folder
        return
    lines = []
    for number, *scores in sorted(one["pair"] for one in judged):
        row = held_out[int(number)]
        texts = {"place": row["place"], "prompt": row["prompt"], **json.loads(row["extra"])}
        numbers = zip(COLUMNS, (int(number), *scores, *map(len, row["responses"])))
        lines.append(json.dumps(texts | dict(numbers)) + "\n")
    (output / "judge.jsonl").write_text("".join(lines))
