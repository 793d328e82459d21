"""Reads what a run has left in its folder, finished, running or broken, for look.py."""

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import ppo
import reward
import sft
from machinery.base import records
from machinery.base.refused import Refused
from machinery.models import saving
from machinery.run import folder_lock, logs

ORDER = ("sft", "reward", "ppo")  # of the steps; other scripts follow
SCRIPTS = {"sft": sft, "reward": reward, "ppo": ppo}
TITLES = {"sft": "SFT", "reward": "Reward model", "ppo": "PPO"}
KNOWN_BY = {"eval_reward": "ppo", "eval_accuracy": "reward", "eval_perplexity": "sft"}
PARTS = ("ema", "critic", "best", "checkpoints")  # folders inside a run's own
ELSEWHERE = "runs.txt"  # names folders that belong to its own, a relative path a line
DEEPEST = 3  # folders below the one that is named
OLD = re.compile(r"\.old-\d+$")  # what --overwrite has moved aside
LARGEST = 1e100  # of a number that a picture can hold


@dataclass
class Run:
    """One run's folder, read. Lines of .jsonl files are dicts."""

    path: Path
    name: str
    script: str
    args: dict = field(default_factory=dict)  # args.json, {} if it cannot be read
    metrics: list = field(default_factory=list)
    samples: list = field(default_factory=list)  # of the first evaluation and of the last one
    tokens: list = field(default_factory=list)
    judged: list = field(default_factory=list)  # judge.jsonl
    limits: dict = field(default_factory=dict)  # {metric: the best that is possible}
    state: str = ""
    broken: dict = field(default_factory=dict)  # {file: lines that could not be read}
    found: dict = field(default_factory=dict)  # {metric: its series}, once it was asked for

    def series(self, name):
        """Returns the (step, value) of a metric; values that are no finite numbers are left out."""
        if name not in self.found:
            pairs = [(line["step"], line.get(name)) for line in self.metrics]
            self.found[name] = [(step, value) for step, value in pairs if is_number(value)]
        return self.found[name]

    def values(self, name):
        """Returns the values of a metric, in the order of the steps."""
        return [value for _, value in self.series(name)]

    def answers(self, last):
        """Returns the samples of the last evaluation, or of the first one."""
        steps = [line["step"] for line in self.samples]
        step = (max if last else min)(steps, default=None)
        return [line for line in self.samples if line["step"] == step]


def is_number(value):
    """Returns whether a value of a log is a number that can be drawn: finite, not huge."""
    return isinstance(value, (int, float)) and abs(value) < LARGEST


def is_value(value):
    """Returns whether a metric has this type: a number (NaN, too), or an interval."""
    if isinstance(value, list):
        return len(value) == 2 and all(map(is_number, value))
    return isinstance(value, (int, float))


# ---- Folders ----
def find(folders):
    """Returns the Runs in the folders, of each as deep as DEEPEST, in the order of the steps.

    Refuses a folder that is not there, or that holds no run.
    """
    found = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            words = f"{folder} is no folder.\n  Name the output folder of a run."
            raise Refused("no-folder", words)
        paths = [path for path in below(folder, DEEPEST) if is_run(path)]
        if not paths:
            why = "holds no run: no metrics.jsonl, and no args.json of ours"
            advice = "Name an --output_dir, or a folder of them."
            raise Refused("no-run", f"{folder} {why}.\n  {advice}")
        found |= {path.resolve(): path for path in paths}
    names = short_names([*found.values()])
    runs = [read(path, name) for path, name in zip(found.values(), names)]
    return sorted(runs, key=lambda run: [*ORDER, run.script].index(run.script))


def below(folder, depth):
    """Yields a folder and its entries, but for hidden ones, parts of a run, and old runs."""
    yield folder
    for path in sorted(entries(folder)) if depth else ():
        left_out = path.name in PARTS or path.name.startswith(".") or OLD.search(path.name)
        if path.is_dir() and not left_out:
            yield from below(path, depth - 1)


def entries(folder):
    """Returns the paths in a folder, and those elsewhere that its runs.txt names."""
    found = []
    with suppress(OSError):
        found += folder.iterdir()
        lines = (folder / ELSEWHERE).read_text(errors="replace").splitlines()
        found += [Path(os.path.normpath(folder / line)) for line in lines if line]
    return found


def is_run(path):
    """Returns whether a run of ours has logged in the folder, or has begun to."""
    return (path / "metrics.jsonl").is_file() or "data_fingerprint" in records.read(path)


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


def other_rates(run):
    """Returns in words which learning rates are not those of the run's preset, "" if all are."""
    preset = {}
    with suppress(KeyError, Refused):  # a script of somebody's own, or a preset
        preset = vars(SCRIPTS[run.script].get_args([f"--preset={run.args['preset']}"]))
    rates = {flag: x for flag, x in preset.items() if flag.endswith("learning_rate") and x}
    other = [name for name, value in rates.items() if run.args.get(name, value) != value]
    return ", ".join(f"{name} is {run.args[name]} (preset: {rates[name]})" for name in other)


# ---- One folder ----
def read(path, name):
    """Returns the Run in a folder. Lines that cannot be read are counted, and left out."""
    run = Run(path, name, "", records.read(path))
    lines = [line for line in lines_of(run, "metrics.jsonl") if has_step(run, line)]
    run.metrics = [{name: x for name, x in line.items() if is_value(x)} for line in lines]
    metrics = set().union(*run.metrics) if run.metrics else set()
    guessed = [script for metric, script in KNOWN_BY.items() if metric in metrics]
    run.script = str(run.args.get("script") or [*guessed, "run"][0])
    run.samples = ends(answers_in(run, "samples.jsonl"))
    run.tokens = [line for line in answers_in(run, "tokens.jsonl") if has_tokens(line)]
    pairs = lines_of(run, "judge.jsonl")
    sides = ("chosen_score", "rejected_score", "chosen_length", "rejected_length")
    run.judged = [pair for pair in pairs if all(is_number(pair.get(side)) for side in sides)]
    run.limits = limits_of(run)
    run.state = state_of(run)
    return run


def limits_of(run):
    """Returns {metric: the best that is possible}, of limits.json beside the data, if it is there.

    Such a file may be somebody else's: what does not fit is left out.
    """
    of_run = SimpleNamespace(script=run.script)
    known = logs.limits(SimpleNamespace(data_path=run.args.get("data_path"), declared=of_run))
    return {name: value for name, value in known.items() if is_number(value)}


def lines_of(run, name):
    """Yields the dicts in a .jsonl file of a run, and counts what is none in run.broken."""
    with suppress(OSError), open(run.path / name, errors="replace") as file:
        for text in file:
            line = None
            with suppress(ValueError, RecursionError):
                line = json.loads(text)
            if isinstance(line, dict):
                yield line
            elif text.strip():
                run.broken[name] = run.broken.get(name, 0) + 1


def has_step(run, line):
    """Returns whether a line of metrics.jsonl says its step; if not, it counts as broken."""
    if is_number(line.get("step")):
        return True
    run.broken["metrics.jsonl"] = run.broken.get("metrics.jsonl", 0) + 1
    return False


def answers_in(run, name):
    """Yields the lines of a file that hold a prompt and a response, as texts, and a step."""
    for line in lines_of(run, name):
        texts = isinstance(line.get("prompt"), str) and isinstance(line.get("response"), str)
        if texts and is_number(line.get("step")):
            yield line


def ends(lines):
    """Returns of many lines those of the first step, and of the last one so far."""
    first, last = [], []
    for line in lines:
        if not first or line["step"] == first[0]["step"]:
            first.append(line)
        elif not last or line["step"] == last[0]["step"]:
            last.append(line)
        elif line["step"] > last[0]["step"]:
            last = [line]
    return first + last


def has_tokens(line):
    """Returns whether a line of tokens.jsonl holds tokens, with lists of numbers as long."""
    tokens = line.get("tokens")
    texts = tokens.get("text") if isinstance(tokens, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return False
    return all(isinstance(row, list) and len(row) == len(texts) for row in tokens.values())


def state_of(run):
    """Returns in words whether a run is finished, running, or stopped, and where."""
    step = max((line["step"] for line in run.metrics), default=0)
    if who := folder_lock.Lock(run.path).holder():
        return f"running, at step {step} ({who})"
    if saving.is_whole(run.path):
        return f"finished, {step} steps"
    if any((run.path / "checkpoints").glob("step-*")):
        return f"stopped at step {step} of its log; --resume goes on"
    return f"saved no model; its log ends at step {step}"
