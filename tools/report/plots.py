"""Draws metrics.jsonl as curves.png: metrics that belong together share a panel (panels.ini)."""

import configparser
from pathlib import Path

from matplotlib.figure import Figure

LAYOUT = configparser.ConfigParser(delimiters="|", interpolation=None)
LAYOUT.optionxform = str  # titles as they are
LAYOUT.read(Path(__file__).with_name("panels.ini"))
PANELS = {group: dict(LAYOUT[group]) for group in LAYOUT.sections()}  # {title: metrics} of each
LEFT_OUT = ["epoch", "seconds", "eval_score_mean", "eval_score_std"]
COLUMNS = 4


def draw(run, title):
    """Draws the metrics of a runs.Run as curves.png in its folder. Limits are dotted lines."""
    metrics = run.table.drop(columns=LEFT_OUT, errors="ignore").dropna(axis="columns", how="all")
    changing = [name for name in metrics if not is_noise(name, metrics[name])]
    groups = panels_of(metrics[changing or list(metrics)])
    panels = sum(groups.values(), [])
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(16, height := 3 * rows + 0.5))
    # Fixed places: a layout by what the texts need takes as long as drawing
    figure.subplots_adjust(0.04, 0.5 / height, 0.99, 1 - 0.8 / height, 0.2, 0.45)
    figure.suptitle(title)
    for number, panel in enumerate(panels, 1):
        draw_panel(figure.add_subplot(rows, COLUMNS, number), *panel, run.limits)
    figure.savefig(run.path / "curves.png", dpi=80)


def is_noise(name, values):
    """Returns whether a metric is constant but for rounding."""
    size = values.abs().max()
    least = size if "learning_rate" in name else max(size, 1)
    return values.max() - values.min() <= 1e-6 * least


def panels_of(metrics):
    """Returns {group: [(title, table of metrics)]}; none is empty."""
    panels = [(group, *panel) for group, panels in PANELS.items() for panel in panels.items()]
    named = {name for panel in panels for name in panel[-1].split()}
    for name in metrics:
        if (own := name.removeprefix("eval_")) not in named:
            named.add(own)
            panels.append(("others", own, own))
    groups = {}
    for group, title, names in panels:
        both = [kind + name for name in names.split() for kind in ("", "eval_")]
        if shown := [name for name in both if name in metrics]:
            groups.setdefault(group, []).append((title, metrics[shown]))
    return groups


def draw_panel(axis, title, metrics, limits):
    """Draws a table of metrics; a held-out one with dots, in the colour of the one before it."""
    own = list(dict.fromkeys(name.removeprefix("eval_") for name in metrics))
    for name in metrics:
        values, number = metrics[name].dropna(), own.index(name.removeprefix("eval_"))
        style = "o--" if name.startswith("eval_") or len(values) == 1 else "-"
        axis.plot(values, style, color=f"C{number}", label=name)
    for limit in {limits[name] for name in metrics if name in limits}:  # one of two metrics once
        axis.axhline(limit, linestyle=":", color="gray", label=f"limit {limit:g}")
    axis.set(title=title, xlabel="step")
    axis.legend(loc="upper left", fontsize="x-small", framealpha=0.4)  # "best" is slow
