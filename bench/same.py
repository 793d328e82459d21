"""Shows whether the working tree computes what an older commit did, to the bit.

    python bench/same.py                    compares the working tree with commit 5d9a7c4
    python bench/same.py COMMIT             with that commit
    python bench/same.py --only ppo         only the runs whose name has a match for a regular
                                            expression, and the runs that these start from
    python bench/same.py --runs FOLDER      keeps the runs in FOLDER/COMMIT and FOLDER/new, by
                                            default in output/same. A run of the commit that is
                                            there is not made again

Both sides are copies of their trees. Each of RUNS is a command, started in both. A flag that a
script does not know (any more, or yet) is left out on that side, and named. PPO's runs start from
the models of the runs `sft` and `reward` of their own side: see whether these are equal first.
Compared are exit codes, each key of each .jsonl file without the clocks, and every tensor in a
.safetensors file. A line of the log is the mean of its --log_steps steps, so all runs have
--log_steps 1. All differences are listed, one line for each key or file: how many values differ,
the largest difference, and the first. The exit code is 1 if there is one.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fork import copy_halfway

ROOT = Path(__file__).resolve().parent.parent
CLOCKS = re.compile(r"(\w+_)?seconds|tokens_per_second|tflops")  # keys that differ each time
RENAMED = {}  # a key of the older side: its name now

# ---- The runs ----
BASE = {
    "sft": "--learning_rate 3e-3 --num_samples 4 --per_device_train_batch_size 8 --max_steps 4",
    "reward": "--model_name_or_path {sft} --learning_rate 1e-3 --per_device_train_batch_size 8 "
    "--max_steps 4",
    "ppo": "--actor_model_name_or_path {sft} --critic_model_name_or_path {reward} --max_steps 3 "
    "--actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --num_eval_prompts 8 "
    "--per_device_generation_batch_size 8 --per_device_training_batch_size 8",
}
ALL = "--preset toy --dtype fp32 --seed 1 --log_steps 1 --num_warmup_steps 0"
UNSTABLE = "--allow_unstable 1 --per_device_training_batch_size 4 --gradient_accumulation_steps 1"
OPTIONS = (
    "--microscope 3 --missing_eos_penalty 1 --entropy_coef 0.01 "
    "--clip_high 0.3 --kl_in loss --kl_estimator k2 --normalize_reward 1 --clip_reward 2"
)
SAMPLING = "--temperature 0.8 --top_k 50 --top_p 0.9 --min_new_tokens 3"
GROUPS = "--samples_per_prompt 2"
LORA = "--actor_lora_dim 4 --critic_lora_dim 2 --enable_ema 1"
BEST = "--keep_best eval_accuracy --eval_steps 1 --save_steps 1"


@dataclass(frozen=True)
class Run:
    """A command: its flags come after those of BASE."""

    script: str
    flags: str = ""
    ranks: int = 1
    resumed: bool = False  # from a checkpoint of step 2 of this run, which is made first


RUNS = {
    "sft": Run("sft"),
    "sft_zero2": Run("sft", "--zero_stage 2 --per_device_train_batch_size 4", 2),
    "sft_zero3": Run("sft", "--zero_stage 3 --per_device_train_batch_size 4", 2),
    "sft_accumulation": Run(
        "sft", "--gradient_accumulation_steps 2 --per_device_train_batch_size 4"
    ),
    "sft_all_tokens": Run("sft", "--train_on everything"),
    "sft_dropout_resumed": Run("sft", "--model_name_or_path {sft} --dropout 0.1", resumed=True),
    "sft_lora": Run("sft", "--model_name_or_path {sft} --lora_dim 4"),
    "sft_bf16": Run("sft", "--model_name_or_path {sft} --dtype bf16 --max_steps 2"),
    "reward": Run("reward"),
    "reward_zero3": Run("reward", "--zero_stage 3 --per_device_train_batch_size 4", 2),
    "reward_apart": Run("reward", "--share_prompt 0"),
    "reward_lora": Run("reward", "--lora_dim 4"),
    "reward_best": Run("reward", BEST),
    "ppo": Run("ppo"),
    "ppo_two_passes": Run("ppo", "--gradient_accumulation_steps 2"),
    "ppo_zero2": Run("ppo", "--zero_stage 2", 2),
    "ppo_zero3": Run("ppo", "--zero_stage 3 --gradient_accumulation_steps 2", 2),
    "ppo_resumed": Run("ppo", "--max_steps 4 --kl_target 0.5 --critic_dropout 0.1", resumed=True),
    "ppo_epochs": Run("ppo", f"{UNSTABLE} --ppo_epochs 2 --generation_batches 2 --target_kl 0.5"),
    "ppo_rloo": Run("ppo", f"--advantage rloo {GROUPS}"),
    "ppo_grpo": Run("ppo", f"--advantage grpo --kl_in loss --kl_estimator k3 {GROUPS}"),
    "ppo_reinforce": Run("ppo", "--advantage reinforce"),
    "ppo_options": Run("ppo", OPTIONS),
    "ppo_sampling": Run("ppo", SAMPLING),
    "ppo_average": Run("ppo", "--enable_ema 1 --eval_ema 1 --ema_decay 0.9"),
    "ppo_lora": Run("ppo", LORA),
}


def wanted(only):
    """Returns the names of the runs that match, with those that they start from before them."""
    names = {name for name in RUNS if re.search(only, name)}
    names |= {"sft"} if any(RUNS[name].script != "sft" for name in names) else set()
    names |= {"sft"} if any("{sft}" in RUNS[name].flags for name in names) else set()
    names |= {"reward"} if any(RUNS[name].script == "ppo" for name in names) else set()
    return [name for name in RUNS if name in names]


# ---- Making them ----
def known_flags(tree):
    """Returns {script: the flags that it has in this tree}."""
    found = {}
    for script in BASE:
        words = [sys.executable, f"{script}.py", "--help"]
        text = subprocess.run(words, cwd=tree, capture_output=True, text=True, check=True).stdout
        found[script] = set(re.findall(r"--\w+", text))
    return found


def flags_of(run, models, known):
    """Returns the words of a run's flags, without unknown ones, and the names of these."""
    text = f"{ALL} {BASE[run.script]} {run.flags}"
    given, left_out = {}, []
    for name, *values in (part.split() for part in re.split(r" (?=--)", text)):
        given[name] = [value.format(**models) for value in values]
    for name in [name for name in given if name not in known]:
        left_out.append(name)
        del given[name]
    return [word for name, values in given.items() for word in (name, *values)], left_out


def make(tree, base, name, models, known):
    """Makes a run in a tree, and notes its exit code. Returns the flags that were left out."""
    run, folder = RUNS[name], base / name
    flags, left_out = flags_of(run, models, known[run.script])
    made = base / f"{name}.json"
    if made.exists() and json.loads(made.read_text())["flags"] == flags:
        return left_out
    first = base / f"{name}-whole" if run.resumed else folder
    for old in (first, folder):
        shutil.rmtree(old, ignore_errors=True)
    halfway = ["--save_steps", "2", "--keep_checkpoints", "9"] if run.resumed else []
    code = launch(tree, run, first, [*flags, *halfway])
    if run.resumed and code == 0:
        copy_halfway(first, folder, 2)
        code = launch(tree, run, folder, [*flags, "--resume"])
    made.write_text(json.dumps({"flags": flags, "code": code}))
    return left_out


def make_all(trees, bases, names, jobs):
    """Makes the runs on both sides. Returns {name: the flags left out on the two sides}."""
    first = ("sft", "reward")  # the others start from these
    groups = [[name] for name in names if name in first]
    groups.append([name for name in names if name not in first])
    left_out = {name: [] for name in names}
    print(f"{len(names)} runs on each side; logs: {bases[0].parent}/*/NAME.log", flush=True)
    for tree, base in zip(trees, bases):
        known, models = known_flags(tree), {name: base / name for name in first}
        for group in groups:
            with ThreadPoolExecutor(jobs) as pool:
                made = [pool.submit(make, tree, base, name, models, known) for name in group]
                for name, job in zip(group, made):
                    left_out[name].append(job.result())
    return left_out


def launch(tree, run, folder, flags):
    """Starts a script of a tree; its output goes to FOLDER.log. Returns the exit code."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start = [*torchrun, "--nproc_per_node", str(run.ranks)] if run.ranks > 1 else [sys.executable]
    command = [*start, f"{run.script}.py", *flags, "--output_dir", str(folder)]
    caches = {"HF_DATASETS_CACHE": str(folder.parent / "datasets"), "DS_ACCELERATOR": "cpu"}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **caches}
    with open(f"{folder}.log", "a") as log:
        return subprocess.call(command, cwd=tree, env=env, stdout=log, stderr=subprocess.STDOUT)


# ---- Comparing them ----
def left_by(base, name):
    """Returns what a run left: {(file, key): the key's value in each line}, and tensors by name."""
    from safetensors.torch import load_file

    values, tensors, folder = {}, {}, base / name
    for file in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for key in dict.fromkeys(key for line in lines for key in line):
            if not CLOCKS.fullmatch(key):
                values[file.name, RENAMED.get(key, key)] = [line.get(key) for line in lines]
    for file in sorted(folder.rglob("*.safetensors")):
        if "checkpoints" not in file.parts:
            tensors[str(file.relative_to(folder))] = load_file(file)
    return values, tensors


def differences(bases, name):
    """Returns a list of lines: all that the two sides of a run do not share."""
    records = [json.loads((base / f"{name}.json").read_text()) for base in bases]
    old_code, new_code = (record["code"] for record in records)
    found = [f"exit code {old_code} -> {new_code}"] if old_code != new_code else []
    for base, code in zip(bases, (old_code, new_code)):
        if code:
            last = (base / f"{name}.log").read_text().splitlines()[-1:]
            found.append(f"{base / name}.log ends: {' '.join(last):.200}")
    if found:
        return found
    (old, old_tensors), (new, new_tensors) = (left_by(base, name) for base in bases)
    for file, key in old.keys() | new.keys():
        if (file, key) not in new:
            found.append(f"{file} {key}: vanished")
        elif (file, key) not in old:
            found.append(f"{file} {key}: added")
        elif old[file, key] != new[file, key]:
            found.append(f"{file} {key}: {in_words(old[file, key], new[file, key])}")
    for file in old_tensors.keys() | new_tensors.keys():
        sides = old_tensors.get(file), new_tensors.get(file)
        if None in sides:
            found.append(f"{file}: {'added' if sides[0] is None else 'vanished'}")
        elif words := tensors_in_words(*sides):
            found.append(f"{file}: {words}")
    return sorted(found)


def in_words(old, new):
    """Returns how many of the values differ, the largest relative difference, and the first."""
    if len(old) != len(new):
        return f"{len(old)} lines -> {len(new)}"
    pairs = [(i, *pair) for i, pair in enumerate(zip(old, new), 1) if pair[0] != pair[1]]
    numbers = [(a, b) for _, a, b in pairs if isinstance(a, float) and isinstance(b, float)]
    largest = max([abs(a - b) / max(abs(a), abs(b)) for a, b in numbers], default=0)
    share = f", at most {largest:.1g} of the value" if numbers else ""
    line, a, b = pairs[0]
    return f"{len(pairs)} of {len(old)} lines{share}; line {line}: {a!r:.80} -> {b!r:.80}"


def tensors_in_words(old, new):
    """Returns what differs between two files' tensors, "" if nothing does."""
    parts = [f"{name} vanished" for name in old.keys() - new.keys()]
    parts += [f"{name} added" for name in new.keys() - old.keys()]
    common = [name for name in old if name in new]
    kinds = [n for n in common if (old[n].shape, old[n].dtype) != (new[n].shape, new[n].dtype)]
    parts += [f"{name} has another shape or dtype" for name in kinds]
    gaps = [(old[n] - new[n]).abs().max().item() for n in common if n not in kinds]
    count = sum(gap != 0 for gap in gaps)
    if count:
        parts.append(f"{count} of {len(gaps)} tensors, by at most {max(gaps):.1g}")
    return "; ".join(parts)


def report(bases, left_out):
    """Prints each run with all of its differences. Returns how many runs differ."""
    differing = 0
    for name, flags in left_out.items():
        found = differences(bases, name)
        differing += bool(found)
        without = [f"{side} without {' '.join(f)}" for side, f in zip(("old", "new"), flags) if f]
        print(f"{'DIFFERS' if found else 'equal':8} {name:22} {'; '.join(without)}".rstrip())
        for line in found:
            print(f"           {line}")
    print(f"{len(left_out) - differing} equal, {differing} differ")
    return differing


def copy_trees(commit, folder):
    """Copies that commit and the working tree, as it is now. Returns the two folders."""
    old, new = folder / "old_tree", folder / "new_tree"
    old.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", old], input=archive.stdout, check=True)
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, new / name)
    return old, new


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", default="5d9a7c4")
    parser.add_argument("--runs", type=Path, default=ROOT / "output/same", help="their folder")
    parser.add_argument("--only", default="", help="a regular expression for the names of runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    args = parser.parse_args()
    bases = [args.runs.resolve() / side for side in (args.commit, "new")]
    shutil.rmtree(bases[1], ignore_errors=True)
    for base in bases:
        base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        trees = copy_trees(args.commit, Path(folder))
        left_out = make_all(trees, bases, wanted(args.only), args.jobs)
    sys.exit(report(bases, left_out) > 0)


if __name__ == "__main__":
    main()
