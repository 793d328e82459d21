"""Checks a training script, ours or a fork of it: does it learn the same however it is laid out?

    python tools/fork.py sft.py --preset toy
    python tools/fork.py my_ppo.py --preset toy --advantage rloo --samples_per_prompt 2
    python tools/fork.py --steps 6 --rows 8 --keep output/fork my_dpo.py --preset toy

It runs SCRIPT with the FLAGS that follow, for a few steps of a few rows: under ZeRO 0, 2 and 3, on
one rank and on two, with gradient accumulation, and resumed from a checkpoint halfway. Curves must
agree up to rounding with the run of one rank under ZeRO 0. The resumed run's curves, and its models
in safetensors files, must be those of the run that was not interrupted, to the bit. What the script
must know: --output_dir, --max_steps, --log_steps, --zero_stage, --gradient_accumulation_steps, a
per-device batch size, --save_steps, --resume; it leaves metrics.jsonl. Dropout is turned off, as
its random numbers depend on the layout. So is warm-up, in which the weights would hardly move.

If the script knows --data_split, calls open_sources as ours do, and leaves args.json, it also
trains on so few rows that each step is an epoch. On two ranks filler rows complete the step, and
one rank has fewer rows than the other; on one rank the step has the same rows and no filler. Both
must agree. Without this, a loss that includes fillers, or a mean of the ranks' means, would be the
same in all layouts.

A sampled token may lie on an edge: rounding decides between two tokens, and the response is another
one in another layout. If the script knows --gold_fn, the responses of all rollouts are recorded
through it, and those that flipped are named. What comes before them is compared: the steps until
there, and evaluations without a flipped response. If less than half of the steps is left, or if
more than one response in eight flips in one step, the layout differs.

Takes about 15 seconds a run, ten runs; six with --quick. The last lines say what was looked at.
Exit code 1 if anything differs.
"""

import argparse
import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

CLOCKS = {"seconds", "tokens_per_second", "tflops"}
ROUNDING = {"sampling_gap"}  # metrics that are nothing but rounding
BATCH_SIZES = (
    "--per_device_train_batch_size",
    "--per_device_generation_batch_size",
    "--per_device_training_batch_size",
)
OFF = ("--dropout", "--actor_dropout", "--critic_dropout", "--num_warmup_steps")
SHARES = ("sft", "reward", "ppo")  # in the order of --data_split
# name: ranks, ZeRO stage, micro-batches of a step on a rank
LAYOUTS = {
    "1 rank, ZeRO 0": (1, 0, 1),
    "1 rank, ZeRO 2": (1, 2, 1),
    "1 rank, ZeRO 3": (1, 3, 1),
    "2 ranks, ZeRO 0": (2, 0, 1),
    "2 ranks, ZeRO 2": (2, 2, 1),
    "2 ranks, ZeRO 3": (2, 3, 1),
    "1 rank, ZeRO 2, 2 micro-batches": (1, 2, 2),
}
QUICK = ("1 rank, ZeRO 0", "2 ranks, ZeRO 2", "2 ranks, ZeRO 3")
FIRST, WHOLE, RESUMED = "1 rank, ZeRO 0", "2 ranks, ZeRO 2", "2 ranks, ZeRO 2, resumed"
FILLED = "2 ranks, ZeRO 2, filler rows"


# ---- The runs ----
def record(prompts, completions, **columns):
    """A --gold_fn for the runs: writes the responses beside the output folder of its run."""
    folder, rank = sys.argv[sys.argv.index("--output_dir") + 1], os.environ.get("RANK", "0")
    with open(f"{folder}.responses-{rank}", "a") as file:
        file.writelines(json.dumps(pair) + "\n" for pair in zip(prompts, completions))
    return [0.0] * len(completions)


def start(script, flags, ranks=None):
    """Runs the script by itself, or with torchrun on so many ranks. Returns what it left."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks]
    command = [sys.executable, *(torchrun if ranks else []), script, *flags]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, env=environment)


def launch(options, known, folder, layout, *more):
    """Runs the script in one layout; ends the program with its output if it fails."""
    ranks, stage, micro_steps = layout
    rows = options.rows // (ranks * micro_steps)
    flags = [*options.flags, "--output_dir", folder, "--zero_stage", stage, "--log_steps", 1]
    flags += ["--max_steps", options.steps, "--gradient_accumulation_steps", micro_steps]
    flags += with_value(rows, BATCH_SIZES, known) + with_value(0, OFF, known)
    if BATCH_SIZES[1] in known and "--gold_fn" in known:  # it trains on what it samples
        flags += ["--gold_fn", f"{Path(__file__).resolve()}:record"]
    done = start(options.script, [*flags, *more], ranks)
    if done.returncode:
        print(f"{' '.join(done.args)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        sys.exit(1)


def with_value(value, names, known):
    """Returns the flags among `names` that the script knows, each with this value."""
    return [word for name in names if name in known for word in (name, value)]


def facts_of(folder):
    """Returns args.json of a run: its flags, and the numbers of its rows and of those of a step."""
    return json.loads((folder / "args.json").read_text())


def few_rows(first, own):
    """Returns a --data_split with which the script gets about three quarters of a step's rows.

    first: the folder of a run of it. own: which of the shares is its own.
    """
    facts = facts_of(first)
    shares = facts["data_split"]
    total = facts["data_rows"] * sum(shares) / shares[own]
    count = max(facts["rows_per_step"] * 3 // 4, 1)
    split = [max(total - count, 0) / 2] * len(shares)
    split[own] = count
    return ",".join(map(str, split))


def launch_filled(options, known, base, first):
    """Runs the script on two ranks with filler rows, and on one with the same rows and no filler.

    Returns both folders, that without fillers first, and how many fillers there were: none, too,
    where nobody can say which share of --data_split is the script's, or no batch has just its rows.
    """
    exact, filled = base / "no_filler_rows", base / "filler_rows"
    able = "--data_split" in known and not options.no_fillers
    text = Path(options.script).read_text() if able else ""
    asked = re.search(r'open_sources\(\w+, "(\w+)"\)', text)
    if not asked:
        return exact, filled, 0
    few = ["--data_split", few_rows(first, SHARES.index(asked[1]))]
    few += with_value(99, ["--eval_steps"], known)
    launch(options, known, filled, LAYOUTS[WHOLE], *few)
    facts = facts_of(filled)
    rows, of_step = facts["data_rows"], facts["rows_per_step"]
    # of a batch, which in step 3 counts responses, and not prompts
    size, rest = divmod(options.rows * rows, of_step)
    if rest or rows >= of_step:
        return exact, filled, 0
    launch(options, known, exact, LAYOUTS[FIRST], *few, *with_value(size, BATCH_SIZES, known))
    return exact, filled, of_step - rows


def copy_halfway(whole, folder, step):
    """Copies a run into `folder` as it was when its checkpoint of this step was written."""
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("args.json", "metrics.jsonl", "samples.jsonl", "tokens.jsonl"):
        if (whole / name).exists():
            shutil.copy(whole / name, folder)
    shutil.copytree(whole / f"checkpoints/step-{step}", folder / f"checkpoints/step-{step}")


# ---- What they left ----
def lines_of(file):
    """Returns the lines of a .jsonl file, none if it is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def curves(folder):
    """Returns {step: {metric: number}} of a run, without clocks."""
    out = {}
    for line in lines_of(folder / "metrics.jsonl"):
        numbers = {k: v for k, v in line.items() if isinstance(v, (int, float))}
        kept = {k: v for k, v in numbers.items() if k not in CLOCKS and not k.endswith("_seconds")}
        out.setdefault(line["step"], {}).update(kept)
    return out


def evaluated(folder):
    """Returns {(step, prompt): its responses} of the evaluations."""
    out = {}
    for line in lines_of(folder / "samples.jsonl"):
        out.setdefault((line["step"], line["prompt"]), []).append(line["response"])
    return out


def rolled_out(folder):
    """Returns the (prompt, response) of all rollouts that were trained on, in order on a rank."""
    files = sorted(folder.parent.glob(f"{folder.name}.responses-*"))
    asked = {prompt for _, prompt in evaluated(folder)}
    pairs = [(str(prompt), text) for file in files for prompt, text in lines_of(file)]
    return [pair for pair in pairs if pair[0] not in asked]


def difference(expected, found, until=float("inf"), skipped=()):
    """Returns the largest difference of two runs' curves, relative to the metric's size, and where.

    A metric's size is its largest value in the expected run, or a smallest size if it is below
    that: 1e-3, and 1e-2 of a response's KL. Near 0 that is a difference of nearly equal sums over
    its tokens, and rounding that no other metric shows moves it by more than a thousandth. until:
    the step from which nothing is compared. skipped: steps whose evaluations are not compared.
    """
    worst, where = 0.0, ""
    if expected.keys() != found.keys():
        return float("inf"), f"steps {sorted(expected)} and {sorted(found)}"
    for step, record in expected.items():
        for name, value in record.items() if step < until else ():
            if name in ROUNDING or (name.startswith("eval_") and step in skipped):
                continue
            smallest = 1e-2 if name.removeprefix("eval_") in ("kl", "kl_k3") else 1e-3
            size = max([abs(other.get(name, 0.0)) for other in expected.values()] + [smallest])
            gap = abs(found[step].get(name, float("inf")) - value) / size
            if not gap <= worst and worst == worst:  # NaN is the worst, and stays
                worst, where = gap, f"{name} of step {step}: {value:.6g}, {found[step].get(name)}"
    return worst, where


def flipped(first, folder, steps):
    """Returns {step: its prompts} whose responses are others in `folder` than in the run `first`.

    Of rollouts, the first step alone: what follows was trained on other responses. Then the steps
    of evaluations of which a response is another one, and how many responses a rollout has.
    """
    mine, theirs = evaluated(first), evaluated(folder)
    skipped = {
        step for (step, prompt), texts in mine.items() if texts != theirs.get((step, prompt))
    }
    expected, found = rolled_out(first), Counter(rolled_out(folder))
    size = max(len(expected) // steps, 1)
    prompts = {}
    for index, pair in enumerate(expected):  # one rank: in the order of the steps
        if not found[pair]:
            prompts.setdefault(index // size + 1, []).append(pair[0])
        found[pair] -= 1
    return dict(sorted(prompts.items())[:1]), skipped, size


def compare(options, first, folder):
    """Returns (whether a layout agrees, the largest difference, where, names of what flipped)."""
    prompts, skipped, size = flipped(first, folder, options.steps)
    until = min(prompts, default=float("inf"))
    gap, where = difference(curves(first), curves(folder), until, skipped)
    many = any(len(each) > max(size // 8, 1) for each in prompts.values())
    agrees = gap <= options.tolerance and not many and until > options.steps // 2
    words = [
        f"step {step}: another response to {p!r:.60}" for step, ps in prompts.items() for p in ps
    ]
    words += [f"nothing is compared from step {until} on"] * bool(prompts)
    words += [f"an evaluation of step {step} has another response" for step in sorted(skipped)]
    return agrees, gap, where, words


def other_files(expected, found):
    """Returns the saved models (.safetensors) that are not the same in both folders."""
    files = [str(f.relative_to(expected)) for f in sorted(expected.rglob("*.safetensors"))]
    files = [name for name in files if not name.startswith("checkpoints")]
    _, unlike, missing = filecmp.cmpfiles(expected, found, files, shallow=False)
    return unlike + missing


def how_far(folder):
    """Returns how far the weights moved, {metric of evaluations: (first value, last value)}."""
    found = {}
    for _, record in sorted(curves(folder).items()):
        for name in [name for name in record if name.startswith("eval_")]:
            found.setdefault(name, []).append(record[name])
    return {name: (values[0], values[-1]) for name, values in found.items()}


def what_was_looked_at(options, layouts, fillers, moved):
    """Returns lines that say what was looked at, and what was not.

    layouts: how many. fillers: how many filler rows there were. moved: see how_far.
    """
    looked = [f"{options.steps} steps of {options.rows} rows in {layouts} layouts"]
    missing = []
    if fillers:
        looked.append(f"steps with {fillers} filler rows, and fewer rows on one rank")
    else:
        missing.append("filler rows, and ranks with fewer rows (see --help)")
    looked.append(f"resuming after step {options.steps // 2} in the same layout")
    shares = {
        name: abs(last - first) / max(abs(first), abs(last), 1e-3)
        for name, (first, last) in moved.items()
    }
    name = max(shares, key=shares.get, default=None)
    if name:
        first, last = moved[name]
        looked.append(f"{name} from {first:.4g} to {last:.4g}")
    if name is None or shares[name] < 10 * options.tolerance:
        missing.append("weights that move (take a higher learning rate, or more --steps)")
    lines = [f"looked at: {'; '.join(looked)}"]
    return lines + [f"NOT looked at: {'; '.join(missing)}"] * bool(missing)


def get_options():
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arg = parser.add_argument
    arg("--steps", type=int, default=4, help="of each run")
    arg("--rows", type=int, default=8, help="of a step, over all ranks")
    arg("--tolerance", type=float, default=1e-3, help="relative, between layouts")
    arg("--no_fillers", action="store_true", help="for a script that draws more for a larger step")
    arg("--quick", action="store_true", help=f"these alone: {'; '.join(QUICK)}")
    arg("--keep", type=Path, help="folder for the runs; else a temporary one")
    arg("script")
    arg("flags", nargs=argparse.REMAINDER)
    return parser.parse_args()


def main():
    options = get_options()
    known = set(start(options.script, ["--help"]).stdout.replace(",", " ").split())
    base = options.keep or Path(tempfile.mkdtemp(prefix="fork-"))
    base.mkdir(parents=True, exist_ok=True)
    half, failed, folders = options.steps // 2, False, {}

    def show(name, first, folder):
        agrees, gap, where, words = compare(options, first, folder)
        print(f"{name:34}{gap:20.2g}   {where}{'' if agrees else '   DIFFERS'}", flush=True)
        for line in words:
            print(f"{'':34}{line}", flush=True)
        return not agrees

    print(f"{'layout':34}{'largest difference':>20}   where")
    for name in QUICK if options.quick else LAYOUTS:
        folders[name] = folder = base / name.replace(", ", "_").replace(" ", "_")
        checkpoints = ["--save_steps", half, "--keep_checkpoints", 9] if name == WHOLE else []
        launch(options, known, folder, LAYOUTS[name], *checkpoints)
        failed |= show(name, folders[FIRST], folder)
    exact, filled, fillers = launch_filled(options, known, base, folders[FIRST])
    failed |= fillers > 0 and show(FILLED, exact, filled)
    whole, folder = folders[WHOLE], base / "resumed"
    copy_halfway(whole, folder, half)
    launch(options, known, folder, LAYOUTS[WHOLE], "--resume")
    gap, where = difference(curves(whole), curves(folder))
    if others := other_files(whole, folder):
        gap, where = gap or float("inf"), where or f"other weights in {', '.join(others)}"
    failed |= gap != 0
    print(f"{RESUMED:34}{gap:20.2g}   {where}{'   DIFFERS' * (gap != 0)}")
    for line in what_was_looked_at(options, len(folders), fillers, how_far(whole)):
        print(line)
    print("DIFFERS" if failed else "equal: up to rounding, and to the bit when resumed")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
