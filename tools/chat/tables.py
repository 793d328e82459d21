"""The tables of talk.py: means, and how often a model is better than another."""

from machinery.base import statistics

METRICS = ("reward", "gold", "response_length", "ended")
JUDGED = ("reward", "gold")  # of these, more is better


def win_rate(scores, first):
    """Returns how often scores are above `first`, prompt by prompt, and the 95 % interval of that.

        share = (wins + ties / 2) / prompts

    The interval is Wilson's (1927) for that share. A tie has no variance of its own, so with ties
    the interval is wider than need be, never narrower.

    >>> win_rate([1, 2, 3, 4], [0, 2, 4, 3])[0]  # a win, a tie, a loss, a win
    0.625
    """
    wins = sum((a > b) + (a == b) / 2 for a, b in zip(scores, first, strict=True))
    share = wins / len(scores)
    return share, statistics.wilson_interval(share, len(scores))


def mean(values):
    """Returns the mean of some numbers."""
    return sum(values) / len(values)


def comparison(answers):
    """Returns the closing table as lines of text, one for each model.

    answers: {model: responses}, dicts with some of METRICS, in the order of the prompts.
    """
    names = list(answers)
    held = [name for name in METRICS if name in answers[names[0]][0]]
    judged = [name for name in JUDGED if name in held]
    wins = [f"wins by {name} [95 % interval]" for name in judged]
    table = [["model", *held, *wins]]
    columns = {name: {m: [row[m] for row in answers[name]] for m in held} for name in names}
    for name in names:
        line = [name, *(f"{mean(columns[name][metric]):.3f}" for metric in held)]
        for metric in judged:
            share, (low, high) = win_rate(columns[name][metric], columns[names[0]][metric])
            found = f"{share:.3f} [{low:.3f}, {high:.3f}]"
            line.append("(the first)" if name == names[0] else found)
        table.append(line)
    return aligned(table)


def aligned(table):
    """Returns the rows of a table (lists of texts) as lines; all but the first column end flush."""
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = []
    for first, *others in table:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:])]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return lines


def scored(rows):
    """Returns what --score ends with: the mean score, and of pairs how often chosen is above.

    rows: dicts with score, or with chosen_score and rejected_score.
    """
    lines = []
    for name in ("score", "chosen_score", "rejected_score"):
        if values := [row[name] for row in rows if name in row]:
            lines.append(f"{name:15} mean {mean(values):8.3f}   of {len(values)}")
    pairs = [row for row in rows if "chosen_score" in row]
    if pairs:
        sides = [[row[f"{side}_score"] for row in pairs] for side in ("chosen", "rejected")]
        share, (low, high) = win_rate(*sides)
        lines.append(f"chosen is above {share:.3f} [{low:.3f}, {high:.3f}] (95 % interval)")
    return lines
