"""Puts look.py's page together, and makes its first screen: steps, one prompt, verdicts."""

import base64
import datetime
import hashlib
from collections import Counter
from pathlib import Path

import look_curves
import look_sections
import look_verdicts
from look_runs import TITLES, is_number
from look_text import number, shown

HERE = Path(__file__).resolve().parent
MARK = '<meta name="generator" content="tools/look.py">'
STEPS = {  # the metrics of the first table
    "sft": ("eval_loss", "eval_perplexity"),
    "reward": ("eval_accuracy", "eval_loss"),
    "ppo": ("eval_gold", "eval_reward", "eval_kl", "eval_response_length"),
}
SIGNS = {
    look_verdicts.HEALTHY: "✓",
    look_verdicts.WATCH: "!",
    look_verdicts.SICK: "✕",
    look_verdicts.UNKNOWN: "?",
}


def page(title, runs, asked, notes):
    """Returns the whole page as text.

    asked: prompts with their answers (look_answers). notes: what could not be read or asked.
    """
    tokens, data = look_sections.microscope(runs)
    sections = {
        "steps": first_screen(runs, asked, notes),
        "curves": look_curves.curves([run for run in runs if run.metrics]),
        "tokens": tokens,
        "judge": look_sections.judges(runs),
        "samples": look_sections.samples(runs),
    }
    titles = {"steps": "Overview", "tokens": "Tokens"}
    links = [
        f'<a href="#{key}">{titles.get(key, key.capitalize())}</a>'
        for key, text in sections.items()
        if text
    ]
    style, script = ((HERE / f"look_page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    code = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing is fetched, and no script runs but ours, whatever a model has written
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{code}'"
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{allowed}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{MARK}
<title>{shown(title)}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{shown(title)}</h1><p>made {now} by tools/look.py</p>
<nav aria-label="Parts of this page">{"".join(links)}</nav></header>
<main>{"".join(sections.values())}</main>
<script type="application/json" id="data">{look_sections.script_data(data)}</script>
<script>{script}</script>
</body>
</html>
"""


# ---- The first screen ----
def first_screen(runs, asked, notes):
    """Returns the first section: the steps, one prompt answered by all models, verdicts."""
    parts = [f'<section id="steps"><div class="first"><div>{steps(runs)}</div>']
    parts.append(f"<div>{answers(asked)}{counted(runs)}</div></div>{verdicts(runs)}")
    if notes:
        items = "".join(f"<li>{shown(note)}</li>" for note in notes)
        parts.append(f'<ul class="notes">{items}</ul>')
    return "".join(parts) + "</section>"


def steps(runs):
    """Returns the table of the steps: before, after, known limit."""
    head = "".join(f'<th scope="col">{n}</th>' for n in ("metric", "before", "after", "limit"))
    parts = [f'<table class="steps"><thead><tr>{head}</tr></thead>']
    for run in runs:
        metrics = STEPS.get(run.script) or sorted(others(run))[:6]
        rows = [step_row(run, metric) for metric in metrics if run.values(metric)]
        title = TITLES.get(run.script, run.script)
        words = f"<b>{shown(title)}</b> {shown(run.name)}: {shown(run.state)}"
        top = f'<tr><th scope="rowgroup" colspan="4">{words}</th></tr>'
        parts.append(f"<tbody>{top}{''.join(rows)}</tbody>")
    return "<h2>The steps</h2>" + "".join(parts) + "</table>"


def others(run):
    """Returns the names of a run's eval_... metrics."""
    return {name for line in run.metrics for name in line if name.startswith("eval_")}


def step_row(run, metric):
    """Returns one metric's row: at the first evaluation, at the last one, and its limit."""
    values, limit = run.values(metric), run.limits.get(metric)
    cells = [number(float(f"{values[0]:.3g}"))]
    cells.append(f"<b>{number(float(f'{values[-1]:.3g}'))}</b>" if len(values) > 1 else "")
    cells.append(number(float(f"{limit:.3g}")) if is_number(limit) else "")
    cells = "".join(f'<td class="number">{cell}</td>' for cell in cells)
    return f'<tr><th scope="row">{shown(metric)}</th>{cells}</tr>'


def answers(asked):
    """Returns a few prompts, of which one is shown, with all models' answers side by side."""
    if not asked:
        return "<h2>One prompt</h2><p>There are no samples of it yet.</p>"
    options, blocks = [], []
    for place, one in enumerate(asked):
        prompt = look_sections.cut(one["prompt"])
        options.append(f'<option value="{place}">{shown(" ".join(prompt.split())[:80])}</option>')
        cards = "".join(card(answer) for answer in one["answers"])
        hidden = " hidden" if place else ""
        words = look_sections.text_cell(prompt)
        block = f'<p class="prompt">{words}</p><div class="cards">{cards}</div>'
        blocks.append(f'<div class="asked" data-asked="{place}"{hidden}>{block}</div>')
    choice = f'<select id="asked" aria-label="Which prompt">{"".join(options)}</select>'
    choice = f"<p>{choice}</p>" if len(asked) > 1 else ""
    return f"<h2>One held-out prompt, all models</h2>{choice}{''.join(blocks)}"


def card(answer):
    """Returns one model's answer with its scores."""
    scores = [
        f"{name} <b>{answer[name]:.2f}</b>"
        for name in ("reward", "gold")
        if is_number(answer.get(name))
    ]
    scores += [f"<i>{shown(answer['note'])}</i>"] if answer.get("note") else []
    text = look_sections.text_cell(answer["text"].strip() or "(empty)")
    line = f'<p class="scores">{" · ".join(scores)}</p>'
    return f'<article class="card"><h3>{shown(answer["name"])}</h3>{text}{line}</article>'


def badge(status, text):
    """Returns a status with its sign and its colour."""
    return f'<span class="badge {status.replace(" ", "-")}">{SIGNS[status]} {text}</span>'


def counted(runs):
    """Returns how many verdicts there are of each status."""
    found = Counter(status for run in runs for _, status, _ in look_verdicts.of(run))
    badges = [badge(status, f"{found[status]} {status}") for status in SIGNS if found[status]]
    link = '<a href="#verdicts">Verdicts</a>: '
    return f'<p class="counted">{link}{", ".join(badges)}</p>' if badges else ""


def verdicts(runs):
    """Returns the verdicts: each row of README's table of what is healthy and what is sick."""
    parts = []
    for run in runs:
        items = []
        for metrics, status, words in look_verdicts.of(run):
            name = f'<span class="metrics">{shown(metrics)}</span>'
            items.append(f"<li>{badge(status, status)}<span>{shown(words)} {name}</span></li>")
        if items:
            title = f"{TITLES[run.script]} ({run.name})"
            parts.append(f"<div><h3>{shown(title)}</h3><ul>{''.join(items)}</ul></div>")
    if not parts:
        return ""
    words = "Each row of README's table, What to look at, judged on this run's metrics."
    inside = f'<div class="verdicts">{"".join(parts)}</div>'
    return f'<h2 id="verdicts">Verdicts</h2><p class="words">{words}</p>{inside}'
