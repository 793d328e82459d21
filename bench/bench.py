"""Benchmark: our scripts and their best peer on the same work, in turn, in one call, and the
machine's own limit.

    make bench                         every row, fp32 and bf16 (about 12 minutes on 2 quiet cores)
    python bench/bench.py --only sft ppo --dtype bf16
                                       some rows; what results.jsonl holds already is not run again
    python bench/bench.py --gpu        large random models on one GPU (docs/performance.md)
    python bench/bench.py --growth     bytes sent and held by each rank, for each ZeRO stage

Each measurement is a process of its own: this file starts itself with --child.
  ours      main() of sft.py, reward.py, ppo.py with the flags of `command`; speed is read from
            their metrics.jsonl
  trl       TRL's trainer on the same token ids, weights, batch sizes, learning rate
            (requirements-bench.txt installs it)
  trl+len   the same, with the Trainer's own option to batch rows of like length, which is off by
            default
  generate  transformers' own decoding in place of ours
The first step of every process is not counted. Quality is measured by our evaluation on both sides'
models.
"""

import argparse
import functools
import hashlib
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "toy")]
# This process imports nothing heavy: a child's peak memory is counted from its parent's.

# ---- Workloads -----------------------------------------------------------------------------------
# For random weights: large enough for the quality columns to tell a trained model from an untrained
# one. All others take 1e-5.
LEARNING_RATES = {"tiny": 1e-3}
CPU = [  # sides take turns: A B A B
    dict(
        name="sft",
        script="sft",
        sides=("ours", "trl", "trl+len"),
        batch=8,
        length=512,
        steps=16,
        unit="tokens/s",
    ),
    dict(
        name="reward",
        script="reward",
        sides=("ours", "trl"),
        batch=4,
        length=512,
        steps=16,
        unit="pairs/s",
    ),
    dict(
        name="ppo",
        script="ppo",
        sides=("ours", "trl"),
        batch=8,
        prompt=128,
        answer=64,
        steps=6,
        unit="samples/s",
    ),
    dict(  # the peer is TRL's GRPOTrainer: 1.16 or newer, which --peer_python can name
        name="grpo",
        script="ppo",
        sides=("ours", "trl"),
        batch=32,
        samples=4,
        prompt=128,
        answer=64,
        steps=6,
        unit="samples/s",
        extra="--advantage grpo --samples_per_prompt 4 --kl_in loss".split()
        + ["--reward_fn", f"{__file__}:letters"],
    ),
    dict(
        name="zero3",
        script="ppo",
        sides=("ours", "trl"),
        batch=4,
        prompt=128,
        answer=64,
        steps=12,
        ranks=2,
        stage=3,
        dtypes=["fp32"],
        unit="samples/s",
    ),
    dict(
        name="decode",
        script=None,
        sides=("ours", "generate"),
        rows=(8, 64),
        prompt=128,
        answer=64,
        unit="tokens/s",
    ),
]
GPU_SFT = dict(
    script="sft",
    sides=("ours",),
    batch=8,
    length=2048,
    steps=8,
    unit="tokens/s",
    extra=["--train_on", "everything"],
)
GPU_PPO = dict(
    script="ppo",
    sides=("ours", "generate"),
    batch=32,
    prompt=256,
    answer=256,
    steps=5,
    unit="samples/s",
    extra=["--gradient_checkpointing"],
)
GPU = [  # each is meant to fit one device of 80 GB: python tools/estimate.py says by how much
    *({**GPU_SFT, "name": f"sft {m}", "model": m} for m in ("opt-1.3b", "llama-1b")),
    {
        **GPU_SFT,
        "name": "sft llama-3b",
        "model": "llama-3b",
        "batch": 4,
        "stage": 2,
        "extra": GPU_SFT["extra"] + ["--gradient_checkpointing"],
    },
    *(
        {
            **GPU_SFT,
            "name": f"reward {m}",
            "script": "reward",
            "model": m,
            "batch": 4,
            "unit": "pairs/s",
            "extra": [],
        }
        for m in ("opt-1.3b", "llama-1b")
    ),
    *(
        dict(
            name=f"decode {m}",
            script=None,
            sides=("ours", "generate"),
            model=m,
            rows=(8, 64),
            prompt=256,
            answer=256,
            unit="tokens/s",
        )
        for m in ("opt-1.3b", "llama-1b", "llama-7b")
    ),
    *({**GPU_PPO, "name": f"ppo {m}", "model": m} for m in ("opt-1.3b", "llama-1b")),
    {**GPU_SFT, "name": "sft zero3", "model": "llama-1b", "stage": 3},
    {
        **GPU_SFT,
        "name": "sft zero3 offload",
        "model": "llama-1b",
        "stage": 3,
        "steps": 4,
        "extra": GPU_SFT["extra"] + ["--offload", "--adam_offload"],
    },
    {**GPU_PPO, "name": "ppo zero3", "model": "llama-1b", "stage": 3, "steps": 3},
    {
        **GPU_PPO,
        "name": "ppo zero3 offload",
        "model": "llama-1b",
        "stage": 3,
        "steps": 3,
        "sides": ("ours",),
        "extra": GPU_PPO["extra"] + ["--offload", "--adam_offload"],
    },
]
SHAPES = {  # transformers' config class and its arguments
    "tiny": (
        "Llama",
        dict(
            vocab_size=4096,
            hidden_size=256,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=8,
            intermediate_size=688,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
        ),
    ),
    "opt-1.3b": (
        "OPT",
        dict(
            vocab_size=50272,
            hidden_size=2048,
            word_embed_proj_dim=2048,
            num_hidden_layers=24,
            num_attention_heads=32,
            ffn_dim=8192,
            max_position_embeddings=2048,
            dropout=0.0,
        ),
    ),
    "llama-1b": (
        "Llama",
        dict(
            vocab_size=128256,
            hidden_size=2048,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            intermediate_size=8192,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        ),
    ),
    "llama-3b": (
        "Llama",
        dict(
            vocab_size=128256,
            hidden_size=3072,
            num_hidden_layers=28,
            num_attention_heads=24,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=8192,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        ),
    ),
    "llama-7b": (
        "Llama",
        dict(
            vocab_size=32000,
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            intermediate_size=11008,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        ),
    ),
}


def command(job, work):
    """Returns (script, flags) of our side. They make one epoch over exactly the rows of `steps`
    steps, so both sides see the same."""
    model, data, stage = (
        f"{work}/{job['model']}",
        f"{work}/data-{job['name'].replace(' ', '-')}",
        job.get("stage", 0),
    )
    rate = LEARNING_RATES.get(job["model"], 1e-5)
    flags = dict(
        data_path=data,
        preset="opt-1.3b",  # all weights train
        data_split={"sft": "1,0,0", "reward": "0,1,0", "ppo": "0,0,1"}[job["script"]],
        output_dir=f"{work}/out",
        num_train_epochs=1,
        num_warmup_steps=0,
        lr_scheduler_type="constant",
        dtype=job["dtype"],
        zero_stage=stage,
        per_device_eval_batch_size=job["batch"],
    )
    if job["script"] == "ppo":
        flags.update(
            actor_model_name_or_path=model,
            critic_model_name_or_path=f"{model}-score",
            max_prompt_seq_len=job["prompt"],
            max_answer_seq_len=job["answer"],
            per_device_generation_batch_size=job["batch"],
            per_device_training_batch_size=job["batch"],
            actor_learning_rate=rate / 10,
            critic_learning_rate=rate / 10,
            kl_coef=0.05,
            critic_dropout=0.0,
            enable_ema=0,
            num_eval_prompts=job["batch"],
        )
    else:
        flags.update(
            model_name_or_path=f"{model}-score" if job["script"] == "reward" else model,
            max_seq_len=job["length"],
            per_device_train_batch_size=job["batch"],
            learning_rate=rate,
            weight_decay=0.0,
            dropout=0.0,
        )
    if job["script"] == "sft":
        flags["num_samples"] = 0
    return job["script"], [x for k, v in flags.items() for x in (f"--{k}", str(v))] + [
        "--overwrite",
        *job.get("extra", []),
    ]


def letters(prompts, completions, **columns):
    """The reward of the row `grpo`: the share of lower-case letters in a response."""
    return [sum(map(str.islower, text)) / max(len(text), 1) for text in completions]


# ---- Children ------------------------------------------------------------------------------------
# Each runs in a process of its own and returns the lines that it adds to results.jsonl.
def prepare(job, work):
    """Write tokenizer, models and data of all jobs: the same bytes each time."""
    import torch
    import transformers
    from make import make_tokenizer

    from machinery.data.formats import ASSISTANT, HUMAN

    jobs = job["jobs"]
    source = next(
        f
        for f in (Path(os.environ.get("RLHF_HH", ROOT / "../shared/data/hh")), ROOT / "toy/data")
        if (f / "train.jsonl").exists()
    )
    rows = {
        name: [json.loads(line) for line in open(source / f"{name}.jsonl")]
        for name in ("train", "test")
    }
    tokenizer = make_tokenizer(
        [r[k] for r in rows["train"] for k in ("chosen", "rejected")], vocab_size=4096
    )
    # step 3 takes models with weights alone; the others may draw theirs
    with_weights = {"tiny"} | {job["model"] for job in jobs if job["script"] == "ppo"}
    for model in {job["model"] for job in jobs}:
        kind, shape = SHAPES[model]
        config = getattr(transformers, kind + "Config")(
            **shape, bos_token_id=None, eos_token_id=1, pad_token_id=0
        )
        for folder, head in (
            (work / model, "ForCausalLM"),
            (work / f"{model}-score", "ForSequenceClassification"),
        ):
            whole = (folder / "model.safetensors").exists() or model not in with_weights
            if not (whole and (folder / "tokenizer.json").exists()):
                config.architectures, config.num_labels = [kind + head], 1
                torch.manual_seed(0)
                if model in with_weights:  # so that both sides start from the same
                    drawn = getattr(transformers, kind + head)(config)
                    drawn.save_pretrained(folder, max_shard_size="100GB")
                else:
                    config.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
    # rows longer than any limit, so that every row is cut to full length
    if jobs[0]["model"] != "tiny":
        text = "".join(r["chosen"] for r in rows["train"])

        def cut(at, size):
            return text[at % (len(text) - size) :][:size]

        made = [
            {
                "prompt": f"{HUMAN}{cut(i * 9973, 3000)}{ASSISTANT}",
                "chosen": cut(i * 7919, 16000),
                "rejected": cut(i * 6007, 16000),
            }
            for i in range(320)
        ]
        rows = {"train": made[:-16], "test": made[-16:]}
    for job in (j for j in jobs if j["script"]):
        for name, count in (
            ("train", job["batch"] // job.get("samples", 1) * job.get("ranks", 1) * job["steps"]),
            ("test", job.get("held_out", 48)),
        ):
            file = Path(command({**job, "dtype": "fp32"}, work)[1][1]) / f"{name}.jsonl"
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(json.dumps(r) + "\n" for r in rows[name][:count]))
    return [{"name": "prepare", "data": source.name}]


def best_seconds(function):
    """Returns the shortest of up to 20 tries in up to 2 s."""
    from deepspeed.accelerator import get_accelerator

    times = []
    while len(times) < 20 and sum(times) < 2:
        get_accelerator().synchronize()
        started = time.perf_counter()
        function()
        get_accelerator().synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def machine(job, work):
    """The limit of arithmetic: GFLOP/s of the model's own matrix products, and of a large square
    one."""
    import torch
    from transformers import AutoModelForCausalLM

    import common
    from machinery.base import ranks
    from machinery.models import model_folders

    device, dtype = ranks.device(), common.DTYPES[job["dtype"]]
    gpu = device.type == "cuda"

    with torch.device("meta"):
        config = model_folders.load_config(f"{work}/{job['model']}")
        model = AutoModelForCausalLM.from_config(config)
    shapes, rows, side = (
        [m.weight.shape for m in model.modules() if isinstance(m, torch.nn.Linear)],
        16384 if gpu else 1024,
        8192 if gpu else 2048,
    )
    pairs = {
        s: (
            torch.randn(rows, s[1], dtype=dtype, device=device),
            torch.randn(s, dtype=dtype, device=device),
        )
        for s in set(shapes)
    }
    x = torch.randn(side, side, dtype=dtype, device=device)
    seconds = {s: best_seconds(lambda s=s: torch.nn.functional.linear(*pairs[s])) for s in pairs}
    return [
        {
            "name": "machine",
            "side": "limit",
            "gflops": 2
            * rows
            * sum(s.numel() for s in shapes)
            / sum(seconds[s] for s in shapes)
            / 1e9,
            "square_gflops": 2 * side**3 / best_seconds(lambda: x @ x) / 1e9,
        }
    ]


def plain_generate(args, model, tokenizer, ids, mask, uniforms, synced=False, cache=None):
    """transformers' `generate` with ppo.sample's arguments; it samples from the whole
    distribution. cache: "static" is one that it compiles the model for, on a GPU."""
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=uniforms.shape[1],
        do_sample=True,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id,
        cache_implementation=cache,
    )
    # else the model's own EOS would be used
    own, model.generation_config = model.generation_config, config
    out = model.generate(ids, attention_mask=mask, generation_config=config)
    model.generation_config = own
    responses = out[:, ids.shape[1] :]
    known = responses.new_zeros(responses.shape, dtype=torch.float)  # it keeps no log-probs
    ended = responses == tokenizer.eos_token_id
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, responses.shape[1])
    return responses, known, lengths, ended.any(1)


class NoEnd:
    """A tokenizer for a model with so many tokens, none of which ends a response."""

    pad_token_id, eos_token_id = 0, -1

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count


def decode(job, work):
    """Sample `answer` tokens after prompts of `prompt` tokens, ours and plain `generate` in turn;
    no EOS on either side."""
    from types import SimpleNamespace

    import torch
    from deepspeed.accelerator import get_accelerator
    from transformers import AutoModelForCausalLM

    import common
    import ppo
    from machinery.base import ranks
    from machinery.models import model_folders

    config, out = model_folders.load_config(f"{work}/{job['model']}"), []
    dtype, device = common.DTYPES[job["dtype"]], ranks.device()
    args = SimpleNamespace(temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=0, stop=[])
    args.max_prompt_seq_len, args.max_answer_seq_len = job["prompt"], job["answer"]
    args.compile_decoding, args.declared = 1, SimpleNamespace(given={"compile_decoding"})
    cuda = device.type == "cuda"
    static = functools.partial(plain_generate, cache="static" if cuda else None)
    sides = {"ours": (ppo.sample, args), "generate": (static, args)}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    weights, head = decode_weights(model)
    for rows in job["rows"]:
        ids = torch.randint(2, 4000, (rows, job["prompt"]), device=device)
        mask = torch.ones_like(ids)
        uniforms = torch.rand(rows, job["answer"], device=device, dtype=torch.float64)
        if cuda:
            sides["compiled"] = compiled_sampler(args, model, config, rows), args
        tokens = job["prompt"] + job["answer"] / 2  # in the cache, on average
        # a token reads all weights and the cache
        token_bytes = (weights + rows * tokens * cache_of_a_token(config)) * dtype.itemsize
        bandwidth = read_rate(token_bytes, device)
        # a prompt's forward makes the logits of its last token only
        products = weights * job["answer"] + (weights - head) * job["prompt"]
        for turn in range(job["rounds"] + 1):
            for side, (function, options) in sides.items():
                started = time.perf_counter()
                with torch.no_grad():
                    tokenizer = NoEnd(config.vocab_size)
                    response = function(options, model, tokenizer, ids, mask, uniforms)[0]
                get_accelerator().synchronize()
                seconds = time.perf_counter() - started
                assert response.shape == (rows, job["answer"])
                if turn:
                    out.append(
                        {
                            "name": f"{job['name']} {rows} rows",
                            "side": side,
                            "rate": rows * job["answer"] / seconds,
                            "bytes": job["answer"] * token_bytes,
                            "gbytes": bandwidth / 1e9,
                            "mbytes": token_bytes / 1e6,
                            "flops": 2 * rows * products,
                            "work": rows * job["answer"],
                        }
                    )
    return out


def compiled_sampler(args, model, config, rows):
    """Returns ppo.sample with --compile_decoding, for so many rows."""
    import ppo
    from helpers import decoding

    args.rollout_batch_size = rows
    decoding.try_compiled(args, model, NoEnd(config.vocab_size), ppo.sample)
    caches, model.static_caches = model.static_caches, {}

    def sample(*given):
        model.static_caches = caches
        sampled = ppo.sample(*given)
        model.static_caches = {}
        return sampled

    return sample


def decode_weights(model):
    """Returns how many weights a token is multiplied by, and how many of them make logits."""
    from machinery.base import modules

    weights = modules.count_parameters(model)
    if not model.config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel()
    return weights, model.get_output_embeddings().weight.numel()


def cache_of_a_token(config):
    """Returns how many numbers of keys and values are kept for a token."""
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    return 2 * config.num_hidden_layers * config.hidden_size * heads / config.num_attention_heads


def read_rate(size, device):
    """Returns at how many bytes a second so many bytes are read."""
    import torch

    memory = torch.ones(int(size) // 4, device=device)
    written = best_seconds(lambda: memory.add_(1)) / 2  # and read
    return memory.nbytes / min(best_seconds(memory.sum), written)


def peak():
    import torch

    out = {"rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    return (
        {**out, "gpu_gb": torch.cuda.max_memory_allocated() / 2**30}
        if torch.cuda.is_available()
        else out
    )


def ours(job, work):
    """main() of one of our scripts, as a user runs it."""
    script, flags = command(job, work)
    module = importlib.import_module(script)
    sys.argv = [f"{script}.py", *flags]
    if job["side"] == "generate":
        module.sample = plain_generate
        module.checks.stop_unless_sampled_as_scored = lambda run, micro_batches: None
    try:
        module.main()
    except SystemExit as stop:
        assert stop.code == 0, stop.code
    lines = [json.loads(line) for line in open(f"{work}/out/metrics.jsonl")]
    steps = [m for m in lines if "seconds" in m]
    done = {"sft": lambda m: m["tokens_per_second"] * m["seconds"]}.get(
        script, lambda m: job["batch"] * job.get("ranks", 1)
    )
    counted = steps[1:]
    seconds = sum(m["seconds"] for m in counted)
    out = {
        "rate": sum(map(done, counted)) / seconds,
        "gflops": 1e3 * sum(m["tflops"] * m["seconds"] for m in counted) / seconds,
        "step_seconds": seconds / len(counted),
        **{
            k: statistics.fmean(m[k] for m in counted)
            for k in ("generate_seconds", "score_seconds", "train_seconds")
            if k in counted[0]
        },
        **peak(),
    }
    quality = {k: lines[-1][k] for k in ("eval_loss", "eval_accuracy") if k in lines[-1]}
    return [
        {
            **out,
            "quality": quality
            or ppo_quality([m["reward"] for m in steps], [m["kl"] for m in steps]),
        }
    ]


def ppo_quality(reward, kl):
    return {"reward": statistics.fmean(reward[len(reward) // 2 :]), "kl": kl[-1]}


# ---- Parent: runs the children in turn and writes the table --------------------------------------
def run(args, job, side, turn, code):
    """Runs one child and returns its records, which are kept in results.jsonl; those that are there
    already (same code, same row) are not run again."""
    key = f"{code} {job['name']} {job['dtype']} {side} {turn}"
    file = args.work / "results.jsonl"
    known = [json.loads(line) for line in open(file)] if file.exists() else []
    if found := [r for r in known if r["key"] == key]:
        return found
    result, log, ranks = args.work / "result.json", args.work / "child.log", job.get("ranks", 1)
    python = args.peer_python if side.startswith("trl") else sys.executable
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        if ranks > 1
        else []
    )
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1" if args.smoke else str(max(1, 2 // ranks)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if args.gpu:
        del environment["OMP_NUM_THREADS"]
    else:
        environment.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    # two installations must not rebuild each other's kernels
    if side.startswith("trl") and args.peer_python != sys.executable:
        environment["TORCH_EXTENSIONS_DIR"] = str(args.work / "peer-extensions")
    result.unlink(missing_ok=True)
    started = time.time()
    with open(log, "w") as out:
        failed = subprocess.run(
            [
                python,
                *launch,
                __file__,
                "--child",
                json.dumps({**job, "side": side, "rounds": args.rounds}),
                "--work",
                str(args.work),
            ],
            stdout=out,
            stderr=out,
            env=environment,
        ).returncode
    if failed or not result.exists():  # the others go on
        log.replace(kept := args.work / f"failed-{job['name'].replace(' ', '-')}-{side}.log")
        print(f"  {job['name']} {side}: failed, see {kept}", flush=True)
        return []
    records = [
        {
            "name": job["name"],
            "side": side,
            **r,
            "key": key,
            "dtype": job["dtype"],
            "unit": job.get("unit"),
            "wall": time.time() - started,
            "when": time.strftime("%F %T"),
        }
        for r in json.loads(result.read_text())
    ]
    with open(file, "a") as out:
        out.writelines(json.dumps(r) + "\n" for r in records)
    return records


def cpu_has_bf16():
    """As in machinery.flags.refusals, which is too heavy to import here."""
    known = Path("/proc/cpuinfo").read_text().split()
    found = "avx512_bf16" in known or "amx_bf16" in known
    if not found:
        print("  this CPU emulates bf16: fp32 only, unless --dtype bf16 asks for it", flush=True)
    return found


def table(records):
    """Returns the table of records, in Markdown: a line for each workload, dtype and peer."""
    limits = {r["dtype"]: r for r in records if r["name"] == "machine"}

    def rate(rs):
        return statistics.median(r["rate"] for r in rs) if rs else 0.0

    lines = [
        "| workload | dtype | ours | peer | ratio, pair by pair | limit | ours / limit "
        "| quality ours; peer | GB ours; peer | whole process, s |",
        "|" + " --- |" * 10,
    ]
    rows = dict.fromkeys((r["name"], r["dtype"], r["unit"]) for r in records if r.get("rate"))
    for name, dtype, unit in rows:
        sides = {}
        for r in records:
            if (r["name"], r["dtype"]) == (name, dtype):
                sides.setdefault(r["side"], []).append(r)
        mine, limit = sides.pop("ours", []), limits.get(dtype)
        for peer, theirs in (sides or {"-": []}).items():
            pairs = sorted(a["rate"] / b["rate"] for a, b in zip(mine, theirs))
            best = 0.0
            # bytes / bandwidth, or FLOPs / matrix rate if that takes longer
            if limit and mine and "bytes" in mine[0]:
                best = mine[0]["work"] / max(
                    mine[0]["bytes"] / 1e9 / mine[0]["gbytes"],
                    mine[0]["flops"] / 1e9 / limit["gflops"],
                )
            elif limit and mine and "gflops" in mine[0]:
                # FLOPs by PaLM's formula: throughput.count_flops
                best = rate(mine) * limit["gflops"] / statistics.median(r["gflops"] for r in mine)
            quality, memory, start = (
                "; ".join(f(rs[-1]) if rs else "" for rs in (mine, theirs))
                for f in (
                    lambda r: ", ".join(
                        f"{k.removeprefix('eval_')} {v:.3f}"
                        for k, v in r.get("quality", {}).items()
                    ),
                    lambda r: f"{r.get('gpu_gb', r.get('rss_gb', 0)):.2f}" if "rss_gb" in r else "",
                    lambda r: f"{r['wall']:.0f}",
                )
            )
            lines.append(
                f"| {name} | {dtype} | {rate(mine):,.1f} {unit} | {peer} {rate(theirs):,.1f} | "
                f"{statistics.median(pairs) if pairs else 0:.2f} "
                f"({', '.join(f'{p:.2f}' for p in pairs)}) | {best:,.1f} | "
                f"{rate(mine) / best if best else 0:.0%} | {quality} | {memory} | {start} |"
            )
    for dtype, r in limits.items():
        lines.append(
            f"\nmachine, {dtype}: {r['gflops']:,.0f} GFLOP/s at the model's shapes, "
            f"{r['square_gflops']:,.0f} square"
        )
    for name, dtype, megabytes, gigabytes in dict.fromkeys(
        (r["name"], r["dtype"], r["mbytes"], r["gbytes"]) for r in records if "mbytes" in r
    ):
        lines.append(
            f"\n{name} {dtype}: the {megabytes:,.0f} MB that a token reads, "
            f"at {gigabytes:,.0f} GB/s"
        )
    for r in records:
        if "generate_seconds" in r:
            lines.append(
                f"\n{r['name']} {r['dtype']} {r['side']}: of a step of {r['step_seconds']:.3f} s, "
                f"generate {r['generate_seconds']:.3f}, "
                f"score {r['score_seconds']:.3f}, train {r['train_seconds']:.3f}"
            )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="rows whose name begins so: sft reward ppo zero3 decode",
    )
    parser.add_argument("--dtype", nargs="+", help="fp32 bf16; with --gpu, bf16")
    parser.add_argument("--rounds", type=int, default=2, help="times that each side is measured")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, to try this script itself"
    )
    parser.add_argument("--gpu", action="store_true", help="large random models on one GPU")
    parser.add_argument(
        "--growth", action="store_true", help="bytes sent and held, ZeRO 0-3, 1-8 ranks"
    )
    parser.add_argument(
        "--peer_python",
        default=sys.executable,
        help="an interpreter that has TRL, where this one has not",
    )
    parser.add_argument(
        "--work", type=Path, help="folder for models, data and results.jsonl; output/bench"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="measure again what results.jsonl holds"
    )
    parser.add_argument("--child", type=json.loads, help="(used by this file itself)")
    args = parser.parse_args()
    args.work = (args.work or ROOT / "output/bench").resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.child:
        job = args.child
        known = {
            "prepare": prepare,
            "machine": machine,
            **dict.fromkeys(("trl", "trl+len"), "bench_trl"),
            "growth": "growth",
        }
        function = (
            known.get(job["name"]) or known.get(job["side"]) or (ours if job["script"] else decode)
        )
        records = (
            importlib.import_module(function).run if isinstance(function, str) else function
        )(job, args.work)
        if os.environ.get("RANK", "0") == "0":
            (args.work / "result.json").write_text(json.dumps(records))
        return
    jobs = [
        {"model": "tiny", **job}
        for job in (
            GPU if args.gpu else importlib.import_module("growth").JOBS if args.growth else CPU
        )
    ]
    small = (
        dict(steps=3, length=64, prompt=16, answer=8, held_out=4)
        if args.smoke and not args.growth
        else {}
    )
    jobs = [
        {**job, **small}
        for job in jobs
        if not args.only or job["name"].startswith(tuple(args.only))
    ]
    if args.fresh:
        (args.work / "results.jsonl").unlink(missing_ok=True)
    has_trl = not subprocess.run(
        [args.peer_python, "-c", "import trl"], capture_output=True
    ).returncode
    code = hashlib.md5(
        b"".join(
            f.read_bytes()
            for pattern in ("*.py", "machinery/*/*.py", "bench/*.py")
            for f in sorted(ROOT.glob(pattern))
        )
    ).hexdigest()[:8]
    code += f" {args.smoke} {args.rounds}"
    base, records = {"script": None, "dtype": "-"}, []
    run(
        args,
        {**base, "name": "prepare", "jobs": jobs},
        "",
        0,
        code + str(sorted(j["name"] for j in jobs)),
    )
    for dtype in args.dtype or (["bf16"] if args.gpu else ["fp32", "bf16"][: 1 + cpu_has_bf16()]):
        if not args.growth:
            records += run(
                args,
                {**base, "name": "machine", "model": jobs[0]["model"], "dtype": dtype},
                "limit",
                0,
                code,
            )
        for job in (j for j in jobs if dtype in j.get("dtypes", [dtype])):
            for turn in range(1 if args.growth or not job["script"] else args.rounds):
                # decoding takes turns within its process
                for side in job["sides"] if job["script"] else job["sides"][:1]:
                    if has_trl or not side.startswith("trl"):
                        records += (new := run(args, {**job, "dtype": dtype}, side, turn, code))
                        for r in new:
                            print(
                                f"  {r['name']} {dtype} {r['side']}: "
                                f"{r.get('rate', 0):,.1f} {r['unit']}",
                                flush=True,
                            )
    text = importlib.import_module("growth").table(records) if args.growth else table(records)
    print(text)
    (args.work / "table.md").write_text(text)


if __name__ == "__main__":
    main()
