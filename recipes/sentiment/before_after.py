"""What PPO changed: its evaluations, and the first held-out responses before and after.

    python recipes/sentiment/before_after.py output/sentiment/ppo --picture gold.png

For the first run it prints the first twenty evaluated responses, not hand-picked ones. The
picture shows reward and gold against KL, a line for each run and a dot for each evaluation. In
Figure 1 of [Gao 2022] that axis is the square root of KL.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from machinery.metrics import mean_interval  # noqa: E402

COLUMNS = {"reward": "reward", "gold": "gold", "kl": "KL", "response_length": "tokens"}


def read(file):
    """Returns the dicts of a .jsonl file."""
    return [json.loads(line) for line in open(file)]


def evaluations(folder):
    """Returns the lines of metrics.jsonl that have an evaluation."""
    return [line for line in read(folder / "metrics.jsonl") if "eval_reward" in line]


def print_table(folder):
    """Prints a run's evaluations: means over the held-out responses, KL in nats a response."""
    lines = evaluations(folder)
    names = [name for name in COLUMNS if f"eval_{name}" in lines[0]]
    print(f"\n{folder}\n{'step':>6}" + "".join(f"{COLUMNS[name]:>9}" for name in names))
    for line in lines:
        numbers = "".join(f"{line[f'eval_{name}']:9.3f}" for name in names)
        print(f"{line['step']:6}{numbers}")


def words_of(prompt):
    """Returns a prompt as text; of a chat, its last message."""
    return json.loads(prompt)[-1]["content"] if prompt.startswith("[{") else prompt


def print_samples(folder, count):
    """Prints the first `count` responses before training, and those to the same prompts after."""
    lines = [line for line in read(folder / "samples.jsonl") if line.get("sample", 0) == 0]
    last = max(line["step"] for line in lines)
    before, after = ({s["row"]: s for s in lines if s["step"] == step} for step in (0, last))
    gains = [after[row]["reward"] - before[row]["reward"] for row in before]
    mean, (_, high) = fmean(gains), mean_interval(gains)
    print(f"\nOn the same {len(gains)} prompts reward rose by {mean:.3f} ± {high - mean:.3f}")
    print(f"\nThe first {count} of {len(before)} held-out prompts, before and after {folder}")
    for row in sorted(before)[:count]:
        print(f"\n{row + 1:4}  {words_of(before[row]['prompt'])!r}")
        for name, line in (("before", before[row]), ("after", after[row])):
            print(f"      {name:7}{line['reward']:6.2f}  {line['response']!r}")


def draw(folders, file):
    """Draws reward and, where it is known, gold against KL."""
    runs = {str(folder): evaluations(folder) for folder in folders}
    names = [name for name in ("reward", "gold") if f"eval_{name}" in next(iter(runs.values()))[0]]
    figure, axes = pyplot.subplots(1, len(names), figsize=(4.5 * len(names), 3.2), squeeze=False)
    for name, axis in zip(names, axes[0]):
        for label, lines in runs.items():
            if "eval_kl" not in lines[0]:
                raise SystemExit(f"{label} has logged no KL: run it with --log_kl 1")
            points = [[line[f"eval_{key}"] for line in lines] for key in ("kl", name)]
            axis.plot(*points, marker="o", markersize=4, label=label)
        axis.set(xlabel="KL, nats a response", ylabel=f"{name}, held out")
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="runs of ppo.py")
    parser.add_argument("--samples", type=int, default=20, help="responses to print")
    parser.add_argument("--picture", help="a file for the picture")
    args = parser.parse_args()
    for folder in args.folders:
        print_table(folder)
    print_samples(args.folders[0], args.samples)
    if args.picture:
        draw(args.folders, args.picture)


if __name__ == "__main__":
    main()
