"""Fault injection: runs of the three scripts that are killed, starved of disk, hung or damaged, and
then resumed.

Starting Python and torch takes far longer than training a tiny model. So this process imports all
once, and then forks the ranks of one run after the other. A run is killed as a whole (SIGKILL to
its process group) before a certain time that rank 0 touches a file of the output folder, which is
mostly while checkpoints are written.

    python tests/kill.py              20 moments spread over four runs: the table of
                                      docs/reliability.md, 6 minutes
    python tests/kill.py FACTS.json   the scenes of test_12_reliability.py, which reads what was
                                      seen from that file
"""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    DS_ACCELERATOR="cpu",
    # torch's AdamW, because a killed build of DeepSpeed's leaves a lock behind
    CXX="no-compiler",
    TORCH_EXTENSIONS_DIR=tempfile.mkdtemp(),
)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import load_file

from tests import workers
from tests.workers import CLOCKS

TOUCHES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
RUNS = {
    "sft_zero0": ("sft", 0),
    "reward_zero2": ("reward", 2),
    "sft_zero3": ("sft", 3),
    "ppo_zero2": ("ppo", 2),
}


def prepare():
    """Returns a folder with tiny models and data. After it all imports are done, without any thread
    that a fork would lose."""
    from tqdm import tqdm

    import ppo  # noqa: F401
    import reward  # noqa: F401
    import sft  # noqa: F401
    from machinery.run import logs

    torch.set_num_threads(1)
    # its thread may hold a lock at the fork, which then is never released
    tqdm.monitor_interval = 0
    logs.draw_curves = lambda args: None
    base = Path(tempfile.mkdtemp(prefix="rlhf-kill-"))
    os.environ["HF_DATASETS_CACHE"] = str(base / "datasets")
    workers.prepare(base)
    return base


def flags(base, script, stage, *more):
    """Five steps (PPO: four), a checkpoint after every second one."""
    options = workers.run(script, "--save_steps", 2, *more, zero=stage)["flags"]
    return [*workers.base_flags(script, base), *options]


def rank_of_a_run(script, argv, rank, output, kill_at, fault):
    """What a rank does, from fork to exit."""
    log = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    sys.argv, count, code = [f"{script}.py", *argv, "--output_dir", str(output)], 0, 0

    def count_touches(event, details):
        nonlocal count
        if event in TOUCHES and str(details[0]).startswith(str(output)):
            count += 1
            if count == kill_at or (
                isinstance(kill_at, str)
                and all(word in f"{event} {details}" for word in kill_at.split())
            ):
                os.killpg(0, signal.SIGKILL)

    if rank == 0:
        sys.addaudithook(count_touches)
    try:
        fault(rank) if fault else None
        __import__(script).main()
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if rank == 0:
        Path(f"{output}.touches").write_text(str(count))
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def run(script, argv, output, ranks=2, kill_at=None, fault=None, limit=240):
    """Makes one run on `ranks` ranks. Returns (each rank's exit code, minus the signal if one ended
    it; what was printed; seconds).

    kill_at: before rank 0's so many-th file operation, or before the first one in which all these
    words occur. fault(rank) is called in each rank first. Unlike under a launcher nothing stops the
    other ranks when one has ended: whoever hangs is killed after `limit` seconds, code -9.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{output}.log").unlink(missing_ok=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    began, children = time.time(), []
    for rank in range(ranks):
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        child = multiprocessing.get_context("fork").Process(
            target=rank_of_a_run, args=(script, argv, rank, output, kill_at, fault)
        )
        child.start()
        os.setpgid(child.pid, children[0].pid if children else child.pid)
        children.append(child)
    for child in children:
        child.join(max(0, began + limit - time.time()))
    if any(child.is_alive() for child in children):
        os.killpg(children[0].pid, signal.SIGKILL)
        [child.join() for child in children]
    return (
        [child.exitcode for child in children],
        Path(f"{output}.log").read_text(),
        time.time() - began,
    )


def weights_in(output):
    """Returns the weights of all models in a folder, {file and name: bytes}."""
    return {
        f"{file.relative_to(output)} {name}": bytes(tensor.flatten().view(torch.uint8).numpy())
        for file in sorted(output.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def outcome(output):
    """Returns what a finished run leaves behind, without its clocks: weights as bytes, metrics,
    samples."""
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    samples = output / "samples.jsonl"
    return {
        "metrics": [{k: v for k, v in record.items() if k not in CLOCKS} for record in metrics],
        "samples": samples.read_text() if samples.exists() else "",
        "weights": weights_in(output),
    }


# --------------------------------------------------------------------------------------------------
# The scenes of test_12_reliability.py: sft.py, two ranks, ZeRO 2, five steps, checkpoints after
# steps 2 and 4
# --------------------------------------------------------------------------------------------------
def at_step(step, action, only=None):
    """Returns a fault: after step `step` has been computed, and before anything is saved, it calls
    `action` (in rank `only`)."""

    def fault(rank):
        from machinery.run import crash

        check_finite = crash.stop_unless_finite

        def check_finite_and_act(args, record, *rows):
            if record["step"] == step and only in (None, rank):
                action()
            return check_finite(args, record, *rows)

        crash.stop_unless_finite = check_finite_and_act

    return fault


def no_more_disk():
    """From now on writing fails in files longer than 20 kB, by the kernel's own error: the disk is
    full, for this process."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def an_hour_later():
    clock = time.time
    time.time = lambda: clock() + 3600


def ctrl_c_twice():
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(40)
    os._exit(7)


def wrong():
    raise ValueError("a bug of the user's")


def scenes(base):
    """Returns {scene: what was seen}. One run is killed three times; another meets seven mishaps,
    one after the other."""
    argv, whole, seen = (
        flags(base, "sft", 2, "--num_samples", 0, "--weight_decay", 0.1),
        base / "scenes/whole",
        {},
    )

    def play(name, output, *more, **options):
        output = whole.parent / output
        codes, log, _ = run("sft", [*argv, *map(str, more)], output, **options)
        finished = (output / "config.json").exists()
        found = outcome(output) if finished else {}
        seen[name] = {
            "codes": codes,
            "log": log.replace("[rank0]:", "").replace("[rank1]:", ""),
            "finished": finished,
            "checkpoints": sorted(f.name for f in output.glob("checkpoints/*")),
            "identical": finished and found == (expected or found),
        }
        print(
            name,
            codes,
            seen[name]["checkpoints"],
            "identical" if seen[name]["identical"] else "",
            flush=True,
        )
        return found

    expected = None
    expected = play("whole", "whole", "--keep_checkpoints", 2)

    play("killed in the first checkpoint", "killed", kill_at="open unfinished/manifest.json")
    play("killed in the second", "killed", "--resume", kill_at="shutil.rmtree step-2")
    play("killed as the model is saved", "killed", "--resume", kill_at="os.rename config.json")
    play("resumed after three kills", "killed", "--resume")

    play("a rank dies", "mishaps", fault=at_step(3, die, only=1))
    play("a rank fails", "mishaps", "--resume", fault=at_step(3, wrong, only=1))
    play(
        "a rank hangs",
        "mishaps",
        "--resume",
        "--timeout_minutes",
        0.2,
        fault=at_step(3, hang, only=1),
    )
    play("ctrl-c twice", "mishaps", "--resume", fault=at_step(3, ctrl_c_twice, only=1))
    play("disk full", "mishaps", "--resume", fault=at_step(4, no_more_disk))
    play(
        "time is over",
        "mishaps",
        "--resume",
        "--max_hours",
        1,
        "--keep_checkpoints",
        2,
        fault=at_step(3, an_hour_later, only=1),
    )
    newest = max(
        whole.parent.glob("mishaps/checkpoints/step-3/**/*.pt"), key=lambda f: f.stat().st_size
    )
    os.truncate(newest, newest.stat().st_size // 2)
    play("newest cut short", "mishaps", "--resume")

    grown = shutil.copytree(base / "data", base / "grown/data") / "train.jsonl"
    grown.write_text(
        grown.read_text()
        + "".join(
            json.dumps({"prompt": f"Why {i}?", "chosen": " So.", "rejected": " No."}) + "\n"
            for i in range(9)
        )
    )
    gone = shutil.copytree(
        whole, whole.parent / "gone", ignore=shutil.ignore_patterns("config.json", "manifest.json")
    )
    play("none whole", gone.name, "--resume")

    for name, ranks, rows, accumulation, more in (
        ("one rank", 1, 2, 4, []),
        ("one rank, other batch", 1, 2, 2, []),
        ("other stage", 1, 2, 4, ["--zero_stage", 3]),
        ("smaller batches", 2, 1, 4, []),
        ("larger batches", 2, 4, 1, []),
        ("other rate", 2, 2, 2, ["--learning_rate", 1e-9]),
        ("other rows", 1, 2, 4, ["--data_path", base / "grown/data"]),
    ):
        shutil.copytree(
            whole, whole.parent / name, ignore=shutil.ignore_patterns("config.json", "step-4")
        )
        found = play(
            name,
            name,
            "--resume",
            "--per_device_train_batch_size",
            rows,
            "--gradient_accumulation_steps",
            accumulation,
            *more,
            ranks=ranks,
        )
        if found:
            import numpy as np
            import torch

            saved = torch.load(
                whole / "checkpoints/step-2/model/state/mp_rank_00_model_states.pt",
                weights_only=False,
            )["module"]
            seen[name]["moved"] = max(
                (
                    saved[key.split()[-1]]
                    - torch.tensor(np.frombuffer(a, "f4")).view_as(saved[key.split()[-1]])
                )
                .abs()
                .max()
                .item()
                for key, a in found["weights"].items()
            )
            seen[name]["rates"] = [record["learning_rate"] for record in found["metrics"][1:]]
            seen[name]["difference"] = max(
                float(
                    np.abs(
                        np.frombuffer(a, "f4") - np.frombuffer(found["weights"][key], "f4")
                    ).max()
                )
                for key, a in expected["weights"].items()
            )
    return seen


# --------------------------------------------------------------------------------------------------
# Twenty moments
# --------------------------------------------------------------------------------------------------
def where(output):
    """Returns, in words, how far a run had come when it was killed."""
    file, folder = output / "metrics.jsonl", output / "checkpoints"
    steps = (
        [json.loads(line)["step"] for line in file.read_text().splitlines()]
        if file.exists()
        else []
    )
    saved = sorted(f.name for f in folder.iterdir()) if folder.exists() else []
    parts = [
        f"step {steps[-1]}" if steps else "no step",
        *saved,
        "model partly saved" if [*output.rglob(".saving")] else "",
    ]
    return ", ".join(filter(None, parts))


def twenty_moments(base):
    """Returns the exit code. Four runs are each killed at five moments; all 20 fall into different
    parts of a run."""
    results = []
    for place, (name, (script, stage)) in enumerate(RUNS.items()):
        argv, whole = flags(base, script, stage), base / f"{name}/whole"
        codes, log, _ = run(script, argv, whole)
        assert codes == [0, 0], log
        touches, expected = int(Path(f"{whole}.touches").read_text()), outcome(whole)
        for number in range(5):
            output, kill_at = (
                base / f"{name}/{number}",
                2 + round((touches - 3) * (number * len(RUNS) + place) / 19),
            )
            codes, _, _ = run(script, argv, output, kill_at=kill_at)
            at = where(output)
            # before that nothing had begun
            resume = ["--resume"] if (output / "args.json").exists() else []
            resumed, log, _ = run(script, [*argv, *resume], output)
            # killed after config.json was in place, as the last folder was tidied up
            over = "holds a finished run" in log
            results.append((resumed == [0, 0] or over) and outcome(output) == expected)
            kept = " ".join(sorted(f.name for f in output.glob("checkpoints/*")))
            ended = ("finished" if over else "resumed") + ", identical"
            print(
                f"{name:13} before file operation {kill_at:3} of {touches}: {codes}; {at:44} "
                f"{ended if results[-1] else f'DIFFERS {log}'}; keeps {kept}",
                flush=True,
            )
    print(f"{sum(results)} of {len(results)} resumed and ended identical")
    return sum(results) != len(results)


if __name__ == "__main__":
    folder = prepare()
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps(scenes(folder)))
    else:
        sys.exit(twenty_moments(folder))
