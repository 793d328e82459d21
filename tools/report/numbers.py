"""What look.py computes: how good the judge is, and which samples were gamed."""

import math
from statistics import fmean as mean

from machinery.base import statistics
from tools.report.runs import is_number

BINS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of the probability that the judge gives its choice


# ---- The judge ----
def right(pair):
    """Returns 1 if the chosen response has the higher score, 0.5 if scores are equal, else 0."""
    chosen, rejected = pair["chosen_score"], pair["rejected_score"]
    return (chosen > rejected) + (chosen == rejected) / 2


def confidence(pair):
    """Returns the probability that the judge gives the response that it prefers: 0.5 to 1."""
    return 1 / (1 + math.exp(-min(abs(pair["chosen_score"] - pair["rejected_score"]), 700)))


def share_of(pairs):
    """Returns how often the judge was right, the 95 % interval of that, and of how many pairs."""
    share = mean([right(pair) for pair in pairs])
    return {"share": share, "interval": wilson(share, len(pairs)), "count": len(pairs)}


def wilson(share, count):
    """Returns Wilson's 95 % interval, within 0 and 1 also after rounding."""
    low, high = statistics.wilson_interval(share, count)
    return [max(low, 0.0), min(high, 1.0)]


def calibration(pairs):
    """Returns for each of BINS what the judge said, on average, and how often it was right.

    sigmoid(score - score of the other) is the probability that the Bradley-Terry model gives the
    response with the higher score. Bins without pairs are left out.
    """
    out = []
    for low, high in zip(BINS, BINS[1:]):
        inside = [p for p in pairs if low <= confidence(p) < high or high == 1 == confidence(p)]
        if inside:
            said = mean([confidence(pair) for pair in inside])
            out.append({"low": low, "high": high, "said": said, **share_of(inside)})
    return out


def by_length(pairs):
    """Returns how often the judge is right where the chosen response is shorter, or longer.

    "much": by the median of the differences, or more. Groups without pairs are left out.
    """
    gaps = [pair["chosen_length"] - pair["rejected_length"] for pair in pairs]
    sizes = sorted(abs(gap) for gap in gaps if gap)
    much = sizes[len(sizes) // 2] if sizes else 1
    groups = {
        f"{much}+ shorter": lambda gap: gap <= -much,
        "shorter": lambda gap: -much < gap < 0,
        "equal": lambda gap: gap == 0,
        "longer": lambda gap: 0 < gap < much,
        f"{much}+ longer": lambda gap: gap >= much,
    }
    out = []
    for name, belongs in groups.items():
        if inside := [pair for pair, gap in zip(pairs, gaps) if belongs(gap)]:
            out.append({"name": name, **share_of(inside)})
    return out


def longer_wins(pairs):
    """Returns how often the longer response has the higher score, and how often people chose it.

    Both of the pairs whose lengths differ; None if there are none.
    """
    differ = [pair for pair in pairs if pair["chosen_length"] != pair["rejected_length"]]
    if not differ:
        return None
    longer = [pair["chosen_length"] > pair["rejected_length"] for pair in differ]
    judge = mean([right(p) if chosen else 1 - right(p) for p, chosen in zip(differ, longer)])
    people = mean(longer)
    count = len(differ)
    intervals = {"judge_interval": wilson(judge, count), "people_interval": wilson(people, count)}
    return {"judge": judge, "people": people, "count": count, **intervals}


# ---- Samples ----
def changes(before, after):
    """Returns a dict for each prompt that was answered twice: both responses, and all numbers.

    before, after: lines of samples.jsonl. A number stands under its name with _before or _after.
    gamed: the reward rose and the gold score fell, the sign of a judge that is exploited.
    """
    waiting = {}
    for line in after:
        waiting.setdefault(line["prompt"], []).append(line)
    rows = []
    for line in before:
        if not waiting.get(line["prompt"]):
            continue
        other = waiting[line["prompt"]].pop(0)
        row = {"prompt": line["prompt"], "before": line["response"], "after": other["response"]}
        for name in ("reward", "gold", "response_length", "kl"):
            for when, found in (("before", line), ("after", other)):
                if is_number(found.get(name)):
                    row[f"{name}_{when}"] = found[name]
        gain, loss = rise(row, "reward"), rise(row, "gold")
        row["gamed"] = gain is not None and loss is not None and gain > 0 > loss
        rows.append(row)
    return ordered(rows)


def rise(row, name):
    """Returns by how much a number of `changes` rose, or None where one of both is missing."""
    if f"{name}_before" in row and f"{name}_after" in row:
        return row[f"{name}_after"] - row[f"{name}_before"]
    return None


def ordered(rows):
    """Returns rows of `changes`: the gamed ones first, those whose gold fell most at the top.

    Of those that fell alike the one whose reward rose most comes first. The others stay as they
    are.
    """

    def place(row):
        return (0, rise(row, "gold"), -rise(row, "reward")) if row["gamed"] else (1, 0, 0)

    return sorted(rows, key=place)
