"""Writes judge.jsonl: the scores of the held-out pairs at step 2's last evaluation."""

import json
from pathlib import Path

from machinery.base import ranks

NAMES = "row chosen_score rejected_score chosen_length rejected_length".split()


def keep(args, held_out, judged):
    """Writes a line for each pair, in place of those of the evaluation before. All ranks call it.

    held_out: the rows of all ranks. judged: this rank's (row, chosen score, rejected score). A
    length is the number of tokens of a response, EOS included. The data's own columns are there,
    and `place`: the file and its line, so that one finds the pairs that the judge gets wrong.
    """
    pairs = ({"pair": pair, "row_weight": pair[0] >= 0} for pair in judged)
    found, output = ranks.each_once(pairs), Path(args.output_dir)
    if ranks.get_rank() > 0 or not output.is_dir():  # a benchmark has no folder
        return
    lines = []
    for pair in sorted(one["pair"] for one in found):
        row = held_out[pair[0]]
        texts = {"place": row["place"], "prompt": row["prompt"], **json.loads(row["extra"])}
        numbers = dict(zip(NAMES, (*pair, *map(len, row["responses"]))))
        lines.append(json.dumps(texts | numbers) + "\n")
    (output / "judge.jsonl").write_text("".join(lines))
