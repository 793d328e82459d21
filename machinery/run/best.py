"""--keep_best METRIC: a copy, in best/, of the model whose evaluation was the best so far."""

import json
import shutil
from pathlib import Path

from machinery.base import ranks
from machinery.base.refused import Refused, read_json
from machinery.models import saving

EVALUATION = "evaluation.json"  # in best/: what its model was found to be
LESS_IS_BETTER = ("loss", "perplexity", "kl")  # the last word of a metric's name


def refuse_unknown_metric(args, record):
    """Refuses --keep_best if the evaluation in `record` has no such metric.

    It must be a float.
    """
    found = [n for n, value in record.items() if n[:5] == "eval_" and isinstance(value, float)]
    if args.keep_best and args.keep_best not in found:
        words = f"--keep_best {args.keep_best}: the evaluations have {', '.join(found)}."
        raise Refused("keep-best-unknown", words)


def keep(run, record):
    """Saves the model that trains if `record` is better than the one in best/, or there is none.

    All ranks call it. After --resume best/ may be of a step after the checkpoint: it stays until it
    is surpassed. Step 0 does not count: its model is there already. The new model is written whole
    in .new/, and takes the place of the old one by renames. A file of the user's stays there.
    """
    name = run.args.keep_best
    if name not in record:
        if name:  # pass_at_k: a reward was neither 0 nor 1
            ranks.say(f"warning: --keep_best: this evaluation has no {name}")
        return
    output = Path(run.args.output_dir)
    best, new, old = output / "best", output / ".new/best", output / ".old/best"
    better = False
    if ranks.get_rank() == 0:
        if not best.exists() and (new / EVALUATION).exists():  # killed between the two renames
            new.rename(best)
        if run.best_step and not best.exists():
            ranks.say(
                f"warning: best/ of step {run.best_step} is gone: the best from now on is kept"
            )
        better = improves(best, name, record[name])
        if better:
            shutil.rmtree(new.parent, ignore_errors=True)
            shutil.rmtree(old.parent, ignore_errors=True)
    if not ranks.all_sum(better)[0]:
        return
    run.best_step = record["step"]
    run.save(run.engine, run.tokenizer, new)
    if ranks.get_rank() == 0:
        (new / EVALUATION).write_text(json.dumps({"step": record["step"], name: record[name]}))
        saving.sync(new / EVALUATION)
        saving.sync(new)
        if best.exists():
            copy = lambda file, to: Path(to).exists() or shutil.copy2(file, to)  # noqa: E731
            shutil.copytree(best, new, copy_function=copy, dirs_exist_ok=True)
            old.parent.mkdir()
            best.rename(old)
        new.rename(best)
        saving.sync(output)
        new.parent.rmdir()
        shutil.rmtree(old.parent, ignore_errors=True)
    ranks.say(f"{name} {record[name]:.6g} is the best so far: the model is in {best}")


def improves(kept, name, value):
    """Returns whether the metric's value is better than that of the model in `kept`, if any."""
    before = read_json(kept, EVALUATION).get(name)
    if not isinstance(before, (int, float)):  # there is none, or it was damaged
        return True
    return value < before if name.endswith(LESS_IS_BETTER) else value > before
