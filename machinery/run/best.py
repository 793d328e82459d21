"""--keep_best METRIC: a copy, in best/, of the model whose evaluation was the best so far."""

import json
import math
import shutil
from pathlib import Path

from machinery.base import ranks
from machinery.base.refused import Refused
from machinery.models import saving

EVALUATION = "evaluation.json"  # in best/: what its model was found to be
# The last word of a metric's name: which way is better, by its sign
SIGNS = {"loss": -1, "perplexity": -1, "kl": -1, "accuracy": 1, "reward": 1, "gold": 1}


def check(args, record):
    """Refuses --keep_best if the evaluation in `record` has no such metric.

    It must say which model is better, and be of the model that is saved, not of the average.
    """
    found = [name for name in record if name.startswith("eval_") and sign_of(name)]
    found = [name for name in found if not name.startswith("eval_ema_")]
    if args.keep_best and args.keep_best not in found:
        words = f"--keep_best {args.keep_best}: the evaluations have {', '.join(found)}."
        raise Refused("keep-best-unknown", words)


def keep(run, record):
    """Saves the model that trains if `record` is better than all before it in the log.

    All ranks call it. With --resume the log ends where the checkpoint does, and best/ may be of a
    later step: it stays until it is surpassed. Step 0 does not count: its model is there already.
    The new model is written whole in best.new/, and takes the place of the old one by renames.
    """
    name = run.args.keep_best
    if not name:
        return
    output = Path(run.args.output_dir)
    best, new, old = output / "best", output / "best.new", output / "best.old"
    better = False
    if ranks.get_rank() == 0:
        if not best.exists() and (new / EVALUATION).exists():  # killed between the two renames
            new.rename(best)
        better = improves(run.args, name, record)
        if better:
            shutil.rmtree(new, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    if not ranks.all_sum(better)[0]:
        return
    run.save(run.engine, run.tokenizer, new)
    if ranks.get_rank() == 0:
        (new / EVALUATION).write_text(json.dumps({"step": record["step"], name: record[name]}))
        saving.sync(new / EVALUATION)
        saving.sync(new)
        if best.exists():
            best.rename(old)
        new.rename(best)
        saving.sync(output)
        shutil.rmtree(old, ignore_errors=True)
    ranks.say(f"{name} {record[name]:.6g} is the best so far: the model is in {best}")


def sign_of(name):
    """Returns 1 where more of the metric is better, -1 where less is, 0 where neither."""
    return SIGNS.get(name.rpartition("_")[2], 0)


def improves(args, name, record):
    """Returns whether record[name] is better than in all records before it in the log."""
    folder = Path(args.output_dir)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    before = [other for other in map(json.loads, lines) if 0 < other["step"] < record["step"]]
    if (kept := folder / "best" / EVALUATION).is_file():  # it may be of a step after the checkpoint
        before.append(json.loads(kept.read_text()))
    values = [other[name] for other in before if name in other]
    value, sign = float(f"{record[name]:.9g}"), sign_of(name)  # as it is logged
    return math.isfinite(value) and all(sign * value > sign * other for other in values)
