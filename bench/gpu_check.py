"""Checks on GPUs what CPU ranks cannot show, with small models, in ten minutes: `make gpu-check`.

Each launch makes the runs of one group, on as many ranks as there are GPUs (at most four), with
the tiny models and rows of the tests. The same runs in fp32 on CPU ranks say what must come out.
One line for each check is printed, and the exit code is 1 if one has failed. What the machine lacks
(a second GPU, bf16, a compiler) is refused in words, and its line says so.

    python bench/gpu_check.py --cpu    the same checks on two CPU ranks, to try this file itself
"""

import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import memory  # beside this file
import torch

from tests import kit, runs

METRIC = {"sft": "loss", "reward": "loss", "ppo": "eval_reward"}
# of METRIC, relative to 1
TOLERANCE = {"fp32": 2e-3, "bf16": 5e-2, "fp16": 2e-2}
SIZE = "69M"


# --------------------------------------------------------------------------------------------------
# The runs: group -> {name: a run}. A launch for each group, so that one cannot end another
# --------------------------------------------------------------------------------------------------
def run(script, dtype, stage, *flags, **sizes):
    model = ["--model_name_or_path", "BASE/models/actor"] if script == "sft" else []
    flags = ["--dtype", dtype, *model, "--max_steps", 3, *flags]
    return runs.run(script, " ".join(map(str, flags)), zero=stage, **sizes)


def memory_run(stage, dtype):
    """A model of 69 M weights, on rows as long as --max_seq_len allows."""
    model, data = f"BASE/memory/{SIZE}", "BASE/memory/data"
    flags = ["--model_name_or_path", model, "--data_path", data, "--max_seq_len", 256]
    return run("sft", dtype, stage, *flags, "--num_samples", 0, rows=4, accumulation=1)


GROUPS = {
    "fp32": {f"{s}_fp32_zero{z}": run(s, "fp32", z) for s in kit.SCRIPTS for z in (0, 1, 2, 3)},
    "bf16": {f"{s}_bf16_zero{z}": run(s, "bf16", z) for s in kit.SCRIPTS for z in (1, 2, 3)},
    "fp16": {f"{s}_fp16_zero{z}": run(s, "fp16", z) for s in kit.SCRIPTS for z in (2, 3)},
    "flags": {
        "sft_fp32_adam_offload": run("sft", "fp32", 2, "--adam_offload"),
        "sft_fp32_offload": run("sft", "fp32", 3, "--adam_offload", "--offload"),
        "sft_fp32_checkpointing": run("sft", "fp32", 3, "--gradient_checkpointing"),
        "sft_fp32_again": run("sft", "fp32", 2),
        "ppo_fp32_offload_states2": run("ppo", "fp32", 2, "--offload_states"),
        "ppo_fp32_offload_states3": run("ppo", "fp32", 3, "--offload_states"),
    },
    "tensor parallel": {
        "sft_bf16_tensor_parallel": run("sft", "bf16", 2, "--tensor_parallel_size", 2)
    },
    "deepcompile": {"sft_bf16_deepcompile": run("sft", "bf16", 3, "--deepcompile")},
    "memory": {
        f"memory_{d}_zero{z}": memory_run(z, d) for d in ("fp32", "bf16") for z in (1, 2, 3)
    },
    "decoding": {},
}
REFERENCE = {f"{script}_reference": run(script, "fp32", 0) for script in kit.SCRIPTS}


# --------------------------------------------------------------------------------------------------
# A rank
# --------------------------------------------------------------------------------------------------
def worker(base, group):
    """Makes the runs of a group, and leaves facts/<run>.json."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from machinery.base import ranks
    from machinery.run import crash, logs

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(verbose=False)
    crash.finish = lambda args, code=0: sys.exit(code)  # the group of ranks lives on
    logs.draw_curves = lambda args: None
    for name, options in (REFERENCE if group == "reference" else GROUPS[group]).items():
        get_accelerator().reset_peak_memory_stats()
        began = get_accelerator().memory_allocated()
        facts = runs.make_run(base, name, **options)
        facts["bytes"] = get_accelerator().max_memory_allocated() - began
        if ranks.get_rank() == 0:
            (base / f"facts/{name}.json").write_text(json.dumps(facts))
    if group == "decoding" and ranks.get_rank() == 0:
        (base / "facts/decoding.json").write_text(json.dumps(decode(base)))
    ranks.barrier()
    os._exit(0)


def decode(base):
    """Waits of the host and milliseconds for each token, 8 rows: 128 tokens less 64; and whether
    --compile_decoding samples the same tokens, and its milliseconds."""
    from transformers import AutoModelForCausalLM

    import common
    from machinery.base import ranks
    from machinery.rollout import decoding

    model = AutoModelForCausalLM.from_pretrained(base / "models/actor").to(ranks.device()).eval()
    tokenizer = type("NoEnd", (), {"pad_token_id": 0, "eos_token_id": -1})()
    ids, mask = (x.to(ranks.device()) for x in common.pad([[5, 6, 7]] * 8, 0))
    cuda, found = ranks.device().type == "cuda", []
    for tokens in (64, 64, 128):  # the first warms up
        uniforms = decoding.row_uniforms(1, 0, range(8), tokens)
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            if cuda:
                torch.cuda.set_sync_debug_mode("warn")
            began = time.time()
            sampled = kit.generate(model, ids, mask, uniforms, tokenizer)
            found.append((len(waits), time.time() - began))
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
    (_, _), (few, short), (many, long) = found
    began = {}
    for tokens in (64, 128) * 2:  # the first two compile
        began[tokens] = time.time()
        given = model, ids, mask, decoding.row_uniforms(1, 0, range(8), tokens), tokenizer
        compiled = kit.generate(*given, compile_decoding=True)
        began[tokens] = time.time() - began[tokens]
    same = (compiled[0] == sampled[0]).float().mean().item()
    return {
        "waits": (many - few) / 64,
        "milliseconds": 1e3 * (long - short) / 64,
        "compiled": 1e3 * (began[128] - began[64]) / 64,
        "same": same,
    }


# --------------------------------------------------------------------------------------------------
# The launches and the table
# --------------------------------------------------------------------------------------------------
def launch(base, group, ranks, accelerator):
    os.environ["DS_ACCELERATOR"] = accelerator
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc_per_node", ranks, __file__, "rank", base, group]
    done = kit.start_command(command, limit=1500)
    return done.out + done.err


def curve(base, name, metric):
    lines = (base / f"runs/{name}/metrics.jsonl").read_text().splitlines()
    values = [json.loads(line).get(metric) for line in lines]
    return [value for value in values if value is not None]


def check(base, name):
    """Returns (whether it is as it must be, or None; in words)."""
    file = base / f"facts/{name}.json"
    if not file.exists():
        return False, "did not end"
    facts = json.loads(file.read_text())
    if name == "decoding":
        words = "{waits:.1f} waits, {milliseconds:.2f} ms a token; compiled {compiled:.2f} ms"
        words = f"{words}, {{same:.0%}} of its tokens equal".format(**facts)
        return facts["waits"] <= 2.5 and facts["same"] > 0.9, words
    if facts["code"] == 2:
        return None, "refused: the log says why"
    if facts["code"] != 0:
        return False, f"exit code {facts['code']}"
    script, dtype = name.split("_")[:2]
    if script == "memory":
        return compare_memory(base, dtype, int(name[-1]), facts["bytes"])
    if script == "ppo" and dtype != "fp32":  # other tokens are sampled: compare a pass with itself
        off = max(abs(ratio - 1) for ratio in curve(base, name, "ratio_max"))
        return off <= TOLERANCE[dtype], f"old and new policy differ by {off:.1e} at the first pass"
    found, expected = (curve(base, each, METRIC[script]) for each in (name, f"{script}_reference"))
    error = max(abs(a - b) / max(1, abs(b)) for a, b in zip(found, expected))
    good = len(found) == len(expected) and error <= TOLERANCE[dtype]
    return good, f"{METRIC[script]} differs by {error:.1e} from fp32 on CPU ranks"


def compare_memory(base, dtype, stage, measured):
    if not torch.cuda.device_count():  # resident memory, which never falls, of all runs so far
        return None, "it ran; the peak of one run is known on a GPU only"
    import sft
    from tools import estimate
    from tools import estimate_memory as count

    options = memory_run(stage, dtype)["flags"]
    flags = [flag.replace("BASE", str(base)) for flag in options]
    args = sft.get_args([*runs.base_flags("sft", base), *flags])
    devices = min(torch.cuda.device_count(), 4)
    phases = count.count(args, estimate.language_model(args), devices)
    expected = max(sum(parts.values()) for parts in phases.values())
    words = f"{measured / 2**20:,.0f} MiB at the peak, the estimate is {expected / 2**20:,.0f}"
    return 0.8 < measured / expected < 1.25, words


def main():
    on_cpu = sys.argv[1:] == ["--cpu"]
    gpus = torch.cuda.device_count()
    if not gpus and not on_cpu:
        print("error: no GPU is here. `make test` and `make test-all` are what a CPU can show.")
        sys.exit(2)
    accelerator, ranks = ("cpu", 2) if on_cpu else ("cuda", min(gpus, 4))
    began, base = time.time(), Path(tempfile.mkdtemp(prefix="gpu-check-"))
    kit.base = lambda: base
    kit.prepare(base)
    for name in ("memory", "facts"):
        (base / name).mkdir()
    memory.prepare(base / "memory", SIZE)
    device = "CPU ranks" if on_cpu else f"x {torch.cuda.get_device_name()}"
    print(f"{ranks} {device}, torch {torch.__version__}; runs and logs in {base}")
    launch(base, "reference", ranks, "cpu")
    failed = 0
    for group, made in GROUPS.items():
        output = launch(base, group, ranks, accelerator)
        (base / f"{group}.log").write_text(output)
        for name in made or [group]:
            good, words = check(base, name)
            failed += good is False
            mark = {True: "ok", False: "FAILED", None: "-"}[good]
            print(f"{mark:7}{name:28}{words}", flush=True)
    print(f"{failed} failed, {time.time() - began:.0f} seconds. Logs: {base}/<group>.log")
    sys.exit(failed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        worker(Path(sys.argv[2]), sys.argv[3])
    main()
