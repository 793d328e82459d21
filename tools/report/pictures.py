"""Draws look.py's pictures as SVG: the curves of curves.png, and what the judge's scores show."""

import io
import itertools

import matplotlib
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
UNSAID = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # of a file's metadata


def svg(title, draw):
    """Returns a dict of the title of a picture, and of the SVG that draw(axis) makes."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(4.6, 2.6), layout="constrained")
        draw(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=UNSAID)
    text = file.getvalue()
    return {"title": title, "svg": Markup(text[text.index("<svg") :])}


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
            for name, part in one_metric_each(title, tables):
                drawn.append(panel(runs, name, part, identifiers))
        if first or folded:
            out.append((group, GROUPS[group], first, folded))
    return out


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
            table[label_of(name)] = values
    return pandas.DataFrame(table)


def label_of(name):
    """Returns a name as matplotlib writes it: a dollar sign would begin a formula."""
    return visible(name).replace("$", r"\$")


def panel(runs, title, tables, identifiers):
    """Returns one picture. tables: [(place of a run, its metrics of this panel)].

    Colours are those of the metrics, or of the runs if there are several here. The identifier of a
    curve begins with the place of its run, so that the page can hide it.
    """

    def draw(axis):
        for place, table in tables:
            drawn = len(axis.lines)
            shown = pandas.DataFrame({name: thinned(table[name]) for name in table})
            plots.draw_panel(axis, title, shown, runs[place].limits)
            for line in axis.lines[drawn:]:
                name = line.get_label()
                if name in table and len(tables) > 1:
                    line.set_label(f"{label_of(runs[place].name)}: {name}")
                    line.set_color(f"C{place}")
                if name in table and not name.startswith("eval_"):
                    add_smoothed(axis, line, table[name].dropna())
            for line in axis.lines[drawn:]:
                line.set_gid(f"run{place}.{next(identifiers)}")
        if min(table.min().min() for _, table in tables) <= 0:
            axis.set_yscale("linear")
        named = dict(zip(*axis.get_legend_handles_labels()[::-1]))  # a limit once
        axis.legend(named.values(), named.keys(), fontsize="x-small")
        axis.set_title("")

    return svg(title, draw)


def thinned(values):
    """Returns at most about POINTS of a metric's values, evenly spread."""
    values = values.dropna()
    return values[:: -(-len(values) // POINTS)]


def smoothed(values):
    """Returns an exponential mean of the values so far, without a bias towards the start.

        s_t = sum over k of weight^k x_{t-k}  /  sum over k of weight^k

    The weight is 0 up to PARTS values, and then such that it reaches over a part of the run.
    """
    return values.ewm(alpha=min(1, PARTS / len(values))).mean()


def add_smoothed(axis, line, values):
    """Draws a curve smoothed and bold over its own line, which becomes pale."""
    if len(values) > PARTS:
        line.set(alpha=0.4, linewidth=0.8)
        colour = line.get_color()
        axis.plot(thinned(smoothed(values)), color=colour, linewidth=1.8)


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
            axis.annotate(f" of {group['count']}", (x, group["share"]))
        if diagonal:
            axis.plot([0.5, 1], [0.5, 1], "--", color=GRAY)
        else:
            axis.axhline(0.5, linestyle="--", color=GRAY)
            axis.set_xticks(places, [group["name"] for group in groups])
        axis.set(xlabel=label, ylabel="share that it judged right")

    return svg(title, draw)
