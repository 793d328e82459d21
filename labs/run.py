"""Makes a lab's runs, then its results, table and picture.

    python labs/run.py NAME              makes the runs that are not there yet, and draws
    python labs/run.py NAME --plot       table and picture from labs/results/NAME.json alone
    python labs/run.py NAME --dry_run    the commands of its runs, and about how long they take
    python labs/run.py NAME --quick      one seed of one arm and of its baseline: some minutes
    python labs/run.py                   lists the labs

More runs: --seeds 4 5 6 adds seeds, and --arms gae rloo makes the runs of some arms alone; --again
has each actor answer 280 held-out prompts four times at its end, and --second takes data that no
setting was chosen on. The last two write results of their own, labs/results/NAME-again.json, and
leave the page as it is; so does --quick. A lab is declared in labs/declared.py.
"""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import runner  # noqa: E402
from declared import HALF, LABS, SECOND, SUMS, TEXT, again, quick, second  # noqa: E402

sys.path.insert(0, str(HERE.parent / "toy/arithmetic"))
import generate  # noqa: E402


def write_text(file):
    """Writes plain text for {text}: the questions of the toy with their responses."""
    rows = (runner.ROOT / "toy/data/train.jsonl").read_text().splitlines()[:2000]
    texts = [{"text": row["prompt"] + row["response"]} for row in map(json.loads, rows)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(text) + "\n" for text in texts))


def write_sums(folder):
    """Writes data with three operations for {sums}; the same 200 such sums are held out in both.

    hard: 1,600 sums. both: 1,600 with two operations, then those. Each prompt is there once.
    """
    rng = random.Random(1)
    three = generate.rows_of(generate.draw_sums(3, 1800, rng), rng)
    two = generate.rows_of(generate.draw_sums(2, 1600, rng), rng)
    for name, rows in (("hard", three[200:]), ("both", two + three[200:])):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file, part in (("train", rows), ("test", three[:200])):
            text = "".join(json.dumps(row) + "\n" for row in part)
            (folder / name / f"{file}.jsonl").write_text(text)


def main():
    parser = runner.new_parser(__doc__, LABS, "output/labs")
    parser.add_argument("--dry_run", action="store_true", help="print the commands alone")
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of the lab's own")
    parser.add_argument("--quick", action="store_true", help="two arms, one seed: no evidence")
    parser.add_argument("--arms", nargs="+", default=(), help="make the runs of these alone")
    parser.add_argument("--again", action="store_true", help="four answers to 280 prompts")
    parser.add_argument("--second", action="store_true", help="other data")
    args = parser.parse_args()
    if args.name is None:
        for name, lab in LABS.items():
            known = "results here" if runner.read(HERE / f"results/{name}.json") else "not run yet"
            print(f"{name:22} {lab.title} ({known})")
        return
    name, lab = args.name, LABS[args.name]
    if args.seeds:
        lab = replace(lab, seeds=tuple(args.seeds))
    if unknown := set(args.arms) - set(lab.arms):
        parser.error(f"no arms of {name}: {sorted(unknown)}; it has {list(lab.arms)}")
    lab = replace(lab, chosen=tuple(args.arms))
    if args.quick:
        name, lab = f"{name}-quick", quick(lab)
    if args.again:
        name, lab = f"{name}-again", again(lab)
    if args.second:
        name, lab = f"{name}-second", second(lab)
    if args.dry_run:
        return runner.show(lab.chains(), args.runs.resolve(), args.jobs)
    write_text(TEXT)
    if "sums" in lab.given:
        write_sums(SUMS)
    if "second" in lab.given:
        make = [sys.executable, runner.ROOT / "toy/make.py", "--seed", "5678", "--out", SECOND]
        subprocess.run(make, check=True)
    if "half" in lab.given:
        subprocess.run([sys.executable, runner.ROOT / "course/swapped.py", "0.5", HALF], check=True)
    places = [HERE / file.format(name) for file in ("results/{}.json", "{}.md", "{}.png")]
    runner.study(lab, args.runs.resolve(), args.jobs, *places, args.plot)


if __name__ == "__main__":
    main()
