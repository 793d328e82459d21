"""Draws look.py's pictures as SVG: the curves of curves.png, and what the judge's scores show."""

import io
import itertools

import matplotlib
import numpy
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from tools.report import plots
from tools.report.text import rounded

POINTS = 300  # of a curve that are drawn
PARTS = 10  # of a run: the bold curve is a mean over about one of them
SPIKE = 8  # times the range of eight values in ten: the range of all, where a few flatten them
MOST = 100  # panels of a group: of metrics that plots.PANELS does not name there may be thousands
FOLDED = ("perplexity", "TFLOP/s", "learning rate", "deviation of the advantages")  # under "more"
LOSSES = {"sft": "nats a token", "reward": "nats a pair"}  # their units
GRAY = "#808080"  # is read on a light ground and on a dark one
GRAY_PARTS = "axes.edgecolor axes.labelcolor text.color xtick.color ytick.color".split()
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
UNSAID = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # of a file's metadata


def svg(title, draw, **more):
    """Returns a dict of the title of a picture, of the SVG that draw(axis) makes, and `more`.

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
    return {"title": title, "svg": Markup(text[text.index("<svg") :]), "span": span, **more}


# ---- Curves ----
def curves(runs):
    """Returns [(group, pictures, folded pictures, how many there are)]: runs over each other.

    Two steps have no axis in common: theirs are other steps, and other losses.
    """
    panels = {group: {} for group in (*plots.PANELS, "others")}
    for place, run in enumerate(runs):
        for group, own in plots.panels_of(changing(run.table)).items():
            for title, table in own:
                panels[group].setdefault((title, run.script), []).append((place, table))
    identifiers, out = itertools.count(), []
    for group, held in panels.items():
        drawn = {False: [], True: []}
        for (title, script), tables in itertools.islice(held.items(), MOST):
            name, unit = with_unit(title, script) if group != "others" else (title, "no unit")
            stages = dict.fromkeys(runs[place].title() for place, _ in tables)
            shared = [other for other, _ in held].count(title) > 1
            prefix = f"{', '.join(stages)}: " if shared else ""
            several = [run.script for run in runs].count(script) > 1
            for metric, part in one_metric_each(name, tables) if several else [(name, tables)]:
                picture = panel(runs, prefix + metric, unit, part, several, identifiers)
                drawn[name in FOLDED].append(picture)
        if held:
            out.append((group, drawn[False], drawn[True], len(held)))
    return out


def changing(table):
    """Returns a run's metrics without those that do not change, and what is none."""
    kept = [name for name in table if len(table) == 1 or not plots.is_noise(name, table[name])]
    return table[[name for name in kept if name not in plots.LEFT_OUT]]


def with_unit(title, script):
    """Returns a panel's title without its unit, and the unit.

    >>> with_unit("entropy, nats a token", "ppo"), with_unit("loss", "sft")
    (('entropy', 'nats a token'), ('loss', 'nats a token'))
    """
    name, _, unit = title.partition(", ")
    return name, unit or (LOSSES.get(script) if name == "loss" else None) or "no unit"


def one_metric_each(title, tables):
    """Returns [(title, tables)]: where runs lie over each other, a panel for each metric."""
    metrics = sorted({name.removeprefix("eval_") for _, table in tables for name in table})
    if len(metrics) == 1:
        return [(title, tables)]
    return [
        (metric, [(place, table.filter([metric, f"eval_{metric}"])) for place, table in tables])
        for metric in metrics
    ]


def panel(runs, title, unit, tables, several, identifiers):
    """Returns one picture. tables: [(place of a run, its metrics of this panel)].

    Colours are those of the metrics, or of the runs if there are several of the step. The
    identifier of a curve begins with the place of its run, so that the page can hide it. A limit
    has no run.
    """
    held, limits = [], {}
    for place, table in tables:
        colours = {}
        for names in alike(table):
            own = names[0].removeprefix("eval_")
            number = place if several else colours.setdefault(own, len(colours))
            colour = matplotlib.colors.to_hex(f"C{number}")
            name = f"{runs[place].name}: " * several + " = ".join(names)
            limits |= {x: None for n in names if (x := runs[place].limits.get(n)) is not None}
            points = points_of(table[names[0]].dropna(), names[0].startswith("eval_"))
            held.append({"run": place, "name": name, "colour": colour, **points})
    scale = scale_of(sum((curve["values"] for curve in held), []))

    def draw(axis):
        for curve in held:
            for kind, style in CURVES[curve["kind"]].items():
                gid = f"run{curve['run']}.{next(identifiers)}"
                axis.plot(curve["steps"], curve[kind], color=curve["colour"], gid=gid, **style)
        for limit in limits:
            axis.axhline(limit, linestyle=":", color=GRAY)
        axis.set_xlabel("step")
        axis.set_yscale(**scale)
        if scale["value"] == "log":
            axis.yaxis.set(major_locator=LogLocator(subs=(1, 3)), major_formatter="{x:g}")
            axis.minorticks_off()

    unit += ", logarithmic" if scale["value"] != "linear" else ""
    last = max(curve["steps"][-1] for curve in held)
    return svg(title, draw, curves=held, limits=[*limits], last=last, unit=unit)


def scale_of(values):
    """Returns what set_yscale takes: a single step that went wrong would flatten the curve."""
    low, high = numpy.quantile(values, [0.1, 0.9])
    if max(values) - min(values) <= SPIKE * (high - low) or low == high:
        return {"value": "linear"}
    if min(values) > 0:
        return {"value": "log"}
    return {"value": "symlog", "linthresh": numpy.median(numpy.abs(values)) or 1}


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
    steps = [float(f"{step:.9g}") for step in shown.index]
    return {"kind": kind, "steps": steps, "values": rounded(shown), "smooth": rounded(smooth)}


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
def histogram(pairs):
    """Returns a picture of the scores of chosen and rejected responses."""

    def draw(axis):
        sides = ["chosen", "rejected"]
        values = [pairs[f"{side}_score"] for side in sides]
        axis.hist(values, bins=24, histtype="stepfilled", alpha=0.5, label=sides)
        axis.set(xlabel="score", ylabel="pairs")
        axis.legend()

    return svg("scores", draw)


def shares(title, label, groups, expected=None, **more):
    """Returns a picture of numbers.shares. expected: of each group what its share should be."""

    def draw(axis):
        xs = range(len(groups)) if expected is None else expected
        axis.vlines(xs, groups["low"], groups["high"], "C0")
        axis.plot(xs, groups["share"], "C0o")
        for x, share, count in zip(xs, groups["share"], groups["count"]):
            axis.annotate(f"of {count}", (x, share), (5, 0), textcoords="offset points")
        if expected is None:
            axis.axhline(0.5, linestyle="--", color=GRAY)
            axis.set_xticks(xs, groups.index)
        else:
            axis.plot([0.5, 1], [0.5, 1], "--", color=GRAY)
        axis.set(xlabel=label, ylabel="share that it judged right")

    return svg(title, draw, **more)
