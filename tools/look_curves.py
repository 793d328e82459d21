"""The curves of look.py's page: several runs over each other, in the groups of curves.png."""

import look_numbers
import look_svg
from look_runs import TITLES, is_number
from look_text import heading, number, shown

from machinery.run import plots

POINTS = 200  # of a curve that are drawn
APART = ("loss",)  # a panel for each script: these losses have nothing to do with each other
FOLDED = ("perplexity", "work", "learning rate", "deviation of the advantages")  # under "more"
GROUPS = {
    "learning": "Does it get better at what it is trained for?",
    "stability": "Is the training still sound?",
    "cost": "What does a step take?",
    "others": "Further metrics.",
}


def curves(runs):
    """Returns the section of the curves: runs over each other, in groups."""
    words = "Thin: as logged. Bold: smoothed over a tenth of the run. Dots: held out. Dashed: the "
    words += "known limit. A name under a picture switches its curve."
    switches = [switch(f"run:{i}", run.name, i) for i, run in enumerate(runs)]
    switches += [switch("raw", "raw"), switch("smooth", "smoothed"), switch("held-out", "held out")]
    parts = [
        heading("curves", "Curves", words),
        f'<p class="switches">{"".join(switches)}</p>',
    ]
    for group, panels in panels_of(runs).items():
        drawn = {title: panel(runs, title, label, names) for title, label, names in panels}
        shown_first = [text for title, text in drawn.items() if title not in FOLDED]
        folded = [text for title, text in drawn.items() if title in FOLDED]
        parts.append(f"<h3>{group.capitalize()}</h3><p>{GROUPS[group]}</p>")
        parts.append(f'<div class="panels">{"".join(shown_first)}</div>')
        if folded:
            inside = f'<div class="panels">{"".join(folded)}</div>'
            parts.append(f"<details><summary>more</summary>{inside}</details>")
    return "".join(parts) + "</section>"


def switch(key, text, colour=None):
    """Returns a box that switches curves on and off."""
    swatch = "" if colour is None else f' class="c{colour % look_svg.COLOURS}"'
    box = f'<input type="checkbox" checked data-switch="{shown(key)}">'
    return f"<label{swatch}>{box} {shown(text)}</label>"


def panels_of(runs):
    """Returns {group: [(title, label of the y axis, metrics)]}, as curves.png has them."""
    panels = [line.split(" | ") for line in plots.PANELS.strip().splitlines()]
    named = {name for *_, names in panels for name in names.split()} | {"step", "epoch", "seconds"}
    held = {name for run in runs for line in run.metrics for name in line}
    own = {name.removeprefix("eval_") for name in held} - named
    own -= {name.removeprefix("eval_") for name in plots.LEFT_OUT}
    panels += [("others", name, name, name) for name in sorted(own)]
    groups = {}
    for group, title, label, names in panels:
        if lines_of(runs, names):
            groups.setdefault(group, []).append((title, label, names))
    return groups


def lines_of(runs, names):
    """Returns the curves of some metrics (a text), with the eval_... of each, of all runs."""
    found = []
    for place, run in enumerate(runs):
        for metric, name in enumerate(names.split()):
            for full in (name, f"eval_{name}"):
                points = run.series(full)
                if not points or (len(points) > 1 and is_flat(full, points)):
                    continue
                weight = look_numbers.weight_of(len(points))
                steps, values = zip(*points)
                smooth = list(zip(steps, look_numbers.smoothed(values, weight)))
                line = {"run": place, "metric": metric, "full": full, "script": run.script}
                line["name"] = f"{run.name}: {full}"
                line["dots"] = full.startswith("eval_") or len(points) == 1
                line["points"] = look_numbers.thinned(points, POINTS)
                line["smooth"] = look_numbers.thinned(smooth, POINTS)
                found.append(line)
    return found


def is_flat(name, points):
    """Returns whether a metric is constant but for rounding, as curves.png leaves it out."""
    values = [value for _, value in points]
    size = max(map(abs, values))
    return max(values) - min(values) <= 1e-6 * (size if "learning_rate" in name else max(size, 1))


def panel(runs, title, label, names):
    """Returns one panel, or where a metric means another thing in each script one of each."""
    lines = lines_of(runs, names)
    if title not in APART:
        return picture(runs, title, label, lines)
    scripts = dict.fromkeys(line["script"] for line in lines)
    parts = []
    for script in scripts:
        own = [line for line in lines if line["script"] == script]
        parts.append(picture(runs, f"{TITLES.get(script, script)}: {title}", label, own))
    return "".join(parts)


def picture(runs, title, label, lines):
    """Returns a picture of curves, and under it a button for each.

    Colours are those of the runs if there are several here, else of the metrics.
    """
    by_run = len({line["run"] for line in lines}) > 1
    limits, buttons = {}, []
    for line in lines:
        line["colour"] = line["run"] if by_run else line["metric"]
        line["other"] = by_run and line["metric"] > 0  # another metric in the run's colour
        line["key"] = f"{line['run']}:{line['full']}"
        limit = runs[line["run"]].limits.get(line["full"])
        if is_number(limit):
            limits.setdefault(limit, line["full"])
        text = line["name"] if by_run else line["full"]
        last = number(line["points"][-1][1])
        kind = "dashes" if line["dots"] else "other" if line["other"] else "line"
        look = f'class="key c{line["colour"] % look_svg.COLOURS} {kind}"'
        on = f'type="button" aria-pressed="true" data-toggle="{shown(line["key"])}"'
        buttons.append(f"<button {look} {on}>{shown(text)} <b>{last}</b></button>")
    drawn = look_svg.curves("step", label, lines, {name: at for at, name in limits.items()})
    caption = f"<figcaption>{shown(title)}</figcaption>"
    return f'<figure>{caption}{drawn}<div class="keys">{"".join(buttons)}</div></figure>'
