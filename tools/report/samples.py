"""The texts of look.py's page: single tokens, how good the judge is, and the samples."""

from tools.report import numbers, pictures
from tools.report.runs import is_number
from tools.report.text import cut, visible

TOKENS = 9_000  # of all runs' responses together that the page holds
ROWS = 400  # of the table of samples
NUMBERS = ("reward", "gold", "response_length", "kl")  # of a sample
MEASURES = {  # (title, what its colours say), in tokens.jsonl
    "advantage": (
        "advantage",
        "Was this token better (orange) or worse (blue) than expected? What the update makes more "
        "likely, or less; before whitening.",
    ),
    "kl_k3": ("KL", "How far from the reference's is the probability of this token? k3, never < 0"),
    "reward": ("reward", "Minus kl_coef times KL on every token; on the last one also the score."),
    "value": ("value", "The critic's guess, before this token, of the reward still to come."),
    "return": ("return", "What the critic is to learn: advantage plus value."),
    "entropy": ("entropy", "How many ways to go on were open here, in nats."),
    "kl": (
        "log-prob ratio",
        "log-prob minus the reference's: orange is likelier than before training. k1, the KL that "
        "the reward pays for by default.",
    ),
}


# ---- Tokens ----
def microscope(runs):
    """Returns the data of the token microscope for page.js, or None if no run has any."""
    held = [run for run in runs if run.tokens]
    if not held:
        return None
    data = {"runs": [], "measures": {key: list(texts) for key, texts in MEASURES.items()}}
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
        {**pictures.histogram("scores", "score", scores), "words": "Far apart: easy pairs."},
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
def samples(runs):
    """Returns the table of the samples before and after, gamed ones first; None without any.

    A dict of rows (numbers.changes, with the name of the run), numbers (their names), and words.
    """
    rows = []
    for run in runs:
        before, after = run.answers(last=False), run.answers(last=True)
        if before and before[0]["step"] != after[0]["step"]:
            rows += [{**row, "run": run.name} for row in numbers.changes(before, after)]
    if not rows:
        return None
    rows = numbers.ordered(rows)
    scored = [row for row in rows if "reward_after" in row]
    shown = (scored + [row for row in rows if "reward_after" not in row])[:ROWS]
    words = "The same held-out prompts at the first evaluation and at the last one."
    if any("gold_after" in row for row in scored):
        gamed = sum(row["gamed"] for row in scored)
        count = f"Of {len(scored)} scored responses {gamed} were gamed"
        words += f" {count}: reward rose and gold fell."
    words += f" Shown are {len(shown)} of {len(rows)}." if len(rows) > len(shown) else ""
    names = [name for name in NUMBERS if any(f"{name}_after" in row for row in shown)]
    return {"rows": shown, "numbers": names, "words": words}
