"""Checks a training script, ours or a fork of it: does it learn the same however it is laid out?

    python tests/fork.py sft.py --preset toy
    python tests/fork.py my_ppo.py --preset toy --advantage rloo --samples_per_prompt 2
    python tests/fork.py --steps 6 --rows 8 --keep output/fork my_dpo.py --preset toy

It runs SCRIPT with the FLAGS that follow, for a few steps of a few rows: under ZeRO 0, 2 and 3, on
one rank and on two, with gradient accumulation, and resumed from a checkpoint halfway. Curves must
agree up to rounding with the run of one rank under ZeRO 0. The resumed run's curves, and its models
in safetensors files, must be those of the run that was not interrupted, to the bit. What the script
must know: --output_dir, --max_steps, --log_steps, --zero_stage, --gradient_accumulation_steps, a
per-device batch size, --save_steps, --resume; it leaves metrics.jsonl. Dropout is turned off, as
its random numbers depend on the layout.

Takes about 15 seconds a run, eight runs; four with --quick. Exit code 1 if anything differs.
"""

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CLOCKS = {"seconds", "tokens_per_second", "tflops"}
BATCH_SIZES = (
    "--per_device_train_batch_size",
    "--per_device_generation_batch_size",
    "--per_device_training_batch_size",
)
DROPOUTS = ("--dropout", "--actor_dropout", "--critic_dropout")
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
WHOLE, RESUMED = "2 ranks, ZeRO 2", "2 ranks, ZeRO 2, resumed"


def launch(options, known, folder, layout, *more):
    """Runs the script in one layout; ends the program with its output if it fails."""
    ranks, stage, micro_steps = layout
    rows = options.rows // (ranks * micro_steps)
    flags = [*options.flags, "--output_dir", folder, "--zero_stage", stage, "--log_steps", 1]
    flags += ["--max_steps", options.steps, "--gradient_accumulation_steps", micro_steps]
    for name in BATCH_SIZES:
        flags += [name, rows] * (name in known)
    for name in DROPOUTS:
        flags += [name, 0] * (name in known)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", ranks]
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    command = [str(x) for x in (*torchrun, *rendezvous, options.script, *flags, *more)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        print(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        sys.exit(1)


def curves(folder):
    """Returns {step: {metric: number}} of a run, without clocks."""
    out = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float))}
        kept = {k: v for k, v in numbers.items() if k not in CLOCKS and not k.endswith("_seconds")}
        out[record["step"]] = kept
    return out


def difference(expected, found):
    """Returns the largest difference of two runs' curves, relative to the metric's size, and where.

    A metric's size is its largest value in the expected run, or 1e-3 if that is smaller.
    """
    worst, where = 0.0, ""
    if expected.keys() != found.keys():
        return float("inf"), f"steps {sorted(expected)} and {sorted(found)}"
    for step, record in expected.items():
        for name, value in record.items():
            size = max([abs(other.get(name, 0.0)) for other in expected.values()] + [1e-3])
            gap = abs(found[step].get(name, float("inf")) - value) / size
            if not gap <= worst:
                worst, where = gap, f"{name} of step {step}: {value:.6g}, {found[step].get(name)}"
    return worst, where


def other_files(expected, found):
    """Returns the saved models (.safetensors) that are not the same in both folders."""
    files = {f.relative_to(expected) for f in expected.rglob("*.safetensors")}
    files = sorted(f for f in files if "checkpoints" not in f.parts)
    same = [(found / f).is_file() and filecmp.cmp(expected / f, found / f, False) for f in files]
    return [str(file) for file, equal in zip(files, same) if not equal]


def resume_halfway(options, known, whole, folder):
    """Resumes in `folder` from the checkpoint that the run in `whole` wrote halfway."""
    half = options.steps // 2
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("args.json", "metrics.jsonl", "samples.jsonl", "tokens.jsonl"):
        if (whole / name).exists():
            shutil.copy(whole / name, folder)
    shutil.copytree(whole / f"checkpoints/step-{half}", folder / f"checkpoints/step-{half}")
    launch(options, known, folder, LAYOUTS[WHOLE], "--resume")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4, help="of each run")
    parser.add_argument("--rows", type=int, default=8, help="of a step, over all ranks")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="relative, between layouts")
    parser.add_argument("--quick", action="store_true", help=f"these alone: {'; '.join(QUICK)}")
    parser.add_argument("--keep", type=Path, help="folder for the runs; else a temporary one")
    parser.add_argument("script")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    help_text = subprocess.run(
        [sys.executable, options.script, "--help"], capture_output=True, text=True
    ).stdout
    known = set(help_text.replace(",", " ").split())
    base = options.keep or Path(tempfile.mkdtemp(prefix="fork-"))

    found, failed = {}, False
    print(f"{'layout':34}{'largest difference':>20}   where")
    for name in QUICK if options.quick else LAYOUTS:
        layout = LAYOUTS[name]
        folder = base / name.replace(", ", "_").replace(" ", "_")
        half = ["--save_steps", options.steps // 2, "--keep_checkpoints", 9]
        launch(options, known, folder, layout, *half * (name == WHOLE))
        found[name] = curves(folder)
        gap, where = difference(next(iter(found.values())), found[name])
        wrong = not gap <= options.tolerance
        failed |= wrong
        print(f"{name:34}{gap:20.2g}   {where}{'   DIFFERS' * wrong}", flush=True)
        if name == WHOLE:
            whole = folder
    folder = base / "resumed"
    resume_halfway(options, known, whole, folder)
    gap, where = difference(found[WHOLE], curves(folder))
    if others := other_files(whole, folder):
        gap, where = gap or float("inf"), where or f"other weights in {', '.join(others)}"
    failed |= gap != 0
    print(f"{RESUMED:34}{gap:20.2g}   {where}{'   DIFFERS' * (gap != 0)}")
    print("DIFFERS" if failed else "equal: up to rounding, and to the bit when resumed")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
