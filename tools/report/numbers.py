"""What look.py computes: how good the judge is, and which samples were gamed."""

import numpy
import pandas

from machinery import metrics
from tools.report.text import numbers_of

BINS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of the probability that the judge gives its choice
EACH = "_before", "_after"
NUMBERS = ["reward", "gold", "response_length", "kl"]  # of a sample


# ---- The judge ----
def table_of(lines):
    """Returns the pairs of judge.jsonl as a table, with three columns more.

    right: 1 if the chosen response has the higher score, 0.5 if scores are equal, else 0. said: the
    probability, 0.5 to 1, that the Bradley-Terry model gives the response with the higher score,
    sigmoid(its score - that of the other). longer: by how many tokens the chosen response is.
    """
    table = pandas.DataFrame(lines)
    margin = table.chosen_score.astype(float) - table.rejected_score
    said = 1 / (1 + numpy.exp(-margin.abs()))
    longer = table.chosen_length - table.rejected_length
    return table.assign(right=(numpy.sign(margin) + 1) / 2, said=said, longer=longer)


def shares(pairs, groups):
    """Returns for each group of pairs how often the judge was right (share, with its 95 % interval
    low to high, and the count of pairs), and what it said on average. No group is empty.
    """
    columns = {"share": ("right", "mean"), "count": ("right", "size"), "said": ("said", "mean")}
    table = pairs.groupby(groups, observed=True).agg(**columns)
    low, high = metrics.wilson_interval(table["share"], table["count"])
    return table.assign(low=low.clip(lower=0), high=high.clip(upper=1))


def calibration(pairs):
    """Returns shares() by what the judge said: if it says 0.7, is it right in 7 of 10 pairs?"""
    return shares(pairs, pandas.cut(pairs.said, BINS, include_lowest=True))


def by_length(pairs):
    """Returns shares() by how much longer the chosen response is; "3+": the median, or more."""
    sizes = sorted(pairs.longer[pairs.longer != 0].abs())
    much = sizes[len(sizes) // 2] if sizes else 1
    names = [f"{much}+ shorter", "shorter", "equal", "longer", f"{much}+ longer"]
    places = numpy.digitize(pairs.longer, [0.5 - much, -0.5, 0.5, much - 0.5])
    return shares(pairs, pandas.Categorical.from_codes(places, names))


def longer_wins(pairs):
    """Returns how often the longer response has the higher score (judge, low to high), and how
    often it is the chosen one, of the pairs whose lengths differ (count).
    """
    differ = pairs[pairs.longer != 0]
    longer, count = differ.longer > 0, len(differ)
    judge = differ.right.where(longer, 1 - differ.right).mean()
    low, high = metrics.wilson_interval(judge, max(count, 1))
    return {"judge": judge, "low": low, "high": high, "chosen": longer.mean(), "count": count}


# ---- Samples ----
def changes(before, after):
    """Returns a table of the prompts that were answered twice: both responses, and all numbers.

    before, after: lines of samples.jsonl. The names of what they hold end with _before or _after.
    gamed: the reward rose and the gold score fell, the sign of a judge that is exploited.
    """
    both = numbered(before).merge(numbered(after), on=["prompt", "nth"], suffixes=EACH)
    return both.assign(gamed=(rise(both, "reward") > 0) & (rise(both, "gold") < 0))


def numbered(lines):
    """Returns samples as a table; nth: of those with the same prompt."""
    table = pandas.DataFrame(map(numbers_of, lines), columns=NUMBERS, dtype=float)
    for name in ("prompt", "response"):  # objects: as pandas' own strings half a surrogate fails
        table[name] = pandas.Series([line[name] for line in lines], dtype=object)
    return table.assign(nth=table.groupby("prompt").cumcount())


def rise(rows, name):
    """Returns by how much a number rose in each row of `changes`."""
    return rows[f"{name}_after"] - rows[f"{name}_before"]


def ordered(rows):
    """Returns `changes` with the gamed ones first, those whose gold fell most at the top.

    Of equal falls the one whose reward rose most comes first. Rows without a reward come last, and
    else they stay in their order.
    """
    gold, reward = (rise(rows, name).where(rows.gamed, 0) for name in ("gold", "reward"))
    # lexsort sorts by its last key first
    return rows.iloc[numpy.lexsort([-reward, gold, ~rows.gamed, rows.reward_after.isna()])]
