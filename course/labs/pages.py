"""Tables of results, and the pages of labs and variants in which they stand between two markers."""

import json
import re
import statistics
from math import isnan

import pictures
import runner
from declared import LABS
from runner import baseline, by_arm, by_seed, differences, interval

BEGIN, END = "<!-- results -->", "<!-- end -->"
VERDICTS = tuple(pictures.COLOURS)


# ---- Tables ----
def block(lab, results):
    """Returns what stands between the markers of a page: one table, or two."""
    asked = [questions(lab, results)] if lab.predictions else []
    return "\n\n".join([table(lab, results), *asked])


def table(lab, results):
    """Returns the table of the arms.

    Of each measure the mean, with the smallest and largest in brackets. Then how far an arm is
    above its baseline, seed by seed: the mean of the differences, half of their 95 % interval, and
    how many of them have the mean's sign. At equal KL: what is left of that when the curve of the
    plain recipe is subtracted (empty where one of the runs is beyond its end).
    """
    columns, found = columns_of_differences(lab), by_arm(results)
    several = len({baseline(lab, arm) for arm in lab.arms}) > 1 and columns
    heads = ["arm", "runs", *lab.measures, *(["baseline"] if several else []), *columns]
    lines = []
    for arm in lab.arms:
        each, other = found.get(arm, []), baseline(lab, arm)
        stopped = sum(result["stopped"] for result in each)
        runs = str(len(each) or "not run yet") + (f", {stopped} stopped at NaN" if stopped else "")
        cells = [arm, runs, *(cell(each, head) for head in lab.measures)]
        cells += [other if other != arm else ""] if several else []
        for measure, curve in columns.values():
            own = arm == other and isinstance(measure, str)
            values = [] if own else differences(lab, results, arm, measure, curve).values()
            cells.append(difference(values))
        lines.append(cells)
    return markdown(heads, lines)


def columns_of_differences(lab):
    """Returns {heading: measure, curve} of the table's last columns; curve: see differences()."""
    curve, columns = runner.plain_curve(lab), {}
    names = {baseline(lab, arm) for arm in lab.arms}
    other = f'"{names.pop()}"' if len(names) == 1 else "its baseline"
    for measure in lab.compared:
        name = " above ".join([measure, other] if isinstance(measure, str) else measure)
        columns[name] = measure, None
        if measure == "gold" and curve:
            columns["the same at equal KL"] = measure, curve
    return columns


def questions(lab, results):
    """Returns the table of what was predicted, and of what else was asked.

    A prediction may have a "toy": a "lab", and what is compared there, as in runner.compare(). The
    toy's result then stands beside it.
    """
    heads, lines = ["predicted, or asked", "difference", "seen", "verdict"], []
    beside = any("toy" in what for what in lab.predictions)
    heads += ["of the gain", "on the toy", "seen there", "of its gain"] if beside else []
    for what in lab.predictions:
        found, limits = runner.compare(lab, results, what), what.get("range")
        values = [*found.values()]
        words = ["not run yet", ""]
        if len(values) > 1:
            words = [runner.verdict(values, None), runner.verdict(values, limits) if limits else ""]
        lines.append([what["says"], difference(values), *words])
        if beside:
            lines[-1] += [of_gain(lab, results, what, found), *on_toy(what.get("toy"))]
    return markdown(heads, lines)


def on_toy(what):
    """Returns three cells: what a lab on a toy has shown. what: a prediction's "toy", or None."""
    if what is None:
        return ["", "", ""]
    lab, results = LABS[what["lab"]], runner.results_of(what["lab"])
    found = runner.compare(lab, results, what)
    values = [*found.values()]
    return [difference(values), runner.verdict(values, None), of_gain(lab, results, what, found)]


def of_gain(lab, results, what, found):
    """Returns the text of a cell: a difference in gold, as a share of what the other arm gains.

    It is empty where that arm gains nothing. found: of runner.compare().
    """
    other = what.get("to", baseline(lab, what["arm"]))
    gains = runner.values_of(results, other, ["gold", "gold before"])
    gain = sum(gains.get(seed, 0) for seed in found) / max(len(found), 1)
    if len(found) < 2 or gain <= 0 or what.get("measure", "gold") != "gold":
        return ""
    return f"{statistics.mean(found.values()) / gain:+.0%}"


def markdown(heads, lines):
    """Returns a table in Markdown."""
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def difference(values):
    """Returns the text of a cell: "+0.039 ± 0.021 (3 of 3)"."""
    if len(values) < 2 or any(map(isnan, values)):
        return ""
    mean, half, alike = interval(values)
    return f"{mean:+.3f} ± {half:.3f} ({alike} of {len(values)})"


def cell(results, head):
    """Returns the text of a cell: mean [smallest, largest]."""
    values = by_seed(results, head).values()
    if not values:
        return ""
    numbers = statistics.mean(values), min(values), max(values)
    texts = [f"{x:.3f}" if x == 0 or 5e-4 <= abs(x) < 1000 else f"{x:.1e}" for x in numbers]
    return "{} [{}, {}]".format(*texts)


def overview(labs):
    """Returns the table of the labs that were run: what each predicted, by verdict."""
    lines = []
    for name in filter(runner.results_of, labs):
        lab, said = labs[name], {}
        for _, what, _, word in runner.decided({name: lab}):
            if "range" in what:
                said.setdefault(word, []).append(what["says"])
        texts = [f"**{word}**: {'; '.join(said[word])}" for word in VERDICTS if word in said]
        text = "<br>".join(texts) or "no number was predicted"
        lines.append([f"[{name}]({name}.md)", lab.claim, lab.topic, text])
    return markdown(["lab", "the claim", "about", "what was predicted"], lines)


def reasons(labs):
    """Returns a verdict on each statement of README.md, and the intervals that it rests on.

    A statement is shown in part if the interval of one of its differences crosses the predicted
    size. Then only the direction is shown, or not even that.
    """
    texts = []
    found = {(name, what["says"]): rest for name, what, *rest in runner.decided(labs)}
    for belief in json.loads((runner.ROOT / "course/labs/believe.json").read_text()).values():
        lines = ["**Shown.**"]
        for name, says, *label in belief["because"]:
            values, word = found[name, says]
            if word == "not decided":
                lines[0] = "**Shown in part.**"
                word = f"size not decided, {runner.verdict(values, None)}"
            text = label[0] if label else f'"{says}"'
            lines.append(f"{word}: {text}, {difference(values)}")
        texts.append("<br>".join(lines))
    return texts


# ---- Pages ----
def put(page, *texts):
    """Writes texts between the markers of a page, one for each pair of them."""
    given, pattern = iter(texts), re.compile(rf"{BEGIN}(\n?).*?{END}", re.S)
    fill = lambda found: f"{BEGIN}{found[1]}{next(given)}{found[1]}{END}"  # noqa: E731
    page.write_text(pattern.sub(fill, page.read_text()))


def study(lab, root, jobs, file, page, picture, plot_only):
    """Makes the runs (unless plot_only), writes results into the declaration, tables into the page,
    and the picture.

    What there is after Ctrl-C is written, too.
    """
    if not plot_only:
        chains = lab.chains()
        try:
            runner.make_all(chains, root, jobs)
        finally:
            if found := runner.collect(lab, chains, root):
                runner.write(file, runner.with_earlier(lab, found, runner.results_in(file)))
    found = runner.results_in(file)
    if not found:
        raise SystemExit(f"{file} has no results yet")
    pictures.save(pictures.of_lab(lab, found), picture)
    text = block(lab, found)
    print(f"{text}\n\nThe picture is {picture}")
    if page.exists():
        put(page, text)
