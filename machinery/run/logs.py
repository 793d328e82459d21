"""What a run shows of itself: metrics.jsonl, samples.jsonl, lines on the screen, curves.png."""

import contextlib
import json
from pathlib import Path
from statistics import fmean

from machinery.base import ranks
from machinery.base.refused import read_json
from machinery.run import crash, plots

LAST, LARGEST = ("epoch", "learning_rate", "kl_coef"), ("_max", "_gap")  # how names end
FILES = ("metrics.jsonl", "samples.jsonl", "tokens.jsonl")  # appended to


def append(args, name, rows):
    """Appends dicts to a .jsonl file of the output folder, on rank 0."""
    if ranks.get_rank() == 0:
        with open(Path(args.output_dir) / name, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def cut(args, sizes):
    """Takes off the .jsonl files what was written after a checkpoint, on rank 0.

    sizes: {name: bytes} at the checkpoint. Where a file was changed since, that may be within a
    line: the next one would be joined to what is left of it.
    """
    for name, size in sizes.items() if ranks.get_rank() == 0 else ():
        with open(Path(args.output_dir) / name, "a+b") as file:
            file.seek(0)
            end = file.read(size).rfind(b"\n") + 1
            file.truncate(end)
        if end < size:
            ranks.say(f"warning: {name} was changed since the checkpoint: lines are missing")


def joined(records):
    """Returns one record of several steps': each metric's mean over the steps that have it.

    For step, epoch, kl_coef, learning rates, and all that is not a float, it is the last step's
    value; for names that end with _max or _gap, such as ratio_max and sampling_gap, the largest.
    """
    one = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record[name] for record in records if record.get(name) is not None] or [None]
        if name.endswith(LAST) or not isinstance(values[-1], float):
            one[name] = values[-1]
        else:
            one[name] = max(values) if name.endswith(LARGEST) else fmean(values)
    return one


def write_record(args, record, columns, legend=False, monitor=None):
    """Writes a line to metrics.jsonl, its `columns` to the screen, events to DeepSpeed's monitor.

    legend: print the names of the columns above it. monitor: of config_file.opened.
    """
    crash.stop_if_not_finite(args, record)  # an evaluation may have found a number that is not
    numbers = {name: value for name, value in record.items() if isinstance(value, float)}
    nine_digits = {name: float(f"{value:.9g}") for name, value in numbers.items()}
    append(args, "metrics.jsonl", [{**record, **nine_digits}])
    short = {**record, **{name: f"{value:.4g}" for name, value in numbers.items()}}
    cells = ["" if short.get(name) is None else str(short[name]) for name in columns]
    for line in [columns, cells] if legend else [cells]:
        ranks.say(" ".join(text.rjust(max(8, len(name))) for text, name in zip(line, columns)))
    if monitor:  # it writes on rank 0
        monitor.write_events([(f"train/{name}", n, record["step"]) for name, n in numbers.items()])


def show_sample(row, response, numbers=""):
    """Prints the end of a row's prompt, the beginning of its response, and `numbers` in one line.

    samples.jsonl has all of it, as it is.
    """
    prompt = json.loads(row["prompt"])[-1]["content"] if row.get("chat") else row["prompt"]
    prompt, response = " ".join(prompt.split()), " ".join(response.split())
    ranks.say(f"    {prompt[-60:]} -> {response[:80]} {numbers}".rstrip())


def limits(data_path, script):
    """Returns {metric: the best that any model can reach} of the script, {} if it is not known.

    It stands in a limits.json beside the data. The toy has one.
    """
    with contextlib.suppress(Exception):  # it is not there, or somebody else's
        return dict(read_json(data_path[0], "limits.json")[script])
    return {}


def draw_curves(args):
    """Draws metrics.jsonl as curves.png, on rank 0. A picture that fails does not stop the run."""
    if ranks.get_rank() == 0:
        try:
            script = args.declared.script
            title = f"{script}.py, preset {args.preset}, {args.output_dir}"
            plots.draw(Path(args.output_dir), title, limits(args.data_path, script))
        except Exception as error:
            ranks.say(f"curves.png could not be drawn: {error!r}")
