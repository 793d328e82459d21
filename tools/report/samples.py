"""The texts of look.py's page: single tokens, how good the judge is, and the samples."""

import itertools
from collections import Counter

import numpy
import pandas

from machinery.base import statistics
from tools.report import numbers, pictures
from tools.report.text import cut, is_number, rounded, visible

TOKENS = 9_000  # of all runs' responses together that the page holds
ROWS = 400  # of the table of samples
GAMED = "gamed", "were gamed: reward rose and gold fell"
FOOLED = "reward higher, gold lower", "have a higher reward and a lower gold score"


# ---- Tokens ----
def microscope(runs):
    """Returns the data of the token microscope for page.js, or None if no run has any."""
    held = [run for run in runs if run.tokens]
    found = []
    for run in held:
        about = visible(f"--advantage {run.args.get('advantage', 'gae')}")
        lines = [short(line) for line in bounded(run.tokens, TOKENS // len(held))]
        found.append({"name": run.name, "about": about, "lines": lines})
    return found and {"runs": found}


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
    """Returns the pictures of a reward model: each a dict of title, svg, words."""
    pairs = numbers.table_of(run.judged)
    bins, lengths = numbers.calibration(pairs), numbers.by_length(pairs)
    said = "what it said: P(its choice)"
    longer = "tokens that the chosen response is shorter or longer"
    return [
        pictures.histogram("scores", "score", pairs, "The further apart, the easier."),
        pictures.shares("calibration", said, bins, calibrated(bins), bins["said"]),
        pictures.shares("accuracy by length", longer, lengths, prefers_longer(pairs)),
    ]


def calibrated(bins):
    """Returns in words whether the judge is as sure as it may be."""
    over, under = sum(bins.high < bins.said), sum(bins.low > bins.said)
    if not over and not under:
        return "On the dashed line within the intervals: as sure as it may be."
    found = ((over, "it is surer than it is right"), (under, "it could be surer"))
    said = "; ".join(f"in {count} of {len(bins)} bins {words}" for count, words in found if count)
    return f"Off the dashed line by more than chance: {said}."


def prefers_longer(pairs):
    """Returns in words whether the judge just prefers what is longer."""
    judge, chosen, count = numbers.longer_wins(pairs)
    if not count:
        return "All pairs have equal lengths."
    low, high = statistics.wilson_interval(judge, count)
    leans = "long" if low > chosen else "short" if high < chosen else ""
    return (
        f"The longer response has the higher score in {100 * judge:.0f} % of {count} pairs "
        f"[{100 * low:.0f}, {100 * high:.0f}], and is the chosen one in {100 * chosen:.0f} %: "
        + (f"it leans to {leans} responses." if leans else "no more than that.")
    )


# ---- Samples ----
def tables(runs):
    """Returns the tables of the samples: each run before and after; then two runs side by side.

    A table is a dict of title, words, heads (of the first three columns), numbers (their names),
    rows (numbers.changes, with the name of the run), and sign: what a gamed row is called.
    """
    own, found = [], []
    for run in runs:
        before, after = run.answers(last=False), run.answers(last=True)
        if before and before[0]["step"] != after[0]["step"]:
            own.append(numbers.changes(before, after).assign(run=run.name))
    if own:
        words = "The same held-out prompts at the first evaluation and at the last one."
        found = [table("Before and after", words, ["before", "after"], GAMED, pandas.concat(own))]
    for _, group in itertools.groupby(runs, key=lambda run: run.script):
        first, *others = [run for run in group if run.samples] or [None]
        for other in others:
            rows = numbers.changes(first.answers(last=True), other.answers(last=True))
            rows = rows.assign(run="", alike=rows.response_before == rows.response_after)
            rows = rows.sort_values("alike", kind="stable")
            words = "The same held-out prompts at the last evaluations of both runs: "
            words += f"{sum(~rows.alike)} of {len(rows)} responses differ. These come first."
            names = [first.name, other.name]
            found += [table(" and ".join(names), words, names, FOOLED, rows)] if len(rows) else []
    return found


def table(title, words, names, sign, rows):
    """Returns a table of samples: gamed ones first, of more than ROWS those with scores."""
    rows = numbers.ordered(rows)
    scored = rows[rows.reward_after.notna()]
    if scored.gold_after.notna().any():
        words += f" Of {len(scored)} scored responses {sum(scored.gamed)} {sign[1]}."
    words += f" Shown are {ROWS} of {len(rows)}." if len(rows) > ROWS else ""
    shown = rows[:ROWS]
    held = [name for name in numbers.NUMBERS if shown[f"{name}_after"].notna().any()]
    rows = shown.to_dict("records")
    heads = ["prompt", *names]
    return dict(title=title, words=words, heads=heads, numbers=held, rows=rows, sign=sign[0])
