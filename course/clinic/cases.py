"""Runs a case of the clinic again:  python course/clinic/cases.py 07

This repeats the three steps that made the folder course/clinic/07, on one core, and writes what
look.py needs of them to output/clinic/07. Runs that several cases share are made first. A run that
is already in output/clinic/runs is not made again. Names that begin with "healthy" are runs without
a fault.
    python course/clinic/cases.py               lists the names
    python course/clinic/cases.py 07 --keep     writes to course/clinic/07, which is in git
With --keep, a step that a healthy run has as well is not stored again: runs.txt names its folder.
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
sys.path[:0] = [str(ROOT), str(ROOT / "labs")]
import declared  # noqa: E402
import runner  # noqa: E402

ASKED = "--num_samples 70 --max_answer_seq_len 48 --gold_fn toy/gold.py:gold"
BASE = {  # the labs' base, a smaller toy run; here step 1 answers prompts as well
    **declared.BASES["toy"],
    "sft": " ".join(runner.merged(declared.BASES["toy"]["sft"], ASKED)),
}
GRPO = "--advantage grpo --samples_per_prompt 4 --reward_fn course/clinic/verifiers.py:right"
HEALTHY = {f"healthy-{seed}": {"SEED": seed} for seed in (1, 2, 3)}
for seed in (1, 2, 3):  # no step 2, because no model judges
    flags = {"ppo": f"{GRPO} --critic_model_name_or_path {{sft}}"}
    HEALTHY[f"healthy-grpo-{seed}"] = {"SEED": seed, "FLAGS": flags, "STEPS": ("sft", "ppo")}
HEALTHY["healthy-gpt2"] = {"FLAGS": {"sft": "--model_name_or_path course/clinic/gpt2"}}
CASES = sorted(file.stem for file in (HERE / "solutions").glob("[0-9]*.py"))
SAMPLES, PAIRS = 70, 280  # how many are kept, of each evaluation and of the judge
DIGITS = 5  # to which the numbers are rounded in the files that are kept


# ---- Runs ----
def solution_of(name):
    """Returns what a solution's file defines: SCRIPT, FLAGS, fault(), STEPS, SEED."""
    return HEALTHY.get(name) or runpy.run_path(str(HERE / f"solutions/{name}.py"))


def case(name):
    """Returns {script: runner.Run} of a case, or of a healthy run.

    A fault in step 1 does not change the reward model, which was made before it.
    """
    file, solution = HERE / f"solutions/{name}.py", solution_of(name)
    flags, seed = solution.get("FLAGS", {}), solution.get("SEED", 1)
    at = solution.get("SCRIPT")
    runs, healthy = {}, {}
    for script in solution.get("STEPS", BASE):
        before = healthy if (script, at) == ("reward", "sft") else runs
        fault = str(file.relative_to(ROOT)) if script == at and "fault" in solution else ""
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
def keep(run, root, target):
    """Writes what look.py needs of a run into a folder: a few samples, and no paths."""
    folder = run.folder(root)
    target.mkdir(parents=True, exist_ok=True)
    args = (folder / "args.json").read_text()
    for name, path in [*run.parents, (run.script, run)]:
        args = re.sub(f'"[^"]*{runner.place(path, root).name}"', f'"{name}"', args)
    args = re.sub(r'"/[^"]*?/((?:toy|course)/[^"]*|[^"/]+)"', r'"\1"', args)
    (target / "args.json").write_text(args)
    for name in ("metrics", "samples", "tokens", "judge"):
        if (folder / f"{name}.jsonl").exists():
            lines = few(name, runner.lines_of(folder, f"{name}.jsonl"))
            texts = [json.dumps(line) + "\n" for line in runner.rounded(lines, DIGITS)]
            (target / f"{name}.jsonl").write_text("".join(texts))


def few(name, lines):
    """Returns the lines of a file that are kept. Of samples and tokens, these are both ends.

    The judge's pairs are kept without their texts, which are in toy/data, in the same order.
    """
    if name == "judge":
        kept = [{key: x for key, x in line.items() if not isinstance(x, str)} for line in lines]
        return kept[:PAIRS]
    if name == "metrics":
        return lines
    first, last = lines[0]["step"], lines[-1]["step"]
    most = SAMPLES if name == "samples" else 4
    ends = [[line for line in lines if line["step"] == step] for step in (first, last)]
    return ends[0][:most] + ends[1][:most]


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
    own = folder_of(args.name)
    target = own if args.keep else ROOT / "output/clinic" / own.relative_to(HERE)
    elsewhere = []
    for script, folder in kept_as(args.name).items():
        if args.keep and folder.parent != own:
            elsewhere.append(os.path.relpath(folder, own))
        else:
            keep(runs[script], root, target / script)
    if elsewhere:  # tools/look.py reads this list
        (own / "runs.txt").write_text("".join(f"{path}\n" for path in elsewhere))
    print(f"python tools/look.py {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
