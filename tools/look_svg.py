"""Draws look.py's pictures as plain SVG: curves, histograms, shares with their intervals.

Colours are classes (c0, c1, ...) that look_page.css fills in, for light and dark screens.
"""

import math

from look_text import number, shown

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 34
COLOURS = 8
SVG = '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
GRID = '<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>'
TEXT = '<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>'
TURNED = '<text class="label" transform="rotate(-90 11 {0})" x="11" y="{0}">{1}</text>'
PATH = '<path class="{}" d="{}"><title>{}</title></path>'
DOT = '<circle class="{}" cx="{}" cy="{}" r="3.5"><title>{}</title></circle>'
BAR = '<rect class="bar c{}" x="{}" y="{}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
GROUP = '<g class="curve c{}{}" data-series="{}">{}</g>'


def round_to_3(value):
    """Returns a number with three digits."""
    return float(f"{value:.3g}")


def ticks(low, high, count=4):
    """Returns round numbers from `low` to `high`, about `count` of them.

    >>> ticks(0, 1), ticks(-0.3, 2.1)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 0.5, 1.0, 1.5, 2.0])
    """
    size = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(size))
    steps = [power * factor for factor in (1, 2, 2.5, 5, 10)]
    step = min(steps, key=lambda one: abs(math.log(one / size)))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]


def log_ticks(low, high):
    """Returns round numbers between 10^low and 10^high: 1, 2 and 5 times powers, or these alone.

    >>> log_ticks(-1, 1), log_ticks(-2, 3)
    ([0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0], [0.01, 0.1, 1.0, 10.0, 100.0, 1000.0])
    """
    powers = range(math.floor(low), math.ceil(high) + 1)
    factors = (1, 2, 5) if high - low <= 2 else (1,)
    marks = [float(f"{factor}e{power}") for power in powers for factor in factors]
    inside = [mark for mark in marks if 10**low <= mark * (1 + 1e-9) <= 10**high * (1 + 1e-8)]
    if len(inside) > 1:
        return inside
    return [10.0**value for value in ticks(low, high, 3)]


class Frame:
    """The axes of one picture, and where a point lies in it."""

    def __init__(self, xs, ys, log=False):
        self.log = log
        self.x0, self.x1 = span(xs)
        if log:
            ys = [math.log10(y) for y in ys]
        self.y0, self.y1 = span(ys, room=0.05)

    def x(self, value):
        """Returns the column of a value."""
        share = (value - self.x0) / (self.x1 - self.x0)
        room = WIDTH - LEFT - RIGHT
        return round(LEFT + share * room, 1)

    def y(self, value):
        """Returns the row of a value."""
        value = math.log10(value) if self.log else value
        share = (value - self.y0) / (self.y1 - self.y0)
        low = HEIGHT - BOTTOM
        return round(low - share * (low - TOP), 1)

    def axes(self, xlabel, ylabel, names=None):
        """Returns grid lines and labels as SVG. names: {x: text} in place of numbers."""
        bottom = HEIGHT - BOTTOM
        right = WIDTH - RIGHT
        parts = []
        marks = log_ticks(self.y0, self.y1) if self.log else ticks(self.y0, self.y1)
        for value in marks:
            y = self.y(value)
            text = number(round_to_3(value))
            parts.append(GRID.format(LEFT, right, y, y))
            parts.append(TEXT.format("tick", LEFT - 6, y + 3.5, "end", text))
        for value in names or ticks(self.x0, self.x1, 5):
            x = self.x(value)
            text = names[value] if names else number(value)
            parts.append(TEXT.format("tick", x, bottom + 14, "middle", shown(text)))
        middle = (TOP + bottom) / 2
        centre = (LEFT + right) / 2
        parts.append(TURNED.format(middle, shown(ylabel)))
        parts.append(TEXT.format("label", centre, HEIGHT - 4, "middle", shown(xlabel)))
        return "".join(parts)


def span(values, room=0.0):
    """Returns the smallest and the largest value, a little apart also if they are equal."""
    low, high = min(values), max(values)
    extra = (high - low) * room
    if high == low:
        extra = abs(high) * 0.1 or 1.0
    return low - extra, high + extra


def svg(body, words):
    """Returns a picture of elements (texts). words: what it shows, for those who cannot see it."""
    return SVG.format(WIDTH, HEIGHT, shown(words), "".join(body))


def path(frame, points):
    """Returns the d of a path through points (x, y)."""
    pairs = ["{} {}".format(frame.x(x), frame.y(y)) for x, y in points]
    return "M" + "L".join(pairs)


# ---- Curves ----
def curves(xlabel, ylabel, lines, limits):
    """Returns a picture of several curves, each in a group that can be switched off.

    lines: dicts with key (of the group), name, colour (a number), other (drawn in dashes), dots
    (its points are marked, as held-out metrics are), points and smooth, lists of (x, y).
    limits: {name: y}, dashed.
    """
    points = [point for line in lines for point in line["points"]]
    ys = [y for _, y in points] + list(limits.values())
    falls = any(falls_far(line["points"]) for line in lines)
    log = falls and min(ys) > 0
    frame = Frame([x for x, _ in points], ys, log)
    parts = [frame.axes(xlabel, ylabel)]
    end = WIDTH - RIGHT
    for name, value in limits.items():
        y = frame.y(value)
        line = "M{} {}H{}".format(LEFT, y, end)
        text = "limit " + number(value)
        parts.append(PATH.format("limit", line, shown(name)))
        parts.append(TEXT.format("limit", end, y - 3, "end", text))
    parts += [curve(frame, line) for line in lines]
    said = [f"{line['name']}: {in_words(line['points'])}" for line in lines]
    said += [f"limit of {name}: {number(value)}" for name, value in limits.items()]
    said += ["log scale"] if log else []
    return svg(parts, "; ".join(said))


def curve(frame, line):
    """Returns one curve: raw and over it smoothed, and marks with the numbers."""
    points, parts = line["points"], []
    name = shown(line["name"])
    kinds = {"raw": points, "smooth": line["smooth"]}
    if line["dots"]:
        kinds = {"dashes": points}
    for kind, through in kinds.items():
        parts.append(PATH.format(kind, path(frame, through), name))
    kind = "dot" if line["dots"] else "mark"  # a mark is seen when it is pointed at
    for x, y in points:
        title = f"{name}, step {number(x)}: {number(y)}"
        parts.append(DOT.format(kind, frame.x(x), frame.y(y), title))
    colour = line["colour"] % COLOURS
    other = " other" * line["other"]
    return GROUP.format(colour, other, shown(line["key"]), "".join(parts))


def in_words(points):
    """Returns where a curve begins and ends."""
    said = []
    for x, y in (points[0], points[-1]):
        said.append(f"{number(y)} at step {number(x)}")
    return ", ".join(said)


def falls_far(points):
    """Returns whether points, all above 0, once fall by more than ten times: then logs are drawn.

    >>> falls_far([(0, 0.1), (1, 5.0), (2, 0.4)]), falls_far([(0, 0.1), (1, 5.0)])
    (True, False)
    """
    top = 0.0
    for _, value in points:
        top = max(top, value)
        if top > 10 * value:
            return True
    return False


# ---- The judge ----
def histograms(xlabel, edges, groups):
    """Returns a picture of histograms over each other. groups: {name: counts}, in one order."""
    tops = [max(counts) for counts in groups.values()]
    frame = Frame(edges, [0, *tops])
    frame.y0 = 0.0
    parts = [frame.axes(xlabel, "pairs")]
    for place, (name, counts) in enumerate(groups.items()):
        for low, high, count in zip(edges, edges[1:], counts):
            x = frame.x(low)
            top = frame.y(count)
            width = frame.x(high) - x
            height = frame.y(0) - top
            title = f"{shown(name)}, {number(low)} to {number(high)}: {count}"
            parts.append(BAR.format(place, x, top, width, height, title))
    said = [f"{name}: {sum(counts)} scores" for name, counts in groups.items()]
    return svg(parts, "histogram of " + ", ".join(said))


def shares(xlabel, ylabel, groups, names=None, diagonal=False):
    """Returns a picture of shares with their intervals. groups: dicts of x, share, interval, count.

    names: {x: text} under the axis. diagonal: draw where share and x are equal, else one half.
    """
    xs = [group["x"] for group in groups]
    lows = [low for group in groups for low in group["interval"]]
    edges = [min(xs) - 0.5, max(xs) + 0.5]
    if diagonal:
        edges = [0.5, 1.0]
    frame = Frame(edges, [0.5, 1.0, *lows])
    parts = [frame.axes(xlabel, ylabel, names)]
    ends = [(edges[0], 0.5), (edges[1], 1.0 if diagonal else 0.5)]
    expected = "as often as it said" if diagonal else "a coin"
    parts.append(PATH.format("limit", path(frame, ends), expected))
    said = []
    for group in groups:
        x = frame.x(group["x"])
        words = interval(group)
        low, high = map(frame.y, group["interval"])
        parts.append(PATH.format("whisker c0", "M{} {}V{}".format(x, low, high), words))
        y = frame.y(group["share"])
        parts.append(DOT.format("dot c0", x, y, words))
        name = names[group["x"]] if names else number(group["x"])
        said.append(f"{name}: {words}")
    return svg(parts, f"{ylabel} by {xlabel}: " + "; ".join(said))


def interval(group):
    """Returns a share, its interval and its count in words."""
    low, high = group["interval"]
    return f"{group['share']:.2f} [{low:.2f}, {high:.2f}] of {group['count']}"
