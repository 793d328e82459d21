"""The tables of talk.py: means, and how often a model is better than another."""

from statistics import fmean as mean

from machinery.base import statistics

METRICS = ("reward", "gold", "response_length", "ended")
JUDGED = ("reward", "gold")  # of these, more is better


def win_rate(pairs):
    """Returns how often the first score of a pair is above the second, and its 95 % interval.

        share = (wins + ties / 2) / pairs

    The interval is Wilson's (1927) for that share. A tie has no variance of its own, so with ties
    the interval is wider than need be, never narrower.

    >>> win_rate([(1, 0), (2, 2), (3, 4), (4, 3)])[0]  # a win, a tie, a loss, a win
    0.625
    """
    share = mean((a > b) + (a == b) / 2 for a, b in pairs)
    return share, statistics.wilson_interval(share, len(pairs))


def against(rows, first, metric):
    """Returns the (score, score of the first model) of each prompt; equal texts have equal scores.

    A response that is scored in another batch, with other padding, differs in the last digit.
    """
    pairs = []
    for row, other in zip(rows, first, strict=True):
        same = row["text"] == other["text"] and row["ended"] == other["ended"]
        pairs.append((other[metric] if same else row[metric], other[metric]))
    return pairs


def comparison(answers):
    """Returns the closing table as lines of text, one for each model.

    answers: {model: responses}, dicts with text and some of METRICS, in the order of the prompts.
    """
    first_name, first = next(iter(answers.items()))
    held = [name for name in METRICS if name in first[0]]
    judged = [name for name in JUDGED if name in held]
    table = [["model", *held, *(f"wins by {name} [95 % interval]" for name in judged)]]
    for name, rows in answers.items():
        line = [name, *(f"{mean(row[metric] for row in rows):.3f}" for metric in held)]
        for metric in judged:
            share, (low, high) = win_rate(against(rows, first, metric))
            found = f"{share:.3f} [{low:.3f}, {high:.3f}]"
            line.append("(the first)" if name == first_name else found)
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
    if pairs := [tuple(row.values()) for row in rows if "chosen_score" in row]:
        share, (low, high) = win_rate(pairs)
        lines.append(f"chosen is above {share:.3f} [{low:.3f}, {high:.3f}] (95 % interval)")
    return lines
