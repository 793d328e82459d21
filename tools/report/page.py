"""Puts look.py's page together, of page.html, page.css and page.js."""

import base64
import hashlib
import time
from collections import Counter
from pathlib import Path

import jinja2
from markupsafe import Markup

from tools.report import answers, pictures, runs, samples, verdicts
from tools.report.text import cut, is_number, number, visible

HERE = Path(__file__).resolve().parent
MARK = '<meta name="generator" content="tools/look.py">'


def page(title, found, notes):
    """Returns the whole page of the Runs as text. notes: of what could not be read, and rates."""
    template = environment().get_template("page.html")
    style, script = (Markup((HERE / f"page.{kind}").read_text("utf-8")) for kind in ("css", "js"))
    code = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    judged = {run.name: verdicts.of(run, found) for run in found}
    return template.render(
        # Nothing is fetched, and no script runs but ours, whatever a model has written
        allowed=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{code}'",
        mark=Markup(MARK),
        style=style,
        script=script,
        title=title,
        made=time.strftime("%Y-%m-%d %H:%M"),
        notes=notes,
        runs=found,
        differences=runs.differences(found),
        asked=answers.asked(found),
        verdicts=judged,
        counts=Counter(status for rows in judged.values() for _, status, _ in rows),
        curves=pictures.curves(found),
        most=pictures.MOST,
        tokens=samples.microscope(found),
        judges=[(run.name, samples.judge(run)) for run in found if run.judged],
        samples=samples.tables(found),
    )


def environment():
    """Returns jinja2's settings: every text is escaped, and what hides in it is written out."""

    def finalize(value):
        return value if isinstance(value, Markup) else visible(value)

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(cut=cut, number=number)
    made.tests["number"] = is_number
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return made
