"""--keep_best METRIC: a copy, in best/, of the model whose evaluation was the best so far."""

import json
from pathlib import Path

from machinery import errors, model_folders, ranks, saving

LOWER = ("loss", "perplexity", "kl")  # of such metrics less is better, of others more


def check(args, record):
    """Ends the program unless the evaluation in `record` has the metric of --keep_best."""
    numbers = [name for name, value in record.items() if isinstance(value, float)]
    found = [name for name in numbers if name.startswith("eval_")]
    if args.keep_best and args.keep_best not in found:
        advice = f"This run's evaluations have {', '.join(found)}."
        errors.fail(f"--keep_best {args.keep_best} is no metric of them.\n  {advice}")


def keep(run, record):
    """Saves the model that trains if `record`, not logged yet, is better than all in the log.

    All ranks call it. The log is also what --resume goes on with: it ends where the checkpoint
    does. Step 0 does not count: its model is there already.
    """
    name = run.args.keep_best
    check(run.args, record)
    if not name or not ranks.all_sum(improves(run.args, name, record))[0]:
        return
    folder = Path(run.args.output_dir) / "best"
    config = model_folders.unwrap_model(run.engine).config
    training = dict(vars(config))
    if ranks.get_rank() == 0:  # a save that is killed must not leave half of two models
        for mark in saving.MARKS:
            (folder / mark).unlink(missing_ok=True)
    run.save(run.engine, run.tokenizer, folder)
    vars(config).update(training)  # what is saved has the model's own dropout
    ranks.say(f"{name} {record[name]:.6g} is the best so far: the model is in {folder}")


def improves(args, name, record):
    """Returns whether record[name] is better than in all records of the log (on rank 0)."""
    log = Path(args.output_dir) / "metrics.jsonl"
    if ranks.get_rank() != 0:
        return False
    before = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    values = [other[name] for other in before if other["step"] and name in other]
    sign = -1 if any(word in name for word in LOWER) else 1
    value = float(f"{record[name]:.9g}")  # as it will be logged
    return all(sign * value > sign * other for other in values)
