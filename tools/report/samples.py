"""The texts of look.py's page: single tokens, how good the judge is, and the samples."""

from tools.report import numbers, pictures
from tools.report.runs import is_number
from tools.report.text import cut, visible

TOKENS = 9_000  # of all runs' responses together that the page holds
ROWS = 400  # of the table of samples
NUMBERS = ("reward", "gold", "response_length", "kl")  # of a sample
GAMED = "gamed", "were gamed: reward rose and gold fell"
FOOLED = "reward higher, gold lower", "have a higher reward and a lower gold score"


# ---- Tokens ----
def microscope(runs):
    """Returns the data of the token microscope for page.js, or None if no run has any."""
    held = [run for run in runs if run.tokens]
    if not held:
        return None
    data = {"runs": []}
    for run in held:
        lines = bounded(run.tokens, TOKENS // len(held))
        about = visible(f"--advantage {run.args.get('advantage', 'gae')}")
        data["runs"].append({"name": visible(run.name), "about": about, "lines": lines})
    return data


def bounded(lines, most):
    """Returns lines of tokens.jsonl for the page: evenly spread evaluations, of few tokens.

    Each has at least the first response of the first and the last evaluation.
    """
    steps = sorted({line["step"] for line in lines})
    size = {step: 0 for step in steps}
    for line in lines:
        size[line["step"]] += len(line["tokens"]["text"])
    count = max(2, int(most / max(max(size.values()), 1)))
    kept = {*steps[:: -(-len(steps) // count)], steps[-1]}
    out, used = [], 0
    order = sorted(kept, key=lambda step: (step not in (steps[0], steps[-1]), step))
    for step in order:
        here = [line for line in lines if line["step"] == step]
        for place, line in enumerate(here):
            used += len(line["tokens"]["text"])
            if used <= most or (place == 0 and step in (steps[0], steps[-1])):
                out.append(short(line))
    return sorted(out, key=lambda line: line["step"])


def short(line):
    """Returns a line of tokens.jsonl with fewer digits, and with texts that can be shown."""
    tokens = {"text": [visible(text) for text in line["tokens"]["text"]]}
    for name, values in line["tokens"].items():
        if name != "text":
            rounded = (float(f"{x:.5g}") if is_number(x) else None for x in values)
            tokens[name] = list(rounded)
    names = ("step", "sample", "reward", "gold", "kl", "kl_coef", "ended")
    own = {name: line[name] for name in names if is_number(line.get(name))}
    return {**own, "prompt": cut(visible(line["prompt"])), "tokens": tokens}


# ---- The judge ----
def judge(run):
    """Returns the pictures of a reward model: each a dict of title, svg, words."""
    pairs = run.judged
    scores = {side: [pair[f"{side}_score"] for pair in pairs] for side in ("chosen", "rejected")}
    bins = numbers.calibration(pairs)
    groups = numbers.by_length(pairs)
    said = "what it said: P(its choice)"
    longer = "tokens that the chosen response is shorter or longer"
    return [
        {
            **pictures.histogram("scores", "score", scores),
            "words": "The further apart, the easier.",
        },
        {**pictures.shares("calibration", said, bins, diagonal=True), "words": calibrated(bins)},
        {**pictures.shares("accuracy by length", longer, groups), "words": prefers_longer(pairs)},
    ]


def calibrated(bins):
    """Returns in words whether the judge is as sure as it may be."""
    over = sum(one["interval"][1] < one["said"] for one in bins)
    under = sum(one["interval"][0] > one["said"] for one in bins)
    if not over and not under:
        return "On the dashed line within the intervals: as sure as it may be."
    found = ((over, "it is surer than it is right"), (under, "it could be surer"))
    said = "; ".join(f"in {count} of {len(bins)} bins {words}" for count, words in found if count)
    return f"Off the dashed line by more than chance: {said}."


def prefers_longer(pairs):
    """Returns in words whether the judge just prefers what is longer."""
    found = numbers.longer_wins(pairs)
    if not found:
        return "All pairs have equal lengths."
    low, high = found["judge_interval"]
    said = f"The longer response has the higher score in {100 * found['judge']:.0f} % of "
    said += f"{found['count']} pairs [{100 * low:.0f}, {100 * high:.0f}], and people chose it in "
    said += f"{100 * found['people']:.0f} %: "
    if low > found["people"]:
        return f"{said}it leans to long responses."
    if high < found["people"]:
        return f"{said}it leans to short responses."
    return f"{said}no more than they do."


# ---- Samples ----
def tables(runs):
    """Returns the tables of the samples: each run before and after; then two runs side by side.

    A table is a dict of title, words, heads (of the first three columns), numbers (their names),
    rows (numbers.changes, with the name of the run), and sign: what a gamed row is called.
    """
    own = []
    for run in runs:
        before, after = run.answers(last=False), run.answers(last=True)
        if before and before[0]["step"] != after[0]["step"]:
            own += [{**row, "run": run.name} for row in numbers.changes(before, after)]
    words = "The same held-out prompts at the first evaluation and at the last one."
    found = [table("Before and after", words, ["before", "after"], GAMED, own)] if own else []
    for script in dict.fromkeys(run.script for run in runs):
        first, *others = [run for run in runs if run.script == script and run.samples] or [None]
        for other in others:
            rows = numbers.changes(first.answers(last=True), other.answers(last=True))
            rows = [{**row, "run": ""} for row in rows]
            names = [first.name, other.name]
            differ = sum(row["before"] != row["after"] for row in rows)
            words = f"The same held-out prompts at the last evaluations of both runs: {differ} of "
            words += f"{len(rows)} responses differ. These come first."
            rows.sort(key=lambda row: row["before"] == row["after"])
            found += [table(" and ".join(names), words, names, FOOLED, rows)] if rows else []
    return found


def table(title, words, names, sign, rows):
    """Returns a table of samples: gamed ones first, of more than ROWS those with scores."""
    rows = numbers.ordered(rows)
    scored = [row for row in rows if "reward_after" in row]
    shown = (scored + [row for row in rows if "reward_after" not in row])[:ROWS]
    if any("gold_after" in row for row in scored):
        gamed = sum(row["gamed"] for row in scored)
        words += f" Of {len(scored)} scored responses {gamed} {sign[1]}."
    words += f" Shown are {len(shown)} of {len(rows)}." if len(rows) > len(shown) else ""
    held = [name for name in NUMBERS if any(f"{name}_after" in row for row in shown)]
    heads = ["prompt", *names]
    return dict(title=title, words=words, heads=heads, numbers=held, rows=shown, sign=sign[0])
