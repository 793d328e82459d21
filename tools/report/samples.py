"""The texts of look.py's page: single tokens, how good the judge is, and the samples."""

import itertools
from collections import Counter

import numpy
import pandas

from tools.report import numbers, pictures
from tools.report.text import cut, is_number, rounded, visible

TOKENS = 9_000  # of all runs' responses together that the page holds
ROWS = 400  # of the table of samples


# ---- Tokens ----
def microscope(runs):
    """Returns the data of the token microscope for page.js, or None if no run has any."""
    held = [run for run in runs if run.tokens]
    found = []
    for run in held:
        about = visible(f"--advantage {run.args.get('advantage', 'gae')}")
        lines = [short(line) for line in bounded(run.tokens, TOKENS // len(held))]
        found.append({"name": run.name, "about": about, "lines": lines})
    return {"runs": found} if found else None


def bounded(lines, most):
    """Returns lines of tokens.jsonl for the page: evenly spread evaluations, of few tokens.

    Each has at least its first response, and the first and the last evaluation are among them.
    """
    sizes, used, out = Counter(), Counter(), []
    for line in lines:
        sizes[line["step"]] += len(line["tokens"]["text"])
    count = min(len(sizes), max(2, most // max(1, *sizes.values())))
    places = numpy.linspace(0, len(sizes) - 1, count).round().astype(int)
    kept = {sorted(sizes)[place] for place in places}
    for line in sorted(lines, key=lambda line: line["step"]):
        step, size = line["step"], len(line["tokens"]["text"])
        if step in kept and (not used[step] or used[step] + size <= most / len(kept)):
            used[step] += size
            out.append(line)
    return out


def short(line):
    """Returns a line of tokens.jsonl with fewer digits, and with texts that can be shown."""
    tokens = {name: rounded(values) for name, values in line["tokens"].items()}
    tokens["text"] = [visible(text) for text in line["tokens"]["text"]]
    names = ("step", "sample", "reward", "gold", "kl", "kl_coef", "ended")
    own = {name: line[name] for name in names if is_number(line.get(name))}
    return {**own, "prompt": cut(visible(line["prompt"])), "tokens": tokens}


# ---- The judge ----
def judge(run):
    """Returns the pictures of a reward model, with the numbers that page.html puts into words."""
    pairs = numbers.table_of(run.judged)
    bins, lengths = numbers.calibration(pairs), numbers.by_length(pairs)
    off = {"over": sum(bins.high < bins.said), "under": sum(bins.low > bins.said)}
    said = "what it said: P(its choice)"
    longer = "tokens that the chosen response is shorter or longer"
    return [
        pictures.histogram(pairs),
        pictures.shares("calibration", said, bins, bins["said"], bins=len(bins), **off),
        pictures.shares("accuracy by length", longer, lengths, **numbers.longer_wins(pairs)),
    ]


# ---- Samples ----
def tables(runs):
    """Returns the tables of the samples: each run before and after; then two runs side by side."""
    own, found = [], []
    for run in runs:
        before, after = run.answers(last=False), run.answers(last=True)
        if before and before[0]["step"] != after[0]["step"]:
            own.append(numbers.changes(before, after).assign(run=run.name))
    if own:
        found.append(table(["before", "after"], pandas.concat(own)))
    for _, group in itertools.groupby(runs, key=lambda run: run.script):
        first, *others = [run for run in group if run.samples] or [None]
        for other in others:
            rows = numbers.changes(first.answers(last=True), other.answers(last=True))
            rows = rows.assign(run="", alike=rows.response_before == rows.response_after)
            rows = rows.sort_values("alike", kind="stable")
            if len(rows):
                found.append(table([first.name, other.name], rows, differ=sum(~rows.alike)))
    return found


def table(names, rows, differ=None):
    """Returns a table of samples for page.html: of more than ROWS those that come first.

    differ: of two runs, how many responses are not the same.
    """
    rows = numbers.ordered(rows)
    scored, shown = rows[rows.reward_after.notna()], rows[:ROWS]
    graded = scored.gold_after.notna().any()
    return {
        "names": names,
        "numbers": [name for name in numbers.NUMBERS if shown[f"{name}_after"].notna().any()],
        "rows": shown.to_dict("records"),
        "count": len(rows),
        "differ": differ,
        "scored": len(scored),
        "gamed": sum(scored.gamed) if graded else None,
    }
