"""Makes a lab's runs, then its results, table and picture.

    python labs/run.py NAME              makes the runs that are not there yet, and draws
    python labs/run.py NAME --plot       table and picture from labs/results/NAME.json alone
    python labs/run.py                   lists the labs

A lab is declared in labs/declared.py.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import runner  # noqa: E402
from declared import LABS, TEXT  # noqa: E402


def write_text(file):
    """Writes plain text for {text}: the questions of the toy with their responses."""
    rows = (runner.ROOT / "toy/data/train.jsonl").read_text().splitlines()[:2000]
    texts = [{"text": row["prompt"] + row["response"]} for row in map(json.loads, rows)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(text) + "\n" for text in texts))


def main():
    args = runner.new_parser(__doc__, LABS, "output/labs").parse_args()
    if args.name is None:
        for name, lab in LABS.items():
            known = "results here" if runner.read(HERE / f"results/{name}.json") else "not run yet"
            print(f"{name:16} {lab.title} ({known})")
        return
    write_text(TEXT)
    places = [HERE / name.format(args.name) for name in ("results/{}.json", "{}.md", "{}.png")]
    runner.study(LABS[args.name], args.runs.resolve(), args.jobs, *places, args.plot)


if __name__ == "__main__":
    main()
