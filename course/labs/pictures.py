"""Pictures of results: of a lab, of a topic's labs, and the small ones of course/labs/README.md.

A picture carries a digest of what it shows. So a test sees whether it is up to date by its data.
"""

import hashlib
import io
import json
import statistics
from itertools import pairwise
from textwrap import fill

import runner
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from runner import by_arm, by_seed

COLOURS = {"shown": "tab:green", "refuted": "tab:red", "not decided": "tab:orange"}
LABELS = {
    "kl": "KL to the SFT model, nats a response",
    "sqrt kl": "sqrt(KL to the SFT model)",
    "gold": "gold score of held-out prompts",
    "reward": "reward of held-out prompts",
}
# Edges of the axes of the forest, by unit. Seeds and intervals may lie outside.
UNIT = "gold, or a share"
EDGES = {UNIT: 0.4, "tokens": 4.4, "loss": 0.22, "nats": 4.4}


# ---- Files ----
def digest(figure):
    """Returns a digest of all lines, labels and ticks of a figure."""
    lines = [line.get_data() for axis in figure.axes for line in axis.lines]
    texts = [
        text.get_text()
        for axis in figure.axes
        for text in [axis.title, axis.xaxis.label, axis.yaxis.label, *axis.get_yticklabels()]
    ]
    shown = [[[f"{float(x):.5g}" for x in numbers] for numbers in data] for data in lines], texts
    return hashlib.sha1(json.dumps(shown).encode()).hexdigest()


def save(figure, file, dpi=80):
    """Writes a picture of 32 colours, a third of the bytes, with the digest of what it shows."""
    drawn, info = io.BytesIO(), PngInfo()
    info.add_text("Description", digest(figure))
    figure.savefig(drawn, dpi=dpi)
    file.parent.mkdir(exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(32).save(file, pnginfo=info, optimize=True)


def new_axes(width, height, **grid):
    """Returns a figure and its axes, one list. All pictures have this look."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = [*figure.subplots(squeeze=False, **grid).flat]
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


# ---- A lab ----
def of_lab(lab, results):
    """Returns the picture of a lab or a variant."""
    figure = (of_curves if lab.curves else of_arms)(lab, results)
    figure.suptitle(lab.title)
    return figure


def of_arms(lab, results):
    """Returns a panel for each measure, with a row for each arm; those to compare with are gray."""
    arms = by_arm(results)
    others = {runner.baseline(lab, arm) for arm in arms}
    size = 2.6 * len(lab.shown) + 3, max(0.28 * len(arms) + 1.2, 3)
    figure, axes = new_axes(*size, ncols=len(lab.shown))
    for axis, head in zip(axes, lab.shown):
        draw_levels(axis, {arm: by_seed(each, head) for arm, each in arms.items()}, others)
        axis.set_xlabel(head)
        axis.tick_params(labelleft=axis is axes[0])
        if head in lab.logarithmic:
            axis.set_xscale("log")
        if head in lab.limits:
            axis.axvline(lab.limits[head], linestyle="--", color="gray")
    return figure


def draw_levels(axis, rows, gray):
    """Draws a row for each of {label: {seed: value}}: a dot for each seed, a bar at their mean."""
    for y, (label, own) in enumerate(rows.items()):
        values, colour = [*own.values()], "gray" if label in gray else "tab:blue"
        axis.plot(values, [y] * len(values), "o", color=colour, alpha=0.5, markersize=4)
        if values:
            mean = statistics.mean(values)
            axis.plot(mean, y, "|", color=colour, markersize=14, markeredgewidth=2)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_ylim(len(rows) - 0.4, -0.6)


def of_curves(lab, results):
    """The pairs of axes in lab.curves: each seed thin, the mean of the seeds thick."""
    figure, axes = new_axes(12, 4.5, ncols=len(lab.curves))
    arms = {arm: each for arm, each in by_arm(results).items() if arm in (lab.drawn or lab.arms)}
    for axis, (x, y) in zip(axes, lab.curves):
        for number, (arm, each) in enumerate(arms.items()):
            colour, curves = f"C{number}", []
            for curve in [result["curve"] for result in each]:
                if x.removeprefix("sqrt ") in curve and y in curve:
                    curves.append((runner.along(x, curve), curve[y]))
                    axis.plot(*curves[-1], color=colour, alpha=0.3, linewidth=0.8)
            mean = [[*map(statistics.mean, zip(*own))] for own in zip(*curves)] or [[], []]
            axis.plot(*mean, ".-", color=colour, label=arm)
        axis.set(xlabel=LABELS.get(x, x), ylabel=LABELS.get(y, y))
        if y in lab.limits:
            axis.axhline(lab.limits[y], linestyle="--", color="gray")
    axes[0].legend(fontsize="x-small")
    return figure


# ---- All labs ----
def of_topics(labs):
    """Returns the forest plot of each topic: a row for each prediction of its labs."""
    topics = {}
    for name, what, values, word in runner.decided(labs):
        if "range" in what:
            rows = topics.setdefault(labs[name].topic, {}).setdefault(what.get("unit", UNIT), {})
            rows[fill(f"{name}: {what['says']}", 46)] = what["range"], values, word
    return map(of_topic, topics.values())


def of_topic(units):
    """A forest plot: a row for each prediction, a dot for each seed, and the 95 % interval.

    A gray band is where the prediction holds; the colour is the verdict. Each unit has its axis.
    """
    heights = [len(rows) + 1.5 for rows in units.values()]
    size = 7.5, 0.32 * sum(heights) + 0.4
    figure, axes = new_axes(*size, nrows=len(units), height_ratios=heights)
    for axis, (unit, rows) in zip(axes, units.items()):
        edge = EDGES[unit]
        for y, row in enumerate(rows.values()):
            draw_row(axis, y, edge, *row)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(rows)), rows, fontsize=8)
        axis.set(xlabel=f"difference in {unit}", ylim=(len(rows) - 0.4, -0.6), xlim=(-edge, edge))
    lines = [axes[0].plot([], [], "o-", color=colour)[0] for colour in COLOURS.values()]
    figure.legend(lines, COLOURS, loc="outside upper center", ncols=3)
    return figure


def draw_row(axis, y, edge, limits, values, word):
    """Draws a row of a forest. A seed beyond the edge is a cross there."""
    mean, half, _ = runner.interval(values)
    ends = [sign * edge if x is None else x for x, sign in zip(limits, (-1, 1))]
    axis.plot(ends, [y, y], color="gainsboro", linewidth=9, solid_capstyle="butt")
    axis.plot([mean - half, mean + half], [y, y], color=COLOURS[word])
    for x in values:
        at = max(min(x, 0.98 * edge), -0.98 * edge)
        axis.plot(at, y, "o" if at == x else "x", color=COLOURS[word], markersize=4)


def of_belief(belief, labs):
    """A small picture: a row for each arm, a dot for each run, and a bar at their mean.

    belief: "rows" [[label, lab, arm, measure]], the labels in "gray", the "axis" and its "range".
    Thin lines join the runs of a seed, from a gray row to those below that are compared with it. A
    dotted line is at the mean gold score before step 3.
    """
    rows, height = belief["rows"], 0.24 * len(belief["rows"]) + 0.55
    figure, [axis] = new_axes(4.4, height)
    figure.set_layout_engine(None)
    figure.subplots_adjust(0.43, 0.47 / height, 0.96, 1 - 0.05 / height)
    shown = [by_arm(runner.results_of(row[1]))[row[2]] for row in rows]
    levels = {row[0]: by_seed(each, row[3]) for row, each in zip(rows, shown)}
    gray = belief.get("gray", [rows[0][0]])
    for y, (above, below) in enumerate(pairwise(levels)):
        if below not in gray:
            for seed in sorted(levels[above].keys() & levels[below]):
                ends = levels[above][seed], levels[below][seed]
                axis.plot(ends, [y, y + 1], color="silver", linewidth=0.8)
    draw_levels(axis, levels, gray)
    before = by_seed(shown[0], "gold before").values()
    axis.axvline(statistics.mean(before), linestyle=":", color="black")
    axis.set_xlabel(belief["axis"])
    axis.set_xlim(*belief.get("range", (0.4, 1)))
    return figure


def of_pace(belief, labs):
    """A small picture of all runs on the toy: gold against sqrt(KL), and the plain recipe's curve.

    belief: "marked" {label: [lab, arm]}, those that leave the curve.
    """
    figure, [axis] = new_axes(4.4, 2.6)
    toy = [(name, lab) for name, lab in labs.items() if lab.plain and "reward" in lab.base]
    for name, _ in toy:
        for result in runner.results_of(name):
            if points := runner.points_of(result):
                axis.plot(*points[-1], ".", color="silver", markersize=4)
    for number, (label, (name, arm)) in enumerate(belief["marked"].items()):
        for result in by_arm(runner.results_of(name))[arm]:
            axis.plot(*runner.points_of(result)[-1], "o", color=f"C{number}", markersize=4)
        axis.plot([], [], "o", color=f"C{number}", label=label)
    curve, roots = runner.plain_curve(toy[0][1]), [root / 100 for root in range(175)]
    golds = [curve(root**2) for root in roots]  # NaN where nothing is known
    axis.plot(roots, golds, "--", color="gray", label="plain recipe")
    axis.set(xlim=(0, 1.75), ylim=(0.4, 1))
    axis.set(xlabel="distance from the SFT model, sqrt(KL)", ylabel="gold score after PPO")
    axis.legend(fontsize="x-small")
    return figure
