"""See what happened in a run: one page about any of our output folders, finished or running.

    python tools/look.py output/demo                     writes output/demo/report.html
    python tools/look.py output/ppo output/ppo-2         two runs over each other
    python tools/look.py output/ppo --out page.html

The page holds the steps with their limits, one prompt answered by all models, verdicts on the
metrics, curves, the numbers of single tokens, how good the reward model is, and the samples. It
needs no network and no server: open it in a browser.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import look_answers
import look_page
import look_runs

from machinery.base import refused
from machinery.flags import declaring


def get_args(argv=None):
    """Returns the flags."""
    parser = declaring.new_parser(__doc__)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="runs, or folders of them")
    arg = declaring.flag_group(parser, "what is made")
    arg("out", str, "the page; None: report.html in the first folder", metavar="FILE")
    asks = "1: load ema/ and the reward model to answer a few prompts; None: if they are small"
    arg("ask", int, asks, most=1)
    args = parser.parse_args(argv)
    declaring.check_numbers(
        args, [action for action in parser._actions if hasattr(action, "least")]
    )
    args.out = Path(args.out or Path(args.folders[0]) / "report.html")
    return args


def refuse_foreign(out):
    """Ends the program if the page cannot be written, or would replace a file that is none."""
    if not out.parent.is_dir() or out.is_dir():
        refused.fail(f"--out {out}: name a file, in a folder that is there.")
    if out.exists() and look_page.MARK not in out.read_text(errors="replace"):
        refused.fail(f"--out {out} is there, and no page of ours.\n  Take another name.")


def main():
    args = get_args()
    runs = look_runs.find(args.folders)
    refuse_foreign(args.out)
    asked, notes = look_answers.asked(runs, args.ask)
    for run in runs:
        lost = ", ".join(f"{count} of {name}" for name, count in run.broken.items())
        notes += (
            [f"{run.path}: lines that could not be read were left out: {lost}."] if lost else []
        )
    title = " + ".join(dict.fromkeys(folder.rstrip("/") for folder in args.folders))
    try:
        args.out.write_text(look_page.page(title, runs, asked, notes), encoding="utf-8")
    except OSError as error:
        refused.fail(f"--out {args.out}: {error.strerror}.\n  Take another file.")
    for note in notes:
        print(note)
    print(f"{args.out}: {len(runs)} run{'s' * (len(runs) > 1)}. Open it in a browser.")


if __name__ == "__main__":
    main()
