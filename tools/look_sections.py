"""The parts of look.py's page that show responses and the judge: tokens, judge, samples."""

import json

import look_numbers
import look_svg
from look_runs import is_number
from look_text import heading, shown, visible

TOKENS = 9_000  # of all runs' responses together that the page holds
ROWS = 400  # of the table of samples
CHARACTERS = 900  # of a text there
MEASURES = {  # (title, what its colours say), in tokens.jsonl
    "advantage": (
        "advantage",
        "Was this token better (orange) or worse (blue) than expected? What the update makes more "
        "likely, or less; before whitening.",
    ),
    "kl_k3": ("KL", "How far from the reference's is the probability of this token? k3, never < 0"),
    "reward": ("reward", "Minus kl_coef times KL on every token; on the last one also the score."),
    "value": ("value", "The critic's guess, before this token, of the reward still to come."),
    "return": ("return", "What the critic is to learn: advantage plus value."),
    "entropy": ("entropy", "How many ways to go on were open here, in nats."),
    "kl": (
        "log-prob ratio",
        "log-prob minus the reference's: orange is likelier than before training. k1, the KL that "
        "the reward pays for by default.",
    ),
}


# ---- Tokens ----
def microscope(runs):
    """Returns the section of the tokens, and the data of it for look_page.js; or two times ""."""
    held = [run for run in runs if run.tokens]
    if not held:
        return "", ""
    data = {"runs": [], "measures": {key: list(texts) for key, texts in MEASURES.items()}}
    for run in held:
        lines = bounded(run.tokens, TOKENS // len(held))
        about = visible(f"--advantage {run.args.get('advantage', 'gae')}")
        data["runs"].append({"name": visible(run.name), "about": about, "lines": lines})
    words = "Each token of some held-out responses, as PPO saw it. Point at a token, or walk with "
    words += "the arrow keys, to see its numbers."
    html = heading("tokens", "Token microscope", words)
    html += '<div id="microscope"><noscript>This part needs JavaScript.</noscript></div></section>'
    return html, data


def bounded(lines, most):
    """Returns lines of tokens.jsonl for the page: evenly spread evaluations, of few tokens.

    Each has at least the first response of the first and the last evaluation.
    """
    steps = sorted({line["step"] for line in lines})
    size = {step: 0 for step in steps}
    for line in lines:
        size[line["step"]] += len(line["tokens"]["text"])
    count = max(2, int(most / max(max(size.values()), 1)))
    kept, out, used = set(look_numbers.thinned(steps, count)), [], 0
    order = sorted(kept, key=lambda step: (step not in (steps[0], steps[-1]), step))
    for step in order:
        here = [line for line in lines if line["step"] == step]
        for place, line in enumerate(here):
            used += len(line["tokens"]["text"])
            if used <= most or (place == 0 and step in (steps[0], steps[-1])):
                out.append(short(line))
    return sorted(out, key=lambda line: line["step"])


def short(line):
    """Returns a line of tokens.jsonl with fewer digits, and with texts that can be shown."""
    tokens = {"text": [visible(text) for text in line["tokens"]["text"]]}
    for name, values in line["tokens"].items():
        if name != "text":
            rounded = (float(f"{x:.5g}") if is_number(x) else None for x in values)
            tokens[name] = list(rounded)
    names = ("step", "sample", "reward", "gold", "kl", "kl_coef", "ended")
    own = {name: line[name] for name in names if is_number(line.get(name))}
    return {**own, "prompt": cut(visible(line["prompt"])), "tokens": tokens}


def script_data(data):
    """Returns data as JSON that no text in it can end: every < is written as a number."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def cut(text):
    """Returns a text, or the beginning of a long one."""
    more = len(text) - CHARACTERS
    return text if more <= 0 else f"{text[:CHARACTERS]}… ({more} characters more)"


# ---- The judge ----
def judges(runs):
    """Returns the section of the reward models: scores, calibration, accuracy by length."""
    held = [run for run in runs if run.judged]
    words = "How the reward model scores the held-out pairs of its last evaluation. Bars and dots "
    words += "show their numbers when pointed at; intervals are Wilson's, at 95 %."
    parts = [heading("judge", "The judge", words)] if held else []
    for run in held:
        pairs, sides = run.judged, ("chosen", "rejected")
        both = {side: [pair[f"{side}_score"] for pair in pairs] for side in sides}
        edges = look_numbers.even_edges(both["chosen"] + both["rejected"])
        counts = {side: look_numbers.histogram(values, edges) for side, values in both.items()}
        title = f" of {shown(run.name)}" if len(held) > 1 else ""
        keys = '<div class="keys"><span class="key c0">chosen</span>'
        keys += '<span class="key c1">rejected</span></div>'
        drawn = look_svg.histograms("score", edges, counts) + keys
        figures = [figure(f"scores{title}", drawn, "Far apart: easy pairs.")]
        bins = [{"x": one["said"], **one} for one in look_numbers.calibration(pairs)]
        drawn = look_svg.shares("what it said: P(its choice)", "right", bins, diagonal=True)
        figures.append(figure(f"calibration{title}", drawn, calibrated(bins)))
        groups = look_numbers.by_length(pairs)
        names = {place: group["name"] for place, group in enumerate(groups)}
        dots = [{"x": place, **group} for place, group in enumerate(groups)]
        axis = "tokens that the chosen response is shorter or longer"
        drawn = look_svg.shares(axis, "right", dots, names)
        figures.append(figure(f"accuracy by length{title}", drawn, prefers_longer(pairs)))
        parts.append(f'<div class="panels">{"".join(figures)}</div>')
    return "".join(parts) + ("</section>" if held else "")


def figure(title, drawn, words):
    """Returns a picture with its title, and what it says."""
    return f"<figure><figcaption>{title}</figcaption>{drawn}<p>{words}</p></figure>"


def calibrated(bins):
    """Returns in words whether the judge is as sure as it may be."""
    over = sum(one["interval"][1] < one["said"] for one in bins)
    under = sum(one["interval"][0] > one["said"] for one in bins)
    if not over and not under:
        return "On the dashed line within the intervals: as sure as it may be."
    found = ((over, "it is surer than it is right"), (under, "it could be surer"))
    said = "; ".join(f"in {count} of {len(bins)} bins {words}" for count, words in found if count)
    return f"Off the dashed line by more than chance: {said}."


def prefers_longer(pairs):
    """Returns in words whether the judge just prefers what is longer."""
    found = look_numbers.longer_wins(pairs)
    if not found:
        return "All pairs have equal lengths."
    low, high = found["judge_interval"]
    said = f"The longer response has the higher score in {100 * found['judge']:.0f} % of "
    said += f"{found['count']} pairs [{100 * low:.0f}, {100 * high:.0f}], and people chose it in "
    said += f"{100 * found['people']:.0f} %: "
    if low > found["people"]:
        return f"{said}it leans to long responses."
    if high < found["people"]:
        return f"{said}it leans to short responses."
    return f"{said}no more than they do."


# ---- Samples ----
def samples(runs):
    """Returns the section of the samples: what was answered before and after, gamed ones first."""
    rows = []
    for run in runs:
        if run.answers(True) and run.answers(True)[0]["step"] != run.answers(False)[0]["step"]:
            found = look_numbers.changes(run.answers(last=False), run.answers(last=True))
            rows += [{**row, "run": run.name} for row in found]
    if not rows:
        return ""
    count, rows = len(rows), look_numbers.ordered(rows)
    scored = [row for row in rows if "reward_after" in row]
    rows = (scored + [row for row in rows if "reward_after" not in row])[:ROWS]
    gamed = sum(row["gamed"] for row in scored)
    words = "The same held-out prompts at the first evaluation and at the last one. "
    if any("gold_after" in row for row in scored):
        words += f"Of {len(scored)} scored responses {gamed} were gamed: reward rose and gold fell."
    words += f" Shown are {len(rows)} of {count}." if count > len(rows) else ""
    numbers = [n for n in ("reward", "gold", "response_length", "kl") if any_has(rows, n)]
    head = [("prompt", ""), ("before", ""), ("after", ""), *((n, "number") for n in numbers)]
    cells = [sorter(place, name, kind) for place, (name, kind) in enumerate(head)]
    search = '<label>Search <input type="search" id="search"></label> '
    search += '<span id="found" role="status"></span>'
    body = "".join(sample_row(row, numbers) for row in rows)
    table = (
        f'<table id="rows"><thead><tr>{"".join(cells)}</tr></thead><tbody>{body}</tbody></table>'
    )
    inside = f'<p>{search}</p><div class="wide" tabindex="0" role="region" aria-label="Samples">'
    return heading("samples", "Samples", words) + f"{inside}{table}</div></section>"


def any_has(rows, name):
    """Returns whether a number is in any of the rows."""
    return any(f"{name}_after" in row for row in rows)


def sorter(place, name, kind):
    """Returns the head of a column, a button that sorts by it."""
    text = {"response_length": "length", "kl": "KL"}.get(name, name)
    button = f'<button type="button" data-sort="{place}">{text}</button>'
    return f'<th scope="col" class="{kind}">{button}</th>'


def sample_row(row, numbers):
    """Returns a row of the table: texts, and each number before and after."""
    mark = '<b class="gamed">gamed</b> ' if row["gamed"] else ""
    first = f'{mark}{text_cell(row["prompt"])}<span class="run">{shown(row["run"])}</span>'
    cells = [f"<td>{first}</td>"]
    cells += [f"<td>{text_cell(row[when])}</td>" for when in ("before", "after")]
    for name in numbers:
        both = [row.get(f"{name}_{when}") for when in ("before", "after")]
        texts = ["" if value is None else f"{value:.4g}" for value in both]
        key = "" if not is_number(both[1]) else f' data-value="{both[1]:.6g}"'
        arrow = " → ".join(texts) if any(texts) else ""
        cells.append(f'<td class="number" data-name="{name}"{key}>{arrow}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def text_cell(text):
    """Returns what a model wrote, or was asked, as text that stays apart from the page's own."""
    return f'<span class="text" dir="auto">{shown(cut(text))}</span>'
