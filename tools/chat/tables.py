"""The tables of talk.py: means, and how often a model is better than another."""

import pandas

from machinery import metrics

METRICS = ("reward", "gold", "response_length", "ended")
JUDGED = ("reward", "gold")  # of these, more is better


def win_rate(scores, others):
    """Returns in words how often a score is above its other one, and the 95 % interval of that.

        share = (wins + ties / 2) / pairs

    The interval is Wilson's (1927) for that share. A tie has no variance of its own, so with ties
    the interval is wider than need be, never narrower. scores, others: (pairs,)

    >>> win_rate(pandas.Series([1, 2, 3, 4]), [0, 2, 4, 3])  # a win, a tie, a loss, a win
    '0.625 [0.219, 0.908]'
    """
    share = ((scores > others) + (scores == others) / 2).mean()
    low, high = metrics.wilson_interval(share, len(scores))
    return f"{share:.3f} [{low:.3f}, {high:.3f}]"


def comparison(answers):
    """Returns the closing table as lines of text, one for each model.

    answers: (name of the model, its responses), the responses as a DataFrame: response and some of
    METRICS, in the order of the prompts. The first model is what the others are compared with.
    """
    lines, (_, first) = [], answers[0]
    for _, table in answers:
        line = table.filter(METRICS).mean().map("{:.3f}".format).to_dict()
        # Scored in another batch, with other padding, an equal response has another last digit.
        same = (table.response == first.response) & (table.ended == first.ended)
        for metric in table.filter(JUDGED):
            rate = win_rate(table[metric].mask(same, first[metric]), first[metric])
            line[f"wins by {metric} [95 % interval]"] = "(the first)" if table is first else rate
        lines.append(line)
    return pandas.DataFrame(lines, [name for name, _ in answers]).to_string().splitlines()


def scored(rows, subsets=()):
    """Returns what --score ends with: the mean score, and of pairs how often chosen is above.

    rows: dicts with score, or with chosen_score and rejected_score. subsets: the rows' own, where
    the data has them, as RewardBench does: then there is a line for each.
    """
    table = pandas.DataFrame(rows)
    means = table.mean().items()
    lines = [f"{name:15} mean {mean:8.3f}   of {len(rows)}" for name, mean in means]
    if "chosen_score" in table:
        for name, part in [("", table), *(table.groupby(subsets) if subsets else ())]:
            rate = win_rate(part.chosen_score, part.rejected_score)
            which = f", subset {name}, {len(part)} pairs" if name else ""
            lines.append(f"chosen is above {rate} (95 % interval){which}")
    return lines
