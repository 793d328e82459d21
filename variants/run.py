"""Applies variants to copies of the code, checks them, and compares them with the unchanged script.

    python variants/run.py --check                   every variant: two steps, and tests/fork.py
    python variants/run.py gspo                      its runs on the toy: results.json, picture
    python variants/run.py --table                   the table of the README, from results.json

After `make demo`: the runs start from its models (--models output/demo). A variant is a folder with
NAME.diff, or new files for the top of the tree, and with arms.json: what is run. A run that is
there (in output/variants) is not made again.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NAMES = sorted(file.parent.name for file in HERE.glob("*/arms.json"))
METRICS = ("eval_gold", "eval_reward", "eval_kl", "eval_response_length")


def apply(name, folder):
    """Copies the code to `folder`, and applies the variant there (none if name is "")."""
    shutil.rmtree(folder, ignore_errors=True)
    skipped = shutil.ignore_patterns(".git", ".venv", "output", "__pycache__", "variants", "labs")
    shutil.copytree(ROOT, folder, ignore=skipped)
    for file in HERE.glob(f"{name}/*.py") if name else ():
        shutil.copy(file, folder)
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}  # of our repository
    for diff in HERE.glob(f"{name}/*.diff") if name else ():
        subprocess.run(["git", "apply", diff], cwd=folder, env=outside, check=True)


def declared(name):
    """Returns arms.json of a variant.

    steps: of each run. all: flags of all arms. arms: {name: [script, flags]}; "variant:ppo.py" is
    the script with the diff. hidden: metrics that mean something else there. models: {name:
    [script, flags]}, made first, for the arms to name as {name}. check, rows: the script and flags
    for tests/fork.py, and its rows.
    """
    return json.loads((HERE / name / "arms.json").read_text())


def call(words, folder):
    """Runs a command in a copy of the code, on one rank; ends the program if it fails."""
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(folder)}
    words = [str(word) for word in words]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def flags_of(text, models, **others):
    """Returns the words of flags, with {sft}, {reward}, {variant} and the others filled in."""
    places = {"sft": models / "sft", "reward": models / "reward", "variant": HERE, **others}
    return shlex.split(text.format(**places))


# ---- Checks ----
def check(name, models, base, *layouts, steps=2):
    """Applies a variant to a copy, makes steps of the toy there, and runs tests/fork.py.

    layouts: flags for it, such as --quick.
    """
    folder, what = base / "tree", declared(name)
    apply(name, folder)
    script, flags = what["check"]
    flags = flags_of(flags, models)
    place = ["--max_steps", steps, "--overwrite", "--output_dir", base / "steps"]
    call([sys.executable, script, *flags, *place], folder)
    rows = ["--rows", what.get("rows", 8), "--keep", base / "fork"]
    call([sys.executable, "tests/fork.py", *layouts, *rows, script, *flags], folder)


def lines_changed(name):
    """Returns "+12 -3" of a variant's diff, or how many lines its new script has."""
    text = "".join(file.read_text() for file in HERE.glob(f"{name}/*.diff"))
    if not text:
        count = sum(len(file.read_text().splitlines()) for file in HERE.glob(f"{name}/*.py"))
        return f"+{count}, a new file"
    return " ".join(f"{c}{len(re.findall(rf'^[{c}](?![{c}]{{2}})', text, re.M))}" for c in "+-")


# ---- Runs ----
def make_runs(name, models, base, seeds):
    """Makes the runs of all arms over the seeds, and writes results.json after each seed."""
    what, results, made = declared(name), {}, {}
    for model, (script, flags) in what.get("models", {}).items():
        made[model] = base / f"{name}-{model}"
        if not (made[model] / "config.json").exists():
            apply("", base / "tree-unchanged")
            place = ["--output_dir", made[model], "--overwrite"]
            words = [sys.executable, script, *flags_of(flags, models), *place]
            call(words, base / "tree-unchanged")
    for count, seed in enumerate(seeds, 1):
        for arm, (script, flags) in what["arms"].items():
            owner = name if script.startswith("variant:") else "unchanged"
            text = f"{what['all']} {flags} {what['steps']}"
            output = base / f"{owner}-{hashlib.sha1(text.encode()).hexdigest()[:8]}-{seed}"
            if not (output / "config.json").exists():
                tree = base / f"tree-{owner}"
                apply(name if owner == name else "", tree)
                words = flags_of(f"{what['all']} {flags}", models, **made)
                place = ["--seed", seed, "--output_dir", output, "--overwrite"]
                place += ["--max_steps", what["steps"], "--eval_steps", what["steps"] // 3]
                call([sys.executable, script.removeprefix("variant:"), *words, *place], tree)
            lines = (output / "metrics.jsonl").read_text().splitlines()
            records = [record for record in map(json.loads, lines) if "eval_gold" in record]
            hidden = what.get("hidden", []) if owner == name else []
            names = [metric for metric in ("step", *METRICS) if metric not in hidden]
            curve = [{key: record[key] for key in names if key in record} for record in records]
            results.setdefault(arm, {})[seed] = curve
        record = {"steps": what["steps"], "seeds": list(seeds[:count]), "arms": results}
        (HERE / name / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(name)


def cell(results, arm, metric, step=-1):
    """Returns mean [smallest, largest] over the seeds of an arm's metric, at an evaluation."""
    values = [curve[step][metric] for curve in results["arms"][arm].values()]
    span = f" [{min(values):.3f}, {max(values):.3f}]" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{span}"


def table(name):
    """Returns the table of a variant's README, in Markdown."""
    results = json.loads((HERE / name / "results.json").read_text())
    steps, seeds = results["steps"], len(results["seeds"])
    head = [f"{steps} steps, {seeds} seed{'s' * (seeds > 1)}", "gold", "KL", "length"]
    lines = [head, ["---"] * len(head)]
    for arm, curves in results["arms"].items():
        found = next(iter(curves.values()))[-1]
        names = ("eval_gold", "eval_kl", "eval_response_length")
        lines.append([arm, *(cell(results, arm, n) if n in found else "" for n in names)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(name):
    """Draws gold against steps and against KL, means over the seeds, as curves.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = json.loads((HERE / name / "results.json").read_text())
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), sharey=True)
    for arm, curves in results["arms"].items():
        for axis, x in zip(axes, ("step", "eval_kl")):
            points = [
                [statistics.mean(c[i][key] for c in curves.values()) for key in (x, "eval_gold")]
                for i in range(min(map(len, curves.values())))
                if all(x in c[i] for c in curves.values())
            ]
            if points:
                axis.plot(*zip(*points), marker="o", label=arm)
    axes[0].set(xlabel="step", ylabel="gold score of held-out prompts")
    axes[1].set(xlabel="KL to the SFT model, nats a response")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / name / "curves.png", dpi=80)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; all for --check")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--models", type=Path, default=ROOT / "output/demo")
    parser.add_argument("--out", type=Path, default=ROOT / "output/variants")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    for name in args.names or NAMES:
        if args.table:
            print(f"\n{name} ({lines_changed(name)})\n\n{table(name)}")
        elif args.check:
            check(name, args.models.resolve(), args.out.resolve() / "check")
            print(f"{name}: equal on all layouts, and when resumed", flush=True)
        else:
            make_runs(name, args.models.resolve(), args.out.resolve(), args.seeds)
            print(f"{name}\n{table(name)}", flush=True)


if __name__ == "__main__":
    main()
