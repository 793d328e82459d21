"""Reads what a run has left in its folder, finished, running or broken, for look.py."""

import functools
import itertools
import json
import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pandas

import ppo
import reward
import sft
from machinery import output_folder, saving
from machinery.flags import OF_A_START
from machinery.refused import Refused, read_json, read_run
from tools.report.text import is_number, number, numbers_of, spoken, visible

SCRIPTS = {"sft": sft, "reward": reward, "ppo": ppo}  # in their order; others follow
TITLES = {"sft": "SFT", "reward": "Reward model"}
KNOWN_BY = {"eval_reward": "ppo", "eval_accuracy": "reward", "eval_perplexity": "sft"}
PARTS = {"best", "ema", "critic", "checkpoints"}  # folders inside a run's own
PACKED = "runs.json"  # runs without a folder: {name: what its files hold, or where it lies}
DEEPEST = 3  # folders below the one that is named
OLD = re.compile(r"\.old-\d+$")  # what --overwrite has moved aside
NEEDED = {  # fields of a line: texts, lists of tokens, numbers; one without them is left out
    "metrics": "step",
    "samples": "step prompt response",
    "tokens": "step prompt response tokens",
    "judge": "chosen_score rejected_score chosen_length rejected_length",
}
# derived from other flags
FACTS = {"frozen_models", "has_critic", "has_reference", "compares_groups", "left_open", "format"}


class Run:
    """One run's folder, read.

    args: args.json, {} if it cannot be read. metrics, tokens, judged: the lines of their files, and
    samples: of the first evaluation and of the last one. limits: {metric: the best that is
    possible}. broken: {file: lines that were left out}.
    """

    def __init__(self, path, name):
        self.path, self.name, self.broken = path, name, Counter()
        self.packed = packed(path)
        self.args = self.packed.get("args") or read_json(path)
        self.metrics, self.tokens, self.judged = (
            [*self.lines(name)] for name in ("metrics", "tokens", "judge")
        )
        self.samples = ends(self.lines("samples"))
        guessed = (script for metric, script in KNOWN_BY.items() if metric in self.table)
        self.script = str(self.args.get("script") or next(guessed, "run"))
        # limits.json may be somebody else's: its numbers alone count
        self.limits = numbers_of(limits_of(self.args.get("data_path"), self.script))

    def lines(self, name):
        """Yields the lines of a .jsonl file that hold what is needed, and counts the others."""
        for line in rows(self.packed.get(name, [])) or read_lines(self.path / f"{name}.jsonl"):
            if holds(line, NEEDED[name]):
                if "prompt" in line:
                    line["prompt"] = spoken(line["prompt"])
                yield line
            else:
                self.broken[f"{name}.jsonl"] += 1

    @functools.cached_property
    def table(self):
        """The metrics, a column each, by step; what is no number is left out."""
        named = functools.cache(visible)
        rows = [{named(n): x for n, x in numbers_of(line).items()} for line in self.metrics]
        return pandas.DataFrame(rows or {"step": []}, dtype=float).groupby("step").last()

    def series(self, name):
        """Returns the values of a metric by step."""
        return self.table.get(name, pandas.Series(dtype=float)).dropna()

    def values(self, name):
        """Returns the values of a metric, in the order of the steps."""
        return self.series(name).tolist()

    def answers(self, last):
        """Returns the samples of the last evaluation, or of the first one."""
        end = -1 if last else 0
        return [line for line in self.samples if line["step"] == self.samples[end]["step"]]

    def title(self):
        """Returns what the run's step is called: of ppo.py by its estimator of advantages."""
        kind = str(self.args.get("advantage", "gae")).upper() if self.script == "ppo" else ""
        return kind.replace("GAE", "PPO") or TITLES.get(self.script, self.script)

    def state(self):
        """Returns in words whether a run is finished, running, or stopped, and where."""
        step = number(max((line["step"] for line in self.metrics), default=0))
        if output_folder.is_held(self.path / output_folder.LOCK):
            return f"running, at step {step}"
        if saving.is_whole(self.path):
            return f"finished, {step} steps"
        if any((self.path / "checkpoints").glob("step-*")):
            return f"stopped at step {step} of its log; --resume goes on"
        return f"saved no model; its log ends at step {step}"


def limits_of(data_path, script):
    """Returns {metric: the best that any model can reach} of the script, {} if it is not known.

    It stands in a limits.json beside the data. The toy has one.
    """
    with suppress(Exception):  # it is not there, or somebody else's
        return dict(read_json(data_path[0], "limits.json")[script])
    return {}


def read_lines(path):
    """Yields what the lines of a .jsonl file hold, but for empty ones; None of what is no JSON."""
    with suppress(OSError), open(path, errors="replace") as file:
        for text in filter(str.strip, file):
            line = None
            with suppress(ValueError, RecursionError):
                line = json.loads(text)
            yield line


def packed(path):
    """Returns what runs.json, in the folder above, holds of a run; {} if it is not there."""
    run = read_json(path.parent, PACKED).get(path.name)
    return run if isinstance(run, dict) else {}


def rows(table):
    """Returns the lines of a packed file: it is a list of them, or has a list for each column.

    >>> rows({"step": [0, 1], "loss": [None, 0.5]})
    [{'step': 0}, {'step': 1, 'loss': 0.5}]
    """
    if isinstance(table, list):
        return table
    lines = zip(*table.values())
    return [{name: x for name, x in zip(table, line) if x is not None} for line in lines]


def ends(lines):
    """Returns of many lines those of the smallest step, and those of the largest."""
    kept = {}
    for line in lines:
        kept.setdefault(line["step"], []).append(line)
        if len(kept) > 2:
            del kept[sorted(kept)[1]]
    return sum((kept[step] for step in sorted(kept)), [])


def holds(line, fields):
    """Returns whether a line is a dict with these fields, each of its kind."""
    if not isinstance(line, dict):
        return False
    kinds = {"prompt": is_text, "response": is_text, "tokens": is_row}
    return all(kinds.get(field, is_number)(line.get(field)) for field in fields.split())


def is_text(value):
    return isinstance(value, str)


def is_row(tokens):
    """Returns whether these are lists as long as that of the tokens' texts."""
    lists = [*tokens.values()] if isinstance(tokens, dict) else [None]
    if not all(isinstance(each, list) for each in lists) or "text" not in tokens:
        return False
    return all(map(is_text, tokens["text"])) and len({*map(len, lists)}) == 1


# ---- Folders ----
def find(folders):
    """Returns the Runs in the folders, of each as deep as DEEPEST, in the order of the steps.

    Refuses a folder that is not there, or that holds no run.
    """
    found = {}
    for folder in map(Path, folders):
        paths = [path for path in below(folder, DEEPEST) if is_run(path)]
        if not paths:
            why = "is no folder that holds a run: no metrics.jsonl, and no args.json of ours"
            advice = "Name an --output_dir, or a folder of them."
            raise Refused("no-run", f"{folder} {why}.\n  {advice}")
        found |= {path.resolve(): path for path in paths}
    names = short_names([*found.values()])
    runs = [Run(path, visible(name)) for path, name in zip(found.values(), names)]
    return sorted(runs, key=lambda run: ([*SCRIPTS, run.script].index(run.script), run.script))


def below(folder, depth):
    """Yields a folder and its entries, but for hidden ones, parts of a run, and old runs."""
    yield folder
    for path in sorted(entries(folder)) if depth else ():
        left_out = path.name in PARTS or path.name.startswith(".") or OLD.search(path.name)
        if (path.is_dir() or packed(path)) and not left_out:
            yield from below(path, depth - 1)


def entries(folder):
    """Returns the paths in a folder, and those of the runs in its runs.json, here or elsewhere."""
    found = []
    with suppress(OSError):
        found += folder.iterdir()
    for name, run in read_json(folder, PACKED).items():
        found.append(Path(os.path.normpath(folder / (run if isinstance(run, str) else name))))
    return found


def is_run(path):
    """Returns whether a run of ours has logged in the folder, or has begun to."""
    known = packed(path) or (path / "metrics.jsonl").is_file()
    return bool(known) or bool(read_run(path))


def short_names(paths):
    """Returns a name for each path: its last part, with as many before it as tell them apart.

    >>> short_names([Path("a/ppo"), Path("b/ppo"), Path("b/sft")])
    ['a/ppo', 'b/ppo', 'b/sft']
    >>> short_names([Path("x/demo/sft"), Path("x/demo/ppo")])
    ['sft', 'ppo']
    """
    parts = [path.absolute().parts for path in paths]
    count = 1
    while len({part[-count:] for part in parts}) < len(parts):
        count += 1
    return ["/".join(part[-count:]) for part in parts]


# ---- Flags ----
def other_rates(run):
    """Returns in words which learning rates are not those of the run's preset, "" if all are."""
    preset = {}
    with suppress(KeyError, Refused):  # a script of somebody's own, or a preset
        preset = vars(SCRIPTS[run.script].get_args([f"--preset={run.args['preset']}"]))
    return ", ".join(
        f"{name} is {run.args[name]} (preset: {rate})"
        for name, rate in preset.items()
        if name.endswith("learning_rate") and rate and run.args.get(name, rate) != rate
    )


def differences(runs):
    """Returns [(runs of one step, [(flag, its value in each)])] of flags that are not all equal.

    Left out are OF_A_START, of which each run has its own, FACTS, and what one of the runs lacks:
    such a flag was added between the two, at its default.
    """
    found = []
    for _, own in itertools.groupby(runs, key=lambda run: run.script):
        own = [*own]
        shared = set.intersection(*(set(run.args) for run in own))
        shared -= OF_A_START | FACTS
        rows = [(flag, [json.dumps(run.args[flag]) for run in own]) for flag in sorted(shared)]
        if rows := [(flag, values) for flag, values in rows if len({*values}) > 1]:
            found.append((own, rows))
    return found
