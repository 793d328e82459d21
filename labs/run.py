"""Makes a lab's runs, then its results, table and picture.

    python labs/run.py NAME              makes the runs that are not there yet, and draws
    python labs/run.py NAME --plot       table and picture from labs/results/NAME.json alone
    python labs/run.py                   lists the labs

A lab is declared in labs/declared.py. A run that was interrupted goes on where it was; one that is
there is not made again, also if another lab has made it.
"""

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import runner  # noqa: E402
from declared import BASE, LABS, SCRIPTS  # noqa: E402


def chain(lab, arm, seed, root):
    """Returns {script: Run} of an arm: the whole pipeline, up to the lab's last script."""
    runs = {}
    for script in SCRIPTS[: SCRIPTS.index(lab.until) + 1]:
        flags = runner.merged(BASE[script], arm.get(script, ""))
        parents = tuple(runs.items())
        if any("{text}" in word for word in flags):
            parents += (("text", root / "text.jsonl"),)
        last = {name: arm.get(name, "") for name in ("fault", "variant")}
        own = last if script == lab.until else {}
        runs[script] = runner.Run(f"{script}.py", flags, seed, parents, **own)
    return runs


def all_chains(lab, root):
    """Returns {(arm, seed): {script: Run}}."""
    pairs = [(name, seed) for seed in lab.seeds for name in lab.arms]
    return {(name, seed): chain(lab, lab.arms[name], seed, root) for name, seed in pairs}


def write_text(file):
    """Writes plain text for {text}: the questions of the toy with their responses."""
    rows = (HERE.parent / "toy/data/train.jsonl").read_text().splitlines()[:2000]
    texts = [{"text": row["prompt"] + row["response"]} for row in map(json.loads, rows)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(text) + "\n" for text in texts))


def get_args(argv=None):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=list(LABS))
    parser.add_argument("--plot", action="store_true", help="make no runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each")
    parser.add_argument("--runs", default="output/labs", help="where the runs are kept")
    return parser.parse_args(argv)


def main():
    args = get_args()
    if args.name is None:
        for name, lab in LABS.items():
            known = "results here" if runner.read(HERE / f"results/{name}.json") else "not run yet"
            print(f"{name:16} {lab.title} ({known})")
        return
    lab, root = LABS[args.name], Path(args.runs).resolve()
    write_text(root / "text.jsonl")
    places = [HERE / name.format(args.name) for name in ("results/{}.json", "{}.md", "{}.png")]
    runner.study(lab, all_chains(lab, root), root, args.jobs, *places, plot_only=args.plot)


if __name__ == "__main__":
    main()
