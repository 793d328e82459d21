"""Checks on GPUs what CPU ranks cannot show, with small models, in 15 minutes: `make gpu-check`.

Each launch makes the runs of one group, on as many ranks as there are GPUs (at most four), with
the tiny models and rows of the tests. The same runs in fp32 on CPU ranks say what must come out;
of those on several machines, the other ZeRO stage does, so that what both get wrong is not seen.
One line for each check is printed, and the exit code is 1 if one has failed. What the machine lacks
(a second GPU, bf16, a compiler) is refused in words, and its line says so. What could not be tried
has a line, too. The last line holds all that we would ask for: please send it to us.

    python tools/gpu_check.py --cpu              the same checks on two CPU ranks, to try this file
    python tools/gpu_check.py --pretend          on one CPU rank whose tensors say that they are on
                                                 a GPU, and must not be mixed with the CPU's:
                                                 tests/two_devices.py says what that shows
    python tools/gpu_check.py decoding lora      these groups alone
    python tools/gpu_check.py --hosts FILE       one group more, on all machines of a hostfile; the
                                                 folder for temporary files must be shared (TMPDIR)
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if sys.argv[1:2] == ["rank"]:  # before tests.kit chooses the CPU; a launcher hands no variable on
    os.environ["DS_ACCELERATOR"] = sys.argv[4]
import bench_inside  # beside this file
import torch

from tests import gpu_rows, kit, runs, two_devices

METRIC = {"sft": "loss", "reward": "loss", "ppo": "eval_reward"}
# of METRIC, relative to 1
TOLERANCE = {"fp32": 2e-3, "bf16": 5e-2, "fp16": 2e-2}
SIZE = "69M"
ON_GPUS_ONLY = "attention", "memory"  # groups whose rows --pretend cannot know


# --------------------------------------------------------------------------------------------------
# The runs: group -> {name: a run}. A launch for each group, so that one cannot end another
# --------------------------------------------------------------------------------------------------
def run(script, dtype, stage, flags="", **sizes):
    model = "--model_name_or_path BASE/models/actor" * (script == "sft")
    return runs.run(script, f"{model} --dtype {dtype} --max_steps 3 {flags}", stage, **sizes)


GRPO = "--advantage grpo --kl_in loss --kl_estimator k3 --samples_per_prompt 2"
LORA = "--lora_dim 4 --save_steps 2 --keep_checkpoints 9"
LARGE = f"""--model_name_or_path BASE/memory/{SIZE} --data_path BASE/memory/data --max_seq_len 256
    --num_samples 0"""
GROUPS = {
    "attention": dict.fromkeys(f"attention_{name}" for name in gpu_rows.KERNELS),
    "fp32": {f"{s}_fp32_zero{z}": run(s, "fp32", z) for s in kit.SCRIPTS for z in (0, 1, 2, 3)},
    "bf16": {f"{s}_bf16_zero{z}": run(s, "bf16", z) for s in kit.SCRIPTS for z in (1, 2, 3)},
    "fp16": {f"{s}_fp16_zero{z}": run(s, "fp16", z) for s in kit.SCRIPTS for z in (2, 3)},
    "flags": {
        "sft_fp32_adam_offload": run("sft", "fp32", 2, "--adam_offload"),
        "sft_fp32_offload": run("sft", "fp32", 3, "--adam_offload --offload"),
        "sft_fp32_checkpointing": run("sft", "fp32", 3, "--gradient_checkpointing"),
        "sft_fp32_again": run("sft", "fp32", 2),
        "ppo_fp32_offload_states2": run("ppo", "fp32", 2, "--offload_states"),
        "ppo_fp32_offload_states3": run("ppo", "fp32", 3, "--offload_states"),
    },
    "lora": {
        "sft_fp32_lora": run("sft", "fp32", 2, LORA),
        "sft_fp32_lora_zero3": run("sft", "fp32", 3, LORA),
        "sft_fp32_lora_resumed": run(
            "sft", "fp32", 2, f"{LORA} --resume", before=("sft_fp32_lora", 2)
        ),
    },
    "grpo": {
        "ppo_fp32_grpo": run("ppo", "fp32", 2, GRPO),
        "ppo_fp32_grpo_apart": run("ppo", "fp32", 2, f"{GRPO} --share_prompt 0"),
        "ppo_bf16_grpo": run("ppo", "bf16", 2, GRPO),
    },
    "tensor parallel": {
        "sft_bf16_tensor_parallel": run("sft", "bf16", 2, "--tensor_parallel_size 2")
    },
    "deepcompile": {"sft_bf16_deepcompile": run("sft", "bf16", 3, "--deepcompile")},
    # a model of 69 M weights, on rows as long as --max_seq_len allows
    "memory": {
        f"memory_{dtype}_zero{z}": run("sft", dtype, z, LARGE, rows=4, accumulation=1)
        for dtype in ("fp32", "bf16")
        for z in (1, 2, 3)
    },
    "decoding": dict.fromkeys(("decoding_fp32", "decoding_bf16")),
}
MACHINES = {f"sft_bf16_machines_zero{z}": run("sft", "bf16", z) for z in (2, 3)}  # --hosts
REFERENCE = {f"{script}_reference": run(script, "fp32", 0) for script in kit.SCRIPTS}
REFERENCE["sft_lora_reference"] = run("sft", "fp32", 0, "--lora_dim 4")
REFERENCE["ppo_grpo_reference"] = run("ppo", "fp32", 0, GRPO)
ALL = {**GROUPS, "machines": MACHINES, "reference": REFERENCE}


# --------------------------------------------------------------------------------------------------
# A rank
# --------------------------------------------------------------------------------------------------
def worker(base, part):
    """Makes the runs of a group, or one of the group memory, and leaves facts/<run>.json."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from machinery import launch, patches, ranks, run

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    launch.use_built()
    launch.do_without_all_reduce()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(verbose=False)
    run.Run.finish = lambda run, code=0: sys.exit(code)  # the group of ranks lives on
    patches.mend_attention()
    if part in ("attention", "decoding"):
        found = getattr(gpu_rows, part)()
    elif part in ALL:
        found = ((name, make(base, name, **run)) for name, run in ALL[part].items())
    else:
        found = [(part, make(base, part, **GROUPS["memory"][part]))]
    pretends = "PRETEND" in os.environ and part != "reference"
    with two_devices.program() if pretends else contextlib.nullcontext():
        for name, facts in found:
            facts["bytes"] = get_accelerator().max_memory_allocated()
            if ranks.get_rank() == 0:
                (base / f"facts/{name}.json").write_text(json.dumps(facts))
    ranks.barrier()
    os._exit(0)


def make(base, name, before=None, **options):
    """Makes a run, or goes on from a checkpoint of the one before it."""
    from machinery import ranks

    if before and ranks.get_rank() == 0:
        runs.copy_checkpoint(base / "runs" / before[0], before[1], base / "runs" / name)
    ranks.barrier()
    return runs.make_run(base, name, **options)


# --------------------------------------------------------------------------------------------------
# The launches and the table
# --------------------------------------------------------------------------------------------------
def launch(base, part, ranks, accelerator, hosts=None):
    """Starts the ranks of a group, or of one run. Returns what they print."""
    os.environ["DS_ACCELERATOR"] = accelerator
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", ranks]
    if hosts:
        launcher = Path(sys.executable).parent / "deepspeed"
        command = [launcher, "--no_local_rank", "--hostfile", hosts]
    done = kit.start_command([*command, __file__, "rank", base, part, accelerator], limit=600)
    return done.out + done.err


def curve(base, name, metric):
    """Returns the values of a metric, none if the run did not get so far."""
    folder = base / "runs" / name
    lines = kit.metrics(folder) if (folder / "metrics.jsonl").exists() else []
    return [line[metric] for line in lines if line.get(metric) is not None]


def check(base, name):
    """Returns (whether it is as it must be, or None where that is not known; in words)."""
    script, dtype = name.split("_")[:2]
    if "PRETEND" in os.environ and script in ON_GPUS_ONLY:
        return None, "a GPU shows it, and nothing else"
    file = base / f"facts/{name}.json"
    if not file.exists():
        return False, "did not end: the log says why"
    facts = json.loads(file.read_text())
    if script in ("attention", "decoding"):
        return getattr(gpu_rows, f"check_{script}")(dtype, facts)
    if facts["code"] == 2:
        return None, "refused: the log says why"
    if facts["code"] != 0:
        return False, f"exit code {facts['code']}"
    if script == "memory":
        return check_memory(base, name, facts["bytes"])
    if script == "ppo" and dtype != "fp32":  # other tokens are sampled: compare a pass with itself
        off = max(abs(ratio - 1) for ratio in curve(base, name, "ratio_max"))
        return off <= TOLERANCE[dtype], f"old and new policy differ by {off:.1e} at the first pass"
    special = next((f"{word}_" for word in ("lora", "grpo") if word in name), "")
    reference = f"{script}_{special}reference"
    if name in MACHINES:  # more ranks, other batches: the other stage must give the same
        reference = min(MACHINES.keys() - {name})
    found, expected = (curve(base, each, METRIC[script]) for each in (name, reference))
    if not expected:
        return None, f"it ran; {reference} did not: see logs"
    error = max(abs(a - b) / max(1, abs(b)) for a, b in zip(found, expected))
    good = len(found) == len(expected) and error <= TOLERANCE[dtype]
    return good, f"{METRIC[script]} differs by {error:.1e} from {reference}"


def check_memory(base, name, measured):
    if not torch.cuda.device_count():  # resident memory, which never falls
        return None, "it ran; the peak of one run is known on a GPU only"
    import sft
    from tools import estimate, estimate_memory

    flags = [*runs.base_flags("sft", base), *GROUPS["memory"][name]["flags"]]
    args = sft.get_args([flag.replace("BASE", str(base)) for flag in flags])
    devices = min(torch.cuda.device_count(), 4)
    phases = estimate_memory.count(args, estimate.language_model(args), devices)
    expected = max(sum(parts.values()) for parts in phases.values())
    words = f"{measured / 2**20:,.0f} MiB at the peak, the estimate is {expected / 2**20:,.0f}"
    return 0.8 < measured / expected < 1.25, words


def get_args():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    arg = parser.add_argument
    arg("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)} [all]")
    arg("--cpu", action="store_true", help="on two CPU ranks")
    arg("--pretend", action="store_true", help="on a CPU that says it is a GPU")
    arg("--hosts", metavar="FILE", help="a hostfile of DeepSpeed's launcher")
    args = parser.parse_args()
    if unknown := set(args.groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(unknown)}. There are {', '.join(GROUPS)}.")
    return args


def main():
    args = get_args()
    gpus = torch.cuda.device_count()
    if not (gpus or args.cpu or args.pretend):
        print("error: no GPU is here. `make test` and `make test-all` are what a CPU can show.")
        sys.exit(2)
    accelerator, ranks = ("cpu", 2) if args.cpu else ("cuda", min(gpus, 4))
    if args.pretend:
        accelerator, ranks, os.environ["PRETEND"] = "cpu", 1, "1"
    began, base = time.time(), Path(tempfile.mkdtemp(prefix="gpu-check-"))
    kit.base = lambda: base
    kit.prepare(base)
    for name in ("memory", "facts"):
        (base / name).mkdir()
    bench_inside.full_rows(base / "memory", SIZE)
    device = "CPU rank that pretends to be a GPU" if args.pretend else "CPU ranks"
    if accelerator == "cuda":
        device = f"x {torch.cuda.get_device_name()}"
    print(f"{ranks} {device}, torch {torch.__version__}; runs and logs in {base}")
    (base / "reference.log").write_text(launch(base, "reference", ranks, "cpu"))
    table, groups = {}, [*(args.groups or GROUPS), *["machines"] * bool(args.hosts)]
    for group in groups:
        hosts = args.hosts if group == "machines" else None
        # One process for each peak: DeepSpeed's hooks keep the engine of a run that has ended.
        parts = GROUPS["memory"] if group == "memory" else [group]
        parts = [] if args.pretend and group in ON_GPUS_ONLY else parts
        output = [launch(base, part, ranks, accelerator, hosts) for part in parts]
        (base / f"{group}.log").write_text("\n".join(output))
        for name in ALL[group]:
            try:
                good, words = check(base, name)
            except Exception as error:  # of a file that a run has left half written
                good, words = False, f"{type(error).__name__}: {error}"
            table[name] = good, words
            mark = {True: "ok", False: "FAILED", None: "-"}[good]
            print(f"{mark:7}{name:28}{words}", flush=True)
    print(f"{time.time() - began:.0f} seconds. Logs: {base}/<group>.log. Please send us this line:")
    print(json.dumps({"gpu_check": summary(device, ranks, table)}))
    sys.exit(any(good is False for good, _ in table.values()))


def summary(device, ranks, table):
    """Returns what the last line says: the machine, what failed, and every number measured."""
    import deepspeed
    import transformers

    versions = [torch.__version__, deepspeed.__version__, transformers.__version__]
    counts = [sum(good is kind for good, _ in table.values()) for kind in (True, False, None)]
    words = {n: w for n, (good, w) in table.items() if not good or n[:3] in ("att", "dec", "mem")}
    facts = {"device": f"{ranks} {device}", "torch, deepspeed, transformers": versions}
    return {**facts, "ok, failed, not known": counts, "rows": words}


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        worker(Path(sys.argv[2]), sys.argv[3])
    main()
