"""Runs a case of the clinic again:  python course/clinic/cases.py 07

This repeats the three steps that made the folder course/clinic/07, on one core, and writes what
look.py needs of them to output/clinic/07/runs.json. Runs that several cases share are made first. A
run that is already in output/clinic/runs is not made again. Names that begin with "healthy" are
runs without a fault.
    python course/clinic/cases.py               lists the names
    python course/clinic/cases.py 07 --keep     writes to course/clinic/07, which is in git
With --keep, a step that a healthy run has as well is not stored again: runs.json says where it is.
The flags and the fault of each case are in course/clinic/solutions: do not look there too early.
"""

import argparse
import json
import os
import re
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "course/labs")]
import declared  # noqa: E402
import runner  # noqa: E402

ASKED = "--num_samples 70 --max_answer_seq_len 48 --gold_fn recipes/toy/gold.py:gold"
BASE = {  # the labs' base, a smaller toy run; here step 1 answers prompts as well
    **declared.BASES["toy"],
    "sft": " ".join(runner.merged(declared.BASES["toy"]["sft"], ASKED)),
}
GRPO = "--advantage grpo --samples_per_prompt 4 --reward_fn course/clinic/verifiers.py:right"
HEALTHY = {f"healthy-{seed}": {"seed": seed} for seed in (1, 2, 3)}
for seed in (1, 2, 3):  # no step 2, because no model judges
    flags = {"ppo": f"{GRPO} --critic_model_name_or_path {{sft}}"}
    HEALTHY[f"healthy-grpo-{seed}"] = {"seed": seed, "flags": flags, "steps": ("sft", "ppo")}
HEALTHY["healthy-gpt2"] = {"flags": {"sft": "--model_name_or_path course/clinic/gpt2"}}
CASES = sorted(file.stem for file in (HERE / "solutions").glob("[0-9]*.md"))
MISTAKES = HERE / "solutions/mistakes.py"
# How many are kept: samples and tokens' responses of the first and of the last evaluation, pairs
MOST = {"samples": 28, "tokens": 2, "judge": 280}
DIGITS = {"metrics": 5, "samples": 3, "tokens": 3, "judge": 5}
CLOCKS = "generate_seconds score_seconds train_seconds seconds tokens_per_second tflops".split()
LEFT_OUT = {"versions", "frozen_models", *CLOCKS}  # of what is kept


# ---- Runs ----
def solution_of(name):
    """Returns what a case differs in: "script", "fault", "flags", "steps", "seed"."""
    return HEALTHY.get(name) or runpy.run_path(str(MISTAKES))["CASES"][name]


def case(name):
    """Returns {script: runner.Run} of a case, or of a healthy run.

    A fault in step 1 does not change the reward model, which was made before it.
    """
    solution = solution_of(name)
    flags, seed, at = solution.get("flags", {}), solution.get("seed", 1), solution.get("script")
    runs, healthy = {}, {}
    for script in solution.get("steps") or BASE:
        before = healthy if (script, at) == ("reward", "sft") else runs
        faulty = script == at and solution["fault"]
        fault = f"{MISTAKES.relative_to(ROOT)}:{name}" if faulty else ""
        runs[script] = made(script, flags.get(script, ""), seed, before, fault)
        healthy[script] = made(script, "", seed, healthy)
    return runs


def made(script, flags, seed, before, fault=""):
    """Returns the runner.Run of a step that starts from those `before`."""
    words = runner.merged(BASE[script], flags)
    parents = tuple(pair for pair in before.items() if f"{{{pair[0]}}}" in " ".join(words))
    return runner.Run(script, words, seed, parents, fault)


def with_parents(runs):
    """Returns the runs and all that they start from, each once, and after those it starts from."""
    found = {}
    for run in runs:
        found |= dict.fromkeys(with_parents([parent for _, parent in run.parents]))
        found[run] = None
    return list(found)


# ---- What is kept of a run ----
def kept(run, root):
    """Returns what look.py needs of a run, by file: a few samples, no clocks, and no paths."""
    folder = run.folder(root)
    text = (folder / "args.json").read_text()
    for name, path in [*run.parents, (run.script, run)]:
        text = re.sub(f'"[^"]*{runner.place(path, root).name}"', f'"{name}"', text)
    text = re.sub(r'"/[^"]*?/((?:toy|course)/[^"]*|[^"/]+)"', r'"\1"', text)
    files = {"args": without(json.loads(text))}
    for name, digits in DIGITS.items():
        if (folder / f"{name}.jsonl").exists():
            lines = [without(line) for line in few(name, runner.lines_of(folder, f"{name}.jsonl"))]
            lines = runner.rounded(lines, digits)
            files[name] = lines if name == "tokens" else columns(lines)
    return files


def without(line):
    """Returns a dict without what is left out."""
    return {key: value for key, value in line.items() if key not in LEFT_OUT}


def few(name, lines):
    """Returns the lines of a file that are kept. Of samples and tokens, these are both ends.

    The judge's pairs are kept without their texts: recipes/toy/data has them in the same order.
    """
    if name == "metrics":
        return lines
    if name == "judge":
        lines = [{key: x for key, x in line.items() if not isinstance(x, str)} for line in lines]
        return lines[: MOST[name]]
    first, last = lines[0]["step"], lines[-1]["step"]
    both = [[line for line in lines if line["step"] == step] for step in (first, last)]
    return both[0][: MOST[name]] + both[1][: MOST[name]]


def columns(lines):
    """Returns dicts as {name: a value of each, None where it has none}."""
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [line.get(name) for line in lines] for name in names}


def spread(value, depth=3):
    """Returns JSON in which each column, each flag and each line of tokens has a line."""
    if not depth or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, list):
        return "[\n{}\n]".format(",\n".join(spread(each, depth - 1) for each in value))
    items = (f"{json.dumps(name)}: {spread(each, depth - 1)}" for name, each in value.items())
    return "{{\n{}\n}}".format(",\n".join(items))


def folder_of(name):
    """Returns where a case is kept."""
    return HERE / name.replace("-", "/")


def kept_as(name):
    """Returns {script: the folder that keeps it} of a case. A run that cases share is kept once.

    A step that healthy runs have as well is in the folder of the first of them in HEALTHY.
    """
    found = {}
    for script, run in case(name).items():
        owner = next((other for other in HEALTHY if run in case(other).values()), name)
        found[script] = folder_of(owner) / script
    return found


def main():
    names = [*CASES, *HEALTHY]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=names)
    where = "where the runs are kept"
    parser.add_argument("--runs", type=Path, default=ROOT / "output/clinic/runs", help=where)
    parser.add_argument("--keep", action="store_true", help="write to course/clinic")
    args = parser.parse_args()
    if args.name is None:
        return print(" ".join(names))
    runs, root = case(args.name), args.runs.resolve()
    chain = dict(enumerate(with_parents(runs.values())))
    runner.make_all({(args.name, 1): chain}, root, 1)
    own, found = folder_of(args.name), {}
    target = own if args.keep else ROOT / "output/clinic" / own.relative_to(HERE)
    for script, folder in kept_as(args.name).items():
        elsewhere = args.keep and folder.parent != own
        found[script] = os.path.relpath(folder, own) if elsewhere else kept(runs[script], root)
    target.mkdir(parents=True, exist_ok=True)
    (target / "runs.json").write_text(spread(found) + "\n")
    print(f"python tools/look.py {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
