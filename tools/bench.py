"""Benchmark: our scripts and their best peer on the same work, in turn, and the machine's limit.

    make bench                              every row, fp32 and bf16
    python tools/bench.py --only sft ppo --dtype bf16
                                            some rows, one dtype
    python tools/bench.py --against FOLDER  another checkout of this project takes the peer's place:
                                            old, ours, old, ours, ...
    python tools/bench.py --model FOLDER    a pretrained model, such as the one of `make real`
    python tools/bench.py --gpu             large random models on one GPU (docs/performance.md)

A row is the command line of a script, or sampling by itself ("decode"). Each measurement is a
process of its own:
  ours      the script as a user starts it. Its speed is read from its metrics.jsonl
  old       the same command line in the folder of --against
  trl       TRL's trainer on the same token ids, weights, batch sizes and learning rate
            (bench_trl.py; tools/requirements-bench.txt installs it)
  trl+len   the same, with the Trainer's own option to batch rows of like length, which is off by
            default
  generate  transformers' decoding in place of ours (bench_inside.py)
The first step of each process is not counted. Quality is measured by our scripts' evaluation, on
both sides' models.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSIDE, TRL = (ROOT / f"tools/bench_{name}.py" for name in ("inside", "trl"))
# This process imports nothing heavy: a child's peak memory is counted from its parent's.


# ---- The rows ----
@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    script: str
    flags: str
    sides: str = "ours trl"  # they take turns
    model: str = "tiny"  # of bench_inside.SHAPES
    batch: int = 0  # rows, pairs or responses of a step, over all ranks
    steps: int = 0
    samples: int = 1  # responses to each prompt
    ranks: int = 1
    dtypes: str = "fp32 bf16"

    @property
    def data(self):
        """Rows of data, for one epoch of just `steps` steps: both sides see the same rows."""
        return self.batch // self.samples * self.steps


UNITS = {
    "sft": "tokens/s",
    "reward": "pairs/s",
    "ppo": "samples/s",
    "decode": "tokens/s",
    "machine": "GFLOP/s",
}
ALL = """--preset opt-1.3b --data_path {work}/data-{data} --output_dir {work}/out --dtype {dtype}
    --zero_stage 0 --num_train_epochs 1 --num_warmup_steps 0 --lr_scheduler_type constant
    --gradient_accumulation_steps 1 --per_device_eval_batch_size {rows} """
LEARN = """--per_device_train_batch_size {rows} --learning_rate {rate} --weight_decay 0
    --dropout 0 """
FLAGS = {
    "sft": f"{ALL}{LEARN} --model_name_or_path {{model}} --data_split 1,0,0 --num_samples 0 ",
    "reward": f"{ALL}{LEARN} --model_name_or_path {{model}}-score --data_split 0,1,0 ",
    "ppo": f"""{ALL}
        --actor_model_name_or_path {{model}} --critic_model_name_or_path {{model}}-score
        --per_device_generation_batch_size {{rows}} --per_device_training_batch_size {{rows}}
        --samples_per_prompt {{samples}} --actor_learning_rate {{rate}}
        --critic_learning_rate {{rate}} --kl_coef 0.05 --critic_dropout 0 --enable_ema 0
        --data_split 0,0,1 --num_eval_prompts {{rows}} """,
}
SMOKE = {
    "sft": " --max_seq_len 64",
    "reward": " --max_seq_len 64",
    "ppo": " --max_prompt_seq_len 16 --max_answer_seq_len 8",
    "decode": " --prompt 16 --answer 8",
}
SHORT = "--max_prompt_seq_len 128 --max_answer_seq_len 64"
GRPO = f"{SHORT} --advantage grpo --kl_in loss --reward_fn {__file__}:letters"
CPU = [
    Row("sft", "sft", "--max_seq_len 512", "ours trl trl+len", batch=8, steps=16),
    Row("reward", "reward", "--max_seq_len 512", batch=4, steps=16),
    Row("ppo", "ppo", SHORT, batch=8, steps=6),
    # The peer is TRL's GRPOTrainer, of a TRL that --peer_python can name: 1.14.2, the last that on
    # a CPU makes no logits of prompts.
    Row("grpo", "ppo", GRPO, batch=32, samples=4, steps=6),
    Row("zero3", "ppo", f"{SHORT} --zero_stage 3", batch=8, steps=12, ranks=2, dtypes="fp32"),
    *(
        Row(f"decode {n} rows", "decode", f"--rows {n} --prompt 128 --answer 64", "ours generate")
        for n in (8, 64)
    ),
]
REAL = [  # with --model
    replace(row, name=f"{row.name} real", model="real", batch=min(row.batch // 2, 8), steps=8)
    for row in CPU[:4]
]
TEXTS = "--max_seq_len 2048 --train_on everything"
LONG = "--max_prompt_seq_len 256 --max_answer_seq_len 256 --gradient_checkpointing"
DECODE = "--prompt 256 --answer 256 --rows"
SAVING = "--zero_stage 2 --gradient_checkpointing"
OFFLOAD = "--zero_stage 3 --offload --adam_offload"
SMALL = ("opt-1.3b", "llama-1b")
GPU = [  # each is meant to fit one device of 80 GB: python tools/estimate.py says by how much
    *(Row(f"sft {m}", "sft", TEXTS, "ours", m, 8, 8) for m in SMALL),
    Row("sft llama-3b", "sft", f"{TEXTS} {SAVING}", "ours", "llama-3b", 4, 8),
    *(Row(f"reward {m}", "reward", "--max_seq_len 2048", "ours", m, 4, 8) for m in SMALL),
    *(
        Row(f"decode {m} {n} rows", "decode", f"{DECODE} {n}", "ours generate", m)
        for m in (*SMALL, "llama-7b")
        for n in (8, 64)
    ),
    *(Row(f"ppo {m}", "ppo", LONG, "ours generate", m, 32, 5) for m in SMALL),
    Row("sft zero3", "sft", f"{TEXTS} --zero_stage 3", "ours", "llama-1b", 8, 8),
    Row("sft zero3 offload", "sft", f"{TEXTS} {OFFLOAD}", "ours", "llama-1b", 8, 4),
    Row("ppo zero3", "ppo", f"{LONG} --zero_stage 3", "ours generate", "llama-1b", 32, 3),
    Row("ppo zero3 offload", "ppo", f"{LONG} {OFFLOAD}", "ours", "llama-1b", 32, 3),
]


def letters(prompts, completions, **columns):
    """The reward of GRPO's rows: the share of lower-case letters in a response."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [sum(map(str.islower, text)) / max(len(text), 1) for text in texts]


def flags_of(row, work, dtype, smoke=False):
    """Returns the flags of a row, as a list."""
    # For random weights large enough for the quality columns to tell a trained model from an
    # untrained one; PPO takes a tenth.
    rate = (1e-3 if row.model == "tiny" else 1e-5) / (10 if row.script == "ppo" else 1)
    names = {**asdict(row), "work": work, "model": f"{work}/{row.model}", "data": row.data}
    names |= {"rows": row.batch // row.ranks, "rate": rate, "dtype": dtype}
    text = FLAGS.get(row.script, "") + row.flags + SMOKE.get(row.script, "") * smoke
    return [word.format(**names) for word in text.split()]


# ---- Measurements, each a process ----
def start(args, program, ranks=1, python=sys.executable, tree=ROOT):
    """Runs a program in a folder. Returns its seconds and its peak memory in GB, of the largest
    rank; None if it failed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks]
    command = [python, *(torchrun if ranks > 1 else []), *program]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DS_ACCELERATOR": "cuda" if args.gpu else "cpu",
    }
    if not args.gpu:
        threads = 1 if args.smoke else max(1, 2 // ranks)
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
    if python != sys.executable:  # two installations must not rebuild each other's kernels
        environment["TORCH_EXTENSIONS_DIR"] = str(args.work / "peer-extensions")
    began = time.time()
    with open(args.work / "child.log", "w") as log:
        words = [str(word) for word in command]
        process = subprocess.Popen(words, cwd=tree, env=environment, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    found = {"wall": time.time() - began, "gb": usage.ru_maxrss / 2**20}
    return None if process.returncode else found


def measure(args, row, dtype, side):
    """Runs one side of a row once. Returns what is known of it; None if it failed."""
    result, out = args.work / "result.json", args.work / "out"
    result.unlink(missing_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    flags = flags_of(row, args.work, dtype, args.smoke)
    tree = args.against if side == "old" else ROOT
    python = args.peer_python if side.startswith("trl") else sys.executable
    program = [f"{row.script}.py", *flags]
    if side.startswith("trl"):
        program = [TRL, result, side, row.script, *flags]
    elif row.script in ("machine", "decode"):
        program = [INSIDE, row.script, result, side, args.work / row.model, dtype, *flags]
    elif args.gpu:
        program = [INSIDE, "script", result, side, row.script, *flags]
    found = start(args, program, row.ranks, python, tree)
    if found is None:
        log = args.work / f"failed {row.name} {dtype} {side}.log"
        (args.work / "child.log").rename(log)
        print(f"  {row.name} {dtype} {side}: failed, see {log}", flush=True)
        return None
    if (out / "metrics.jsonl").exists():
        found |= of_metrics(out, row)
    if result.exists():
        found |= json.loads(result.read_text())
    found["rate"] = found["work"] / sum(found["seconds"])
    if side.startswith("trl") and row.script != "ppo":
        found |= quality_of_peer(args, row, flags)
    return {"name": row.name, "unit": UNITS[row.script], "dtype": dtype, "side": side, **found}


def of_metrics(folder, row):
    """Returns what a run's metrics.jsonl says of all steps but the first."""
    lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    steps = [line for line in lines if "seconds" in line][1:]
    seconds = [line["seconds"] for line in steps]
    work = row.batch * len(steps)
    if row.script == "sft":
        work = sum(line["tokens_per_second"] * line["seconds"] for line in steps)
    flops = 1e12 * row.ranks * sum(line["tflops"] * line["seconds"] for line in steps)
    found = {"work": work, "seconds": seconds, "flops": flops / work}
    if row.script != "ppo":
        return {**found, "quality": evaluated(lines)}
    found["phases"] = {
        phase: statistics.fmean(line[f"{phase}_seconds"] for line in steps)
        for phase in ("generate", "score", "train")
    }
    later = [line["reward"] for line in steps[len(steps) // 2 :]]
    tokens = statistics.fmean(line["response_length"] for line in steps)
    quality = {"reward": statistics.fmean(later), "kl": steps[-1]["kl"], "tokens": tokens}
    return {**found, "quality": quality}


def evaluated(lines):
    """Returns the last evaluation's loss, and its accuracy if there is one."""
    last = [line for line in lines if "eval_loss" in line][-1]
    return {name: last[f"eval_{name}"] for name in ("loss", "accuracy") if f"eval_{name}" in last}


def quality_of_peer(args, row, flags):
    """Has our script evaluate, and no more, the model that the peer has saved."""
    own = ["--max_steps", 0, "--model_name_or_path", args.work / "out-trl"]
    if start(args, [f"{row.script}.py", *flags, *own]) is None:
        return {}
    return {"quality": evaluated([json.loads(x) for x in open(args.work / "out/metrics.jsonl")])}


# ---- The table ----
def table(records):
    """Returns the table of records, in Markdown: a line for each row, dtype and peer."""
    limits = {r["dtype"]: r for r in records if r["name"] == "machine"}
    lines = [
        "| workload | dtype | ours | peer | ratio, round by round | fastest steps | limit "
        "| ours / limit | quality ours; peer | GB ours; peer | whole process, s |",
        "|" + " --- |" * 11,
    ]
    sides = {}
    for r in records:
        if r["name"] != "machine":
            sides.setdefault((r["name"], r["dtype"]), {}).setdefault(r["side"], []).append(r)
    for (name, dtype), found in sides.items():
        ours = found.pop("ours", [])
        for peer, theirs in (found or {"-": []}).items():
            cells = [name, dtype, rate_of(ours), f"{peer} {rate_of(theirs)}", ratio(ours, theirs)]
            cells.append(fastest(ours, theirs))
            cells += limit_of(ours, limits.get(dtype))
            for show in (quality, lambda r: f"{r['gb']:.2f}", lambda r: f"{r['wall']:.0f}"):
                cells.append("; ".join(show(side[-1]) if side else "" for side in (ours, theirs)))
            lines.append(f"| {' | '.join(cells)} |")
    for dtype, r in limits.items():
        lines.append(f"\nmachine, {dtype}: {r['rate']:,.0f} GFLOP/s at the model's shapes")
    for r in records:
        if "phases" in r:
            phases = ", ".join(f"{phase} {x:.3f}" for phase, x in r["phases"].items())
            name = f"{r['name']} {r['dtype']} {r['side']}"
            lines.append(f"\n{name}: of a step of {statistics.fmean(r['seconds']):.3f} s, {phases}")
    return "\n".join(lines) + "\n"


def rate_of(records):
    """Returns the median rate, in words."""
    if not records:
        return ""
    rate = statistics.median(r["rate"] for r in records)
    return f"{rate:,.{1 if rate >= 10 else 2}f} {records[0]['unit']}"


def ratio(ours, theirs):
    """Returns the median of the ratios of all rounds, and these: a turn of ours is compared with
    the peer's turn beside it."""
    pairs = sorted(a["rate"] / b["rate"] for a, b in zip(ours, theirs))
    each = ", ".join(f"{pair:.3f}" for pair in pairs)
    return f"{statistics.median(pairs):.3f} ({each})" if pairs else ""


def fastest(ours, theirs):
    """Returns the ratio if each step had taken what it took in its fastest round: a busy neighbour
    slows some steps of a round, and seldom the same step of all rounds."""
    sides = [*zip(*zip(ours, theirs))]  # as many rounds of the one as of the other
    rates = [s[0]["work"] / sum(map(min, zip(*(r["seconds"] for r in s)))) for s in sides]
    return f"{rates[0] / rates[1]:.3f}" if rates else ""


def limit_of(records, machine):
    """Returns the machine's limit, and our share of it, in words.

    A piece of work takes its FLOPs at the rate of the model's own matrix products. What is decoded
    also reads weights and cache, and the longer of both times counts.
    """
    if not records or not machine:
        return ["", ""]
    flops = statistics.median(r["flops"] for r in records)
    seconds = max(flops / 1e9 / machine["rate"], records[0].get("reading_seconds", 0))
    share = statistics.median(r["rate"] for r in records) * seconds
    return [f"{1 / seconds:,.1f}", f"{share:.0%}"]


def quality(record):
    return ", ".join(f"{name} {x:.3f}" for name, x in record.get("quality", {}).items())


# ---- The turns ----
def get_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arg = parser.add_argument
    arg("--only", nargs="+", default=[""], metavar="ROW", help="rows whose name begins so")
    arg("--dtype", nargs="+", help="fp32 bf16; with --gpu, bf16")
    arg("--rounds", type=int, default=2, help="turns of each side [%(default)s]")
    arg("--against", type=Path, metavar="FOLDER", help="a checkout to compare with, for the peer")
    arg("--gpu", action="store_true", help="large random models on one GPU")
    arg("--model", type=Path, metavar="FOLDER", help="a pretrained model and its tokenizer")
    arg("--smoke", action="store_true", help="tiny sizes, to try this program itself")
    arg("--peer_python", default=sys.executable, help="an interpreter that has TRL")
    arg("--work", type=Path, default=ROOT / "output/bench", help="folder for what is made")
    args = parser.parse_args()
    for name in ("work", "against", "model"):  # the programs start in other folders
        vars(args)[name] = vars(args)[name] and vars(args)[name].resolve()
    return args


def rows_of(args):
    """Returns the rows that are asked for, with the sides that can be had."""
    rows = REAL if args.model else GPU if args.gpu else CPU
    rows = [row for row in rows if row.name.startswith(tuple(args.only))]
    if not rows:
        sys.exit(f"error: no such row. There are: {', '.join(r.name for r in CPU + REAL + GPU)}.")
    has_trl = [args.peer_python, "-c", "import trl"]
    has_trl = not subprocess.run(has_trl, capture_output=True).returncode
    found = []
    for row in rows:
        sides = [side for side in row.sides.split() if has_trl or not side.startswith("trl")]
        sides = ["old", "ours"] if args.against else sides
        found.append(replace(row, sides=" ".join(sides), steps=3 if args.smoke else row.steps))
    return found


def dtypes_here(args):
    """Returns what is measured unless --dtype says otherwise."""
    if args.gpu:
        return ["bf16"]
    known = Path("/proc/cpuinfo").read_text().split()
    if "avx512_bf16" in known or "amx_bf16" in known:
        return ["fp32", "bf16"]
    print("  this CPU emulates bf16: fp32 only, unless --dtype bf16 asks for it", flush=True)
    return ["fp32"]


def main():
    args = get_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows, records = rows_of(args), []
    facts = json.dumps([{**asdict(row), "data": row.data} for row in rows])
    held_out = 4 if args.smoke else 8 if args.model else 48
    if start(args, [INSIDE, "prepare", args.work, facts, held_out, args.model or ""]) is None:
        sys.exit(f"error: no models, or no data. {args.work}/child.log says why.")
    for dtype in args.dtype or dtypes_here(args):
        machine = Row("machine", "machine", "", "limit", rows[0].model)
        turns = [machine] * (not args.against)
        turns += [row for row in rows if dtype in row.dtypes.split() for _ in range(args.rounds)]
        for row in turns:
            for side in row.sides.split():
                record = measure(args, row, dtype, side)
                if record is None:
                    continue
                records.append(record)
                with open(args.work / "results.jsonl", "a") as file:
                    file.write(json.dumps({**record, "when": time.strftime("%F %T")}) + "\n")
                print(f"  {row.name} {dtype} {side}: {rate_of([record])}", flush=True)
    text = table(records)
    print(text)
    (args.work / "table.md").write_text(text)


if __name__ == "__main__":
    main()
