"""Makes a lab's runs, then its results, tables and picture.

    python course/labs/run.py NAME              makes the runs that are not there yet, and draws
    python course/labs/run.py NAME --plot       tables and picture from the committed results alone
    python course/labs/run.py NAME --dry_run    the commands of its runs
    python course/labs/run.py NAME --quick      one seed of an arm and of its baseline: some minutes
    python course/labs/run.py --plot            all of them, and those of README.md and all.md
    python course/labs/run.py                   lists the labs

--seeds 4 5 6 adds seeds, and --arms gae rloo makes the runs of some arms alone. A lab is declared
in declared/NAME.json, which ends with its results; --quick writes those of its own beside the runs.
Of the pictures, believe/ is in git. The others are drawn where their pages say.
"""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import pages  # noqa: E402
import pictures  # noqa: E402
import runner  # noqa: E402
from declared import GIVEN, LABS, quick  # noqa: E402

sys.path.insert(0, str(HERE.parents[1] / "recipes/arithmetic"))
import generate  # noqa: E402


def write_lines(file, rows):
    """Writes a .jsonl file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_text(file):
    """Writes plain text for {text}: the questions of the toy with their responses."""
    rows = runner.lines_of(runner.ROOT / "recipes/toy/data", "train.jsonl")[:2000]
    write_lines(file, [{"text": row["prompt"] + row["response"]} for row in rows])


def write_sums(folder):
    """Writes data with three operations for {sums}; the same 200 such sums are held out in both.

    hard: 1,600 sums. both: 1,600 with two operations, then those. Each prompt is there once.
    """
    rng = random.Random(1)
    three = generate.rows_of(generate.draw_sums(3, 1800, rng), rng)
    two = generate.rows_of(generate.draw_sums(2, 1600, rng), rng)
    for name, rows in (("hard", three[200:]), ("both", two + three[200:])):
        write_lines(folder / name / "train.jsonl", rows)
        write_lines(folder / name / "test.jsonl", three[:200])


def write_given(name):
    """Writes the data of one of the names in GIVEN."""
    at = GIVEN[name]
    if name in ("text", "sums"):
        (write_text if name == "text" else write_sums)(at)
    elif name == "vllm":
        if not at.exists():
            raise SystemExit(f"There is no vLLM at {at}: make vllm, or set VLLM_PYTHON")
    else:
        words = ["course/exercises.py", "0.5"] if name == "half" else ["recipes/smollm2/make.py"]
        subprocess.run([sys.executable, *words, at], cwd=runner.ROOT, check=True)


def summary():
    """Returns {file: figure} of course/labs/README.md."""
    forests = enumerate(pictures.of_topics(LABS), 1)
    figures = {HERE / f"topics/{number}.png": forest for number, forest in forests}
    for name, belief in json.loads((HERE / "believe.json").read_text()).items():
        draw = pictures.of_pace if "marked" in belief else pictures.of_belief
        figures[HERE / f"believe/{name}.png"] = draw(belief, LABS)
    return figures


def places_of(name):
    """Returns a lab's declaration, its page and its picture."""
    return runner.DECLARED / f"{name}.json", HERE / f"{name}.md", HERE / f"{name}.png"


def main():
    parser = runner.new_parser(__doc__, LABS, "output/labs")
    parser.add_argument("--dry_run", action="store_true", help="print the commands alone")
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of the lab's own")
    parser.add_argument("--quick", action="store_true", help="two arms, one seed: no evidence")
    parser.add_argument("--arms", nargs="+", default=(), help="make the runs of these alone")
    args = parser.parse_args()
    if args.name is None and args.plot:
        for file, figure in summary().items():
            pictures.save(figure, file, 120)
        for name in filter(runner.results_of, LABS):
            pages.study(LABS[name], None, 0, *places_of(name), plot_only=True)
        pages.put(HERE / "README.md", *pages.reasons(LABS))
        return pages.put(HERE / "all.md", pages.overview(LABS))
    if args.name is None:
        for name, lab in LABS.items():
            known = "run" if runner.results_of(name) else "not run yet"
            print(f"{name:22} {lab.title} ({known})")
        return
    name, lab = args.name, LABS[args.name]
    if (at := lab.commit) and not args.plot:
        parser.error(
            f"{name} was run at commit {at}, with a flag that has left since. To repeat it:\n"
            f"  git worktree add ../{at} {at} && cd ../{at} && python course/labs/run.py {name}"
        )
    if unknown := set(args.arms) - set(lab.arms):
        parser.error(f"no arms of {name}: {sorted(unknown)}; it has {list(lab.arms)}")
    lab = replace(lab, seeds=tuple(args.seeds or lab.seeds), chosen=tuple(args.arms))
    places, root = places_of(name), args.runs.resolve()
    if args.quick:
        lab = quick(lab)
        places = [root / f"{name}-quick{kind}" for kind in (".json", ".md", ".png")]
    if args.dry_run:
        return runner.show(lab.chains(), root)
    if not args.plot:
        for given in lab.given:
            write_given(given)
    pages.study(lab, root, args.jobs, *places, args.plot)


if __name__ == "__main__":
    main()
