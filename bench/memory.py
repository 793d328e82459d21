"""How good is tools/estimate.py? The peaks that it names, held against the resident memory of real
runs on CPU ranks.

    python bench/memory.py                         every case, about half an hour on 2 cores;
                                                   prints the table of docs/deepspeed.md
    python bench/memory.py sft 2 3 --dtype bf16    one case: script, ranks, ZeRO stage, and any
                                                   flags

A run's own main() works on rows that are all as long as --max_seq_len allows. Linux keeps the
largest resident size that a process ever had (VmHWM) and forgets it when 5 is written to
/proc/self/clear_refs, so each phase is measured by itself. Counted from just before the first model
is loaded: Python and the libraries are not the estimate's subject.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
GIB = 2**30
# hidden, intermediate, layers; vocabulary 8,000
SIZES = {"21M": (512, 1408, 4), "69M": (768, 2048, 8), "176M": (1024, 2816, 12)}
CASES = [  # script, ranks, stage, model, flags
    *(("sft", 2, stage, size, "") for size in ("21M", "69M") for stage in range(4)),
    *(("sft", 1, stage, "69M", "") for stage in (0, 2, 3)),
    *(("sft", 2, stage, "69M", "--dtype bf16") for stage in range(4)),
    ("sft", 2, 2, "69M", "--gradient_accumulation_steps 2"),
    ("sft", 2, 0, "69M", "--gradient_checkpointing"),
    ("sft", 2, 3, "69M", "--adam_offload --offload"),
    ("ppo", 2, 2, "69M", "--gradient_accumulation_steps 2"),
    *(("ppo", 2, stage, "69M", "") for stage in (3, 2, 0)),
    ("reward", 2, 3, "69M", ""),
    ("sft", 2, 2, "176M", ""),
    *(("sft", 2, stage, "69M", "--lora_dim 8") for stage in (0, 2, 3)),
    ("ppo", 2, 2, "69M", "--actor_lora_dim 8 --critic_lora_dim 8"),
    *(("sft", 2, stage, "69M", "--dtype bf16 --tensor_parallel_size 2") for stage in (1, 2, 3)),
]


def prepare(folder, size, weights=False):
    """Models without weights, or for step 3 and for adapters with random ones, and data whose rows
    fill every length."""
    import transformers
    from transformers import AutoTokenizer, LlamaConfig

    hidden, intermediate, layers = SIZES[size]
    model, text = folder / size, "When can I see the fox at the camp? " * 100
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/model")
    for name, kind in (("", "LlamaForCausalLM"), ("-reward", "LlamaForSequenceClassification")):
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            vocab_size=8000,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
            architectures=[kind],
            num_labels=1,
            tie_word_embeddings=False,
        )
        (getattr(transformers, kind)(config) if weights else config).save_pretrained(
            f"{model}{name}"
        )
        tokenizer.save_pretrained(f"{model}{name}")
    (folder / "data").mkdir(exist_ok=True)
    for split in ("train", "test"):
        rows = [
            {"prompt": f"{split}{i} {text}", "chosen": f" a{i} {text}", "rejected": f" b{i} {text}"}
            for i in range(64)
        ]
        (folder / f"data/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def flags_of(script, folder, size, stage):
    models = [
        "--actor_model_name_or_path",
        folder / size,
        "--critic_model_name_or_path",
        f"{folder / size}-reward",
        "--max_prompt_seq_len",
        128,
        "--max_answer_seq_len",
        128,
        "--per_device_generation_batch_size",
        4,
        "--per_device_training_batch_size",
        4,
        "--num_eval_prompts",
        2,
    ]
    if script != "ppo":
        models = [
            "--model_name_or_path",
            folder / size,
            "--max_seq_len",
            256,
            "--per_device_train_batch_size",
            4,
        ]
    return [
        str(x)
        for x in [
            "--preset",
            "toy",
            *models,
            "--data_path",
            folder / "data",
            "--data_split",
            "1,1,1",
            "--max_steps",
            2,
            "--eval_steps",
            100,
            "--per_device_eval_batch_size",
            2,
            "--dtype",
            "fp32",
            "--zero_stage",
            stage,
            "--output_dir",
            folder / "out",
            "--overwrite",
        ]
    ]


# ---- In each rank --------------------------------------------------------------------------------
def status(key):
    return next(
        int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key)
    )


def measure(script, out, flags):
    """Run `script`'s main() and leave {phase: peak over what was there before the first model} in
    `out`, a file a rank."""
    import importlib

    import deepspeed

    import common
    from helpers import microscope, rollout_metrics, samples
    from machinery.models import saving
    from machinery.run import logs
    from machinery.run.run import Run

    module = importlib.import_module(script)
    peaks, now = {}, {"phase": None, "base": None, "step": 0}

    def enter(phase):
        if now["phase"] and now["step"] >= 2:  # the first step makes the optimizer's moments
            peaks[now["phase"]] = max(peaks.get(now["phase"], 0), status("VmHWM") - now["base"])
        Path("/proc/self/clear_refs").write_text("5")
        now["phase"] = phase

    def before(owner, name, phase, after=None, once=False):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            if not (once and now["phase"] == phase):
                enter(phase)
            result = original(*args, **kwargs)
            if after:
                enter(after)
            return result

        setattr(owner, name, wrapped)

    load_model, steps_of = common.load_model, Run.steps

    def first_load(*args, **kwargs):
        now["base"] = now["base"] or status("VmRSS")
        return load_model(*args, **kwargs)

    def steps(*args, **kwargs):
        for item in steps_of(*args, **kwargs):
            now["step"] = item[0]
            enter("train")
            yield item
            enter(None)

    common.load_model, Run.steps = first_load, steps
    # not a phase of the table, and slow
    module.evaluate = rollout_metrics.evaluate = lambda *args, **kwargs: {}
    samples.answer_and_keep = lambda *args: {}
    saving.save_model = logs.draw_curves = microscope.look = lambda *args, **kwargs: None
    if script == "ppo":
        before(module, "roll_out", "generate")
        before(module, "score", "score", once=True)
        before(module, "set_advantages", "train")
    before(deepspeed.runtime.engine.DeepSpeedEngine, "step", "update", after="train")
    sys.argv = [f"{script}.py", *flags]
    try:
        module.main()
    finally:
        Path(f"{out}.{os.environ.get('RANK', 0)}").write_text(json.dumps(peaks))


# ---- From outside --------------------------------------------------------------------------------
def compare(folder, script, ranks, stage, size, flags=""):
    """Returns [(phase, estimated GiB, measured GiB)] of one run."""
    import importlib

    from tools import estimate
    from tools import estimate_memory as memory

    prepare(folder, size, script == "ppo" or "lora" in flags)
    flags = flags_of(script, folder, size, stage) + flags.split()
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed goes back to the system at once
    }
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(ranks),
            __file__,
            "--measure",
            script,
            str(folder / "peaks"),
            *flags,
        ],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if run.returncode:
        raise RuntimeError(run.stdout[-4000:])
    seen = [json.loads(Path(f"{folder / 'peaks'}.{rank}").read_text()) for rank in range(ranks)]
    module = importlib.import_module(script)
    models_of = estimate.SCRIPTS[script][1]
    args = module.get_args(flags)
    expected = memory.count(args, models_of(args), ranks, cpu=True)
    return [
        (phase, sum(parts.values()) / GIB, max(s.get(phase, 0) for s in seen) / GIB)
        for phase, parts in expected.items()
    ]


def main():
    one = sys.argv[1:]
    cases = [(one[0], int(one[1]), int(one[2]), "69M", " ".join(one[3:]))] if one else CASES
    print(
        f"{'script':8}{'ranks':>5}{'stage':>6}{'model':>7}  {'flags':40}{'phase':10}"
        f"{'estimated':>10}{'measured':>10}  GiB a rank{'error':>9}"
    )
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        for script, ranks, stage, size, flags in cases:
            try:
                rows = compare(Path(folder), script, ranks, stage, size, flags)
            except RuntimeError as error:
                print(
                    f"{script:8}{ranks:5}{stage:6}{size:>7}  {flags:40}did not run: {error}",
                    flush=True,
                )
                continue
            for phase, estimated, measured in rows:
                print(
                    f"{script:8}{ranks:5}{stage:6}{size:>7}  {flags:40}{phase:10}"
                    f"{estimated:10.2f}{measured:10.2f}{estimated / measured - 1:+20.0%}",
                    flush=True,
                )
            peak = max(e for _, e, _ in rows) / max(m for _, _, m in rows) - 1
            errors.append(peak)
            print(f"{'':66}{'peak':10}{peak:+40.0%}", flush=True)
    if errors:
        print(
            f"error of the peak over {len(errors)} runs: {min(errors):+.0%} to {max(errors):+.0%}, "
            f"mean of its size {sum(map(abs, errors)) / len(errors):.0%}"
        )


if __name__ == "__main__":
    measure(*sys.argv[2:4], sys.argv[4:]) if sys.argv[1:2] == ["--measure"] else main()
