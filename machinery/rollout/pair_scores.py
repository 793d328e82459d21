"""Writes judge.jsonl: the scores of the held-out pairs at step 2's last evaluation."""

import json
from pathlib import Path

from machinery.base import ranks


def keep(args, held_out, judged):
    """Writes a line for each pair, in place of those of the evaluation before. All ranks call it.

    held_out: the rows of all ranks. judged: this rank's (row, chosen score, rejected score). A
    length is the number of tokens of a response, EOS included.
    """
    pairs = ({"row": pair[0], "row_weight": pair[0] >= 0, "pair": pair} for pair in judged)
    lines, found = [], sorted(one["pair"] for one in ranks.each_once(pairs))
    for row, chosen, rejected in found if ranks.get_rank() == 0 else ():
        line = {"row": row, "chosen_score": chosen, "rejected_score": rejected}
        lengths = map(len, held_out[row]["responses"])
        line |= dict(zip(("chosen_length", "rejected_length"), lengths))
        lines.append(json.dumps(line) + "\n")
    output = Path(args.output_dir)
    if ranks.get_rank() == 0 and output.is_dir():  # a benchmark has no folder
        (output / "judge.jsonl").write_text("".join(lines))
