"""Draws look.py's pictures as SVG: the curves of curves.png, and what the judge's scores show."""

import io
import itertools

import matplotlib
import numpy
import pandas
from markupsafe import Markup
from matplotlib.figure import Figure

from machinery.run import plots
from tools.report.text import visible

POINTS = 300  # of a curve that are drawn
PARTS = 10  # of a run: the bold curve is a mean over about one of them
FOLDED = ("perplexity", "TFLOP/s", "learning rate", "deviation of the advantages")  # under "more"
GROUPS = {
    "learning": "Does it get better at what it is trained for?",
    "stability": "Is the training still sound?",
    "cost": "What does a step take?",
    "others": "Further metrics.",
}
GRAY = "#808080"  # is read on a light ground and on a dark one
GRAY_PARTS = """axes.edgecolor axes.labelcolor axes.titlecolor text.color xtick.color
                ytick.color""".split()
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 8,
    "legend.framealpha": 0,
    **dict.fromkeys(GRAY_PARTS, GRAY),
}
CURVES = {  # of each kind what is drawn, and how
    "line": {"values": {}},
    "bold": {"values": {"alpha": 0.4, "linewidth": 0.8}, "smooth": {"linewidth": 1.8}},
    "dots": {"values": {"marker": "o", "linestyle": "--"}},
}
UNITS = {  # of the panels whose title does not end with it
    "pass@k": "share of the prompts",
    "accuracy": "share of the pairs",
    "sft: loss": "nats a token",
    "reward: loss": "nats a pair",
    "perplexity": "exp of the loss",
    "critic: explained variance": "share of the variance",
    "KL penalty": "score a nat",
    "tokens/s": "all devices",
    "TFLOP/s": "a device",
    "reward, gold": "no unit",
    "scores of chosen, rejected": "no unit",
}
UNSAID = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # of a file's metadata


def svg(title, draw):
    """Returns a dict of the title of a picture, and of the SVG that draw(axis) makes.

    span: where the axis begins and ends, as shares of the width, and the numbers there.
    """
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(4, 2.3), layout="constrained")
        axis = figure.subplots()
        draw(axis)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=UNSAID)
    text, place = file.getvalue(), axis.get_position()
    span = [place.x0, place.x1, *axis.get_xlim()]
    return {"title": title, "svg": Markup(text[text.index("<svg") :]), "span": span}


# ---- Curves ----
def curves(runs):
    """Returns [(group, words, pictures, folded pictures)]: the runs over each other."""
    panels = {group: {} for group in GROUPS}
    for place, run in enumerate(runs):
        for group, own in plots.panels_of(table_of(run)).items():
            for title, table in own:
                if title == "loss":  # those of two steps have nothing to do with each other
                    title = f"{run.script}: loss"
                panels[group].setdefault(title, []).append((place, table))
    out = []
    identifiers = itertools.count()
    for group, held in panels.items():
        first, folded = [], []
        for title, tables in held.items():
            drawn = folded if title in FOLDED else first
            said, unit = with_unit(title) if group != "others" else (title, "")
            for name, part in one_metric_each(said, tables):
                drawn.append({**panel(runs, name, part, identifiers), "unit": unit})
        if first or folded:
            out.append((group, GROUPS[group], first, folded))
    return out


def with_unit(title):
    """Returns a panel's title without its unit, and the unit.

    >>> with_unit("entropy, nats a token")
    ('entropy', 'nats a token')
    """
    if title in UNITS:
        return title, UNITS[title]
    name, comma, unit = title.rpartition(", ")
    return (name, unit) if comma else (title, "no unit")


def one_metric_each(title, tables):
    """Returns [(title, tables)]: where runs lie over each other, a panel for each metric."""
    metrics = {name.removeprefix("eval_") for _, table in tables for name in table}
    if len(tables) == 1 or len(metrics) == 1:
        return [(title, tables)]
    out = []
    for metric in sorted(metrics):
        both = {metric, f"eval_{metric}"}
        own = [(place, table[[n for n in table if n in both]]) for place, table in tables]
        out.append((metric, [(place, table) for place, table in own if len(table.columns)]))
    return out


def table_of(run):
    """Returns a run's metrics as a table by step, without those that do not change."""
    table = {}
    for name in dict.fromkeys(itertools.chain(*run.metrics)):
        values = pandas.Series(dict(run.series(name)), dtype=float)
        changes = len(values) == 1 or (len(values) and not plots.is_noise(name, values))
        if changes and name not in ("step", *plots.LEFT_OUT):
            table[visible(name)] = values
    return pandas.DataFrame(table)


def panel(runs, title, tables, identifiers):
    """Returns one picture. tables: [(place of a run, its metrics of this panel)].

    Colours are those of the metrics, or of the runs if there are several here. The identifier of a
    curve begins with the place of its run, so that the page can hide it. A limit has no run.
    """
    held = []
    limits = {}
    for place, table in tables:
        colours = {}
        for names in alike(table):
            own = names[0].removeprefix("eval_")
            number = place if len(tables) > 1 else colours.setdefault(own, len(colours))
            run = f"{runs[place].name}: " if len(tables) > 1 else ""
            limits |= {x: None for n in names if (x := runs[place].limits.get(n)) is not None}
            held.append({"run": place, "name": run + " = ".join(names), "colour": f"C{number}"})
            held[-1] |= points_of(table[names[0]].dropna(), names[0].startswith("eval_"))

    def draw(axis):
        for curve in held:
            for kind, style in CURVES[curve["kind"]].items():
                identifier = f"run{curve['run']}.{next(identifiers)}"
                steps, values, colour = curve["steps"], curve[kind], curve["colour"]
                axis.plot(steps, values, color=colour, gid=identifier, **style)
        for limit in limits:
            axis.axhline(limit, linestyle=":", color=GRAY)
        axis.set_xlabel("step")

    picture = svg(title, draw)
    for curve in held:
        curve["colour"] = matplotlib.colors.to_hex(curve["colour"])
    last = max(curve["steps"][-1] for curve in held)
    return {**picture, "curves": held, "limits": [*limits], "last": last}


def alike(table):
    """Returns the names of a table's metrics in lists; those of one list have equal values."""
    out = []
    for name in table:
        for names in out:
            if numpy.allclose(table[names[0]], table[name], rtol=1e-4, equal_nan=True):
                names.append(name)
                break
        else:
            out.append([name])
    return out


def points_of(values, held_out):
    """Returns what is drawn of a metric, and what the page says of it: few points, few digits."""
    shown = thinned(values)
    kind = "dots" if held_out or len(values) == 1 else "bold" if len(values) > PARTS else "line"
    smooth = smoothed(values)[shown.index] if kind == "bold" else ()
    short = [[float(f"{x:.5g}") for x in numbers] for numbers in (shown, smooth)]
    steps = [float(f"{step:.9g}") for step in shown.index]
    return {"kind": kind, "steps": steps, "values": short[0], "smooth": short[1]}


def thinned(values):
    """Returns about POINTS of a metric's values: the extremes of each part, and the last one.

    So a single step that went wrong is seen in a run of any length, and so is where it ends.
    """
    if len(values) <= POINTS:
        return values
    parts = values.groupby(numpy.arange(len(values)) // -(-2 * len(values) // POINTS))
    return values[sorted({*parts.idxmin(), *parts.idxmax(), values.index[-1]})]


def smoothed(values):
    """Returns an exponential mean of the values so far, without a bias towards the start.

        s_t = sum over k of weight^k x_{t-k}  /  sum over k of weight^k

    The weight is 0 up to PARTS values, and then such that it reaches over a part of the run.
    """
    return values.ewm(alpha=min(1, PARTS / len(values))).mean()


# ---- The judge ----
def histogram(title, label, groups):
    """Returns a picture of histograms over each other. groups: {name: values}."""

    def draw(axis):
        names, values = zip(*groups.items())
        axis.hist(values, bins=24, histtype="stepfilled", alpha=0.5, label=names)
        axis.set(xlabel=label, ylabel="pairs")
        axis.legend()

    return svg(title, draw)


def shares(title, label, groups, diagonal=False):
    """Returns a picture of shares with their intervals.

    groups: dicts of share, interval, count, and x (with `diagonal`: what is expected) or name.
    """

    def draw(axis):
        places = range(len(groups))
        xs = [group["said"] for group in groups] if diagonal else places
        for x, group in zip(xs, groups):
            low, high = group["interval"]
            axis.plot([x, x], [low, high], "C0")
            axis.plot([x], [group["share"]], "C0o")
            beside = {"xytext": (5, 0), "textcoords": "offset points"}
            axis.annotate(f"of {group['count']}", (x, group["share"]), **beside)
        if diagonal:
            axis.plot([0.5, 1], [0.5, 1], "--", color=GRAY)
        else:
            axis.axhline(0.5, linestyle="--", color=GRAY)
            axis.set_xticks(places, [group["name"] for group in groups])
        axis.set(xlabel=label, ylabel="share that it judged right")

    return svg(title, draw)
