"""Applies variants to copies of the code, checks them, and compares them with the unchanged script.

    python variants/run.py [NAME] --check            each variant: two steps, and tools/fork.py
    python variants/run.py NAME                      its runs on the toy: results, table, picture
    python variants/run.py [NAME] --plot             table and picture from the results alone
    python variants/run.py                           lists them, as the table of docs/variants.md
    python variants/run.py NAME --apply              to this tree; says what is in its way

After `make demo`: the runs start from its models (--models output/demo). A variant is a folder with
NAME.diff, or new files for the top of the tree, with arms.json: what is run, and its results, and
with README.md. The pictures, curves.png, are not in git.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "course/labs"))
import pages  # noqa: E402
import runner  # noqa: E402
from runner import VLLM  # noqa: E402

NAMES = sorted(file.parent.name for file in HERE.glob("*/arms.json"))
MEASURES = {
    "gold": ("eval_gold", "last"),
    "KL": ("eval_kl", "last"),
    "length": ("eval_response_length", "last"),
}
CURVES = (("step", "gold"), ("kl", "gold"), ("sqrt kl", "gold"))
NO_VLLM = f"There is no vLLM at {VLLM}: make vllm, or set VLLM_PYTHON"


def declared(name):
    """Returns arms.json of a variant.

    script, base: what all arms run, and its flags. arms, models, hidden: as in runner.Lab. check,
    rows, fork: the script and flags for tools/fork.py, its rows, and other flags of its own. lab:
    the one that has its runs. then, measures: scripts that run after it, unchanged, and measures of
    its own, as in runner.Lab. makes: a program, with its flags, that writes data for its runs into
    the folder {made}.
    """
    return json.loads((HERE / name / "arms.json").read_text())


def results_of(name):
    """Returns the committed results of a variant."""
    return runner.results_in(HERE / name / "arms.json")


def lab_of(name, models):
    """Returns a variant as a lab, whose runs start from given models."""
    what = declared(name)
    script, arms = what["script"], what["arms"]
    unchanged = [arm for arm in arms if arm.startswith("unchanged: ")][:1]
    then = what.get("then", {})
    last = [script, *then][-1]
    given = {"sft": models / "sft", "reward": models / "reward", "variant": HERE, "vllm": VLLM}
    given |= {"made": models.parent / name} if "makes" in what else {}
    page = HERE / name / "README.md"
    if not page.exists():
        raise SystemExit(f"{page} is not there: its first line is the title of the picture")
    return runner.Lab(
        title=page.read_text().splitlines()[0].removeprefix("# "),
        base={script: what["base"]},
        arms={arm: {**flags, "against": "".join(unchanged)} for arm, flags in arms.items()},
        compared=("gold",) if unchanged else (),
        plain=tuple((HERE / name / "arms.json", arm) for arm in unchanged),
        measures={
            **{head: tuple(spec) for head, spec in what.get("measures", {}).items()},
            **{head: (last, *measure) for head, measure in MEASURES.items()},
        },
        then=then,
        until=script,
        curves=CURVES,
        hidden=tuple(what.get("hidden", ())),
        models=what.get("models", {}),
        given=given,
    )


def make_data(name, made):
    """Runs the program that writes a variant's data, if it has one, unless the folder is there."""
    program = declared(name).get("makes")
    if program and not made.exists():
        words = shlex.split(program.format(made=made))
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)


def call(words, folder):
    """Runs a command in a copy of the code, on one rank; ends the program if it fails."""
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(folder)}
    words = [str(word) for word in words]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def check(name, models, base, *layouts, steps=2):
    """Applies a variant to a copy, makes steps of the toy there, and runs tools/fork.py.

    layouts: flags for it, such as --quick.
    """
    folder, what = base / "tree", declared(name)
    shutil.rmtree(folder, ignore_errors=True)  # of the check before this one, as below
    runner.apply(name, folder)
    script, text = what["check"]
    given = {"sft": models / "sft", "reward": models / "reward", "vllm": VLLM}
    given["made"] = base / name
    make_data(name, given["made"])

    def run_script(script, words, place, steps):
        flags = shlex.split(words.format(**given))
        place = ["--max_steps", steps, "--overwrite", "--output_dir", place]
        call([sys.executable, script, *flags, *place], folder)
        return flags

    for model, (first, words, *_) in what.get("models", {}).items():
        if f"{{{model}}}" in text:  # a model that the variant itself trains
            run_script(f"{first}.py", f"--preset toy {words}", base / model, 20)
            given[model] = base / model
    flags = run_script(script, text, base / "steps", steps)
    shutil.rmtree(base / "fork", ignore_errors=True)  # of the check before this one
    own = ["--rows", what.get("rows", 8), "--keep", base / "fork", *what.get("fork", [])]
    call([sys.executable, "tools/fork.py", *layouts, *own, script, *flags], folder)


# ---- In this tree ----
def goes(diff, tree, *flags):
    """Returns whether git can apply a diff to a tree, with "-R" whether it can take it back."""
    return git(tree, "--check", *flags, diff, capture_output=True).returncode == 0


def git(tree, *words, **options):
    """Runs `git apply` in a tree, which may lie in another repository: git would look there."""
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.absolute().parent)}
    return subprocess.run(["git", "apply", *words], cwd=tree, env=env, **options)


def put(name, tree):
    """Applies a variant to a tree; if another one is in its way, says which, and how to undo it.

    A new file of the variant's takes the place of no other.
    """
    runner.sources(name)  # which refuses a variant without files
    diffs = {other: [*(HERE / other).glob("*.diff")] for other in NAMES}
    there = [other for other, own in diffs.items() if own and goes(own[0], tree, "-R")]
    if name in there:
        raise SystemExit(f"{name} is applied already. To undo it: {undo(diffs[name], tree)}")
    if not all(goes(diff, tree) for diff in diffs[name]):
        lines = [f"{name} does not go on top of what is here."]
        lines += [f"{other} is applied. To undo it: {undo(diffs[other], tree)}" for other in there]
        raise SystemExit(
            "\n  ".join(lines if there else [*lines, "Your own changes are in its way."])
        )
    for file in (HERE / name).glob("*.py"):
        if (tree / file.name).exists() and (tree / file.name).read_bytes() != file.read_bytes():
            raise SystemExit(f"{tree / file.name} is there, and not {name}'s: move it away first.")
    for diff in diffs[name]:
        git(tree, diff, check=True)
    for file in (HERE / name).glob("*.py"):
        shutil.copy(file, tree)
    takes_back = f" To undo it: {undo(diffs[name], tree)}" if diffs[name] else ""
    print(f"{name} is applied.{takes_back}")


def undo(diffs, tree):
    """Returns the command that takes diffs back."""
    words = ["git", "apply", "-R", *(str(diff.relative_to(ROOT)) for diff in diffs)]
    if any((folder / ".git").exists() for folder in tree.absolute().parents):
        words = ["env", f"GIT_CEILING_DIRECTORIES={tree.absolute().parent}", *words]
    return shlex.join(words)


# ---- The table of all ----
def lines_changed(name):
    """Returns "+12 -3" of a variant's diff, and how many lines its new files have."""
    counts = [len(file.read_text().splitlines()) for file in HERE.glob(f"{name}/*.py")]
    files = "a new file" if len(counts) == 1 else f"{len(counts)} new files"
    new = f"+{sum(counts)}, {files}" if counts else ""
    text = "".join(file.read_text() for file in HERE.glob(f"{name}/*.diff"))
    if not text:
        return new
    marked = [f"{c}{len(re.findall(rf'^[{c}](?![{c}]{{2}})', text, re.M))}" for c in "+-"]
    return " ".join([*marked, *([f"and {new}"] if new else [])])


def overview():
    """Returns the table of all variants, in Markdown: gold of the arms with and without them."""
    lines = ["| variant | lines | gold, after | the unchanged script |"]
    lines.append("| --- " * 4 + "|")
    for name in NAMES:
        results = results_of(name)
        texts = {True: [], False: []}
        for arm, found in runner.by_arm(results).items():
            own = arm.removeprefix("unchanged: ")
            texts[own == arm].append(f"{own}: {pages.cell(found, 'gold')}")
        lab = declared(name).get("lab")
        if lab:
            texts[True].append(f"[course/labs/{lab}.md](../course/labs/{lab}.md)")
        elif not results:
            texts[True].append("not run yet")
        seeds = len({result["seed"] for result in results})
        steps = f" ({results[0]['curve']['step'][-1]} steps, {seeds} seeds)" if results else ""
        folder = f"../variants/{name}"
        cells = [f"[{name}]({folder}/README.md)", lines_changed(name)]
        cells += ["; ".join(texts[True]) + steps, "; ".join(texts[False]) or "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def places_of(name):
    """Returns a variant's declaration, its page and its picture."""
    return [HERE / name / file for file in ("arms.json", "README.md", "curves.png")]


def main():
    parser = runner.new_parser(__doc__, NAMES, "output/variants")
    parser.add_argument("--apply", action="store_true", help="to this tree")
    parser.add_argument("--check", action="store_true", help="all, unless one is named")
    parser.add_argument("--models", type=Path, default=ROOT / "output/demo")
    args = parser.parse_args()
    models, root = args.models.resolve(), args.runs.resolve()
    if args.check:
        names = [args.name] if args.name else NAMES
        print(f"{len(names)} to check, about two minutes each", flush=True)
        for name in names:
            if "{vllm}" in declared(name)["check"][1] and not VLLM.exists():
                print(f"{name}: not checked. {NO_VLLM}", flush=True)
                continue
            check(name, models, root / "check")
            print(f"{name}: equal on all layouts, and when resumed", flush=True)
    elif args.plot:
        for name in [args.name] if args.name else filter(results_of, NAMES):
            pages.study(lab_of(name, models), root, 0, *places_of(name), plot_only=True)
    elif args.name is None:
        print(overview())
    elif args.apply:
        put(args.name, ROOT)
    else:
        make_data(args.name, models.parent / args.name)
        lab = lab_of(args.name, models)
        pages.study(lab, root, args.jobs, *places_of(args.name), plot_only=False)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("\nstopped: run the same command again") from None
