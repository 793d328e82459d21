"""See what happened in a run: one page about any of our output folders, finished or running.

    python tools/look.py output/demo                     writes output/demo/report.html
    python tools/look.py output/ppo output/ppo-2         two runs over each other
    python tools/look.py output/ppo --out page.html

The page holds the steps with their limits, one prompt answered by all models, verdicts on the
metrics, curves, the numbers of single tokens, how good the reward model is, and the samples. It
needs no network and no server: open it in a browser. The curves of each run are also drawn as a
picture, curves.png, in its own folder. The verdicts that are "sick" or "watch" are printed, too,
and so are learning rates that are not those of the run's preset.
"""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machinery import flags
from machinery.refused import Refused, program
from tools.report import page, plots, runs, verdicts


def get_args(argv=None):
    """Returns the flags."""
    parser = flags.new_parser(__doc__)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="runs, or folders of them")
    parser.add_argument("--out", metavar="FILE", help="[report.html in the first folder]")
    args = parser.parse_args(argv)
    args.out = Path(args.out or Path(args.folders[0]) / "report.html")
    return args


def refuse_foreign(out):
    """Refuses to replace what is no page of ours: another file, a folder, a device or a pipe.

    (Nothing is read from what is no file: a pipe would not end.)
    """
    if out.exists() and not (out.is_file() and page.MARK in out.read_text(errors="replace")):
        words = f"--out {out} is there, and no page of ours.\n  Name a new file."
        raise Refused("foreign-page", words)


def draw_curves(run):
    """Draws curves.png in the run's folder. A picture that fails costs no page."""
    try:
        plots.draw(run, f"{run.title()}, {run.path}")
    except Exception as error:  # the folder cannot be written to, a metric has an odd name, ...
        print(f"{run.path}/curves.png could not be drawn: {error!r}")


def main(argv=None):
    args = get_args(argv)
    with contextlib.suppress(AttributeError):  # of a notebook's output, which takes all characters
        sys.stdout.reconfigure(errors="backslashreplace")
    found = runs.find(args.folders)
    refuse_foreign(args.out)
    notes = []
    for run in found:
        if run.broken:
            lost = ", ".join(f"{count} of {name}" for name, count in run.broken.items())
            notes.append(f"{run.path}: lines that could not be read were left out: {lost}.")
        if other := runs.other_rates(run):
            notes.append(f"{run.path}: {other}.")
    title = " + ".join(dict.fromkeys(folder.rstrip("/") for folder in args.folders))
    words = page.page(title, found, notes)
    try:
        args.out.write_text(words, encoding="utf-8")
    except OSError as error:
        raise Refused("no-page", f"--out {args.out} cannot be written: {error}.") from error
    for run in found:
        draw_curves(run)
    for own, rows in runs.differences(found):
        print(f"flags that differ between {', '.join(run.name for run in own)}:")
        for flag, values in rows:
            print(f"  {flag}: {', '.join(values)}")
    for note in notes:
        print(note)
    for run in found:
        for metrics, status, words in verdicts.of(run, found):
            if status in (verdicts.SICK, verdicts.WATCH):
                print(f"{run.name}: {status}: {metrics}: {words}")
    print(f"{args.out}: {len(found)} run{'s' * (len(found) > 1)}. Open it in a browser.")


if __name__ == "__main__":
    program(main)
