"""How good is tools/estimate.py? The peaks that it names, held against the resident memory of real
runs on CPU ranks.

    python bench/memory.py                         every case, about half an hour on 2 cores;
                                                   prints the table of docs/memory.md
    python bench/memory.py sft 2 3 --dtype bf16    one case: script, ranks, ZeRO stage, and any
                                                   flags

A run's own main() works on rows that are all as long as --max_seq_len allows. Linux keeps the
largest resident size that a process ever had (VmHWM) and forgets it when 5 is written to
/proc/self/clear_refs, so each phase is measured by itself. Counted from just before the first model
is loaded: Python and the libraries are not the estimate's subject.
"""

import importlib
import json
import os
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
FLAGS = """--preset toy --data_path {folder}/data --data_split 1,1,1 --output_dir {folder}/out
    --overwrite --max_steps 2 --eval_steps 100 --per_device_eval_batch_size 2 --dtype fp32
    --zero_stage {stage} """
LEARN = """--model_name_or_path {folder}/{size} --max_seq_len 256
    --per_device_train_batch_size 4 """
FLAGS_OF = {
    "sft": f"{FLAGS}{LEARN} --num_samples 0 ",
    "reward": f"{FLAGS}{LEARN} ",
    "ppo": f"""{FLAGS} --actor_model_name_or_path {{folder}}/{{size}}
        --critic_model_name_or_path {{folder}}/{{size}}-reward --max_prompt_seq_len 128
        --max_answer_seq_len 128 --per_device_generation_batch_size 4
        --per_device_training_batch_size 4 --num_eval_prompts 2 """,
}


def prepare(folder, size, weights=False):
    """Models without weights, or for step 3 and for adapters with random ones, and data whose rows
    fill every length."""
    from bench_inside import llama, write_model
    from transformers import AutoTokenizer

    hidden, intermediate, layers = SIZES[size]
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/model")
    for name, kind in ((size, "CausalLM"), (f"{size}-reward", "SequenceClassification")):
        config = llama(hidden, layers, hidden // 64, intermediate, 8000, tied=False)
        write_model(folder / name, config, kind, weights)
        tokenizer.save_pretrained(folder / name)
    (folder / "data").mkdir(exist_ok=True)
    text = "When can I see the fox at the camp? " * 100
    for split, count in (("train", 64), ("test", 4)):
        rows = [
            {"prompt": f"{split}{i} {text}", "chosen": f" a{i} {text}", "rejected": f" b{i} {text}"}
            for i in range(count)
        ]
        (folder / f"data/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- In each rank --------------------------------------------------------------------------------
class Meter:
    """The largest resident size in each phase, over what there was before the first model."""

    def __init__(self):
        self.peaks, self.phase, self.base, self.step = {}, None, None, 0

    def read(self, key):
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    def enter(self, phase):
        """A phase ends and another begins. None: what the estimate does not count."""
        self.base = self.base or self.read("VmRSS")
        if self.phase and self.step >= 2:  # the first step makes the optimizer's moments
            seen = self.read("VmHWM") - self.base
            self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), seen)
        Path("/proc/self/clear_refs").write_text("5")
        self.phase = phase

    def watch(self, owner, name, before, after=""):
        """Has a phase begin before each call of owner.name, and another one after it."""
        original = getattr(owner, name)

        def watched(*args, **options):
            self.enter(before)
            result = original(*args, **options)
            if after:
                self.enter(after)
            return result

        setattr(owner, name, watched)

    def watch_steps(self, owner):
        original = owner.steps

        def watched(*args, **options):
            for item in original(*args, **options):
                self.step = item[0]
                self.enter("train")
                yield item
                self.enter(None)

        owner.steps = watched


def measure(script, out, *flags):
    """Runs a script's main(). Writes {phase: bytes} to `out`, a file a rank."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    import common
    from machinery.run.run import Run

    module, meter = importlib.import_module(script), Meter()
    meter.watch(common, "load_model", None)
    meter.watch_steps(Run)
    meter.watch(Run, "log", None)  # evaluations are not in the table
    meter.watch(DeepSpeedEngine, "step", "update", after="train")
    if script == "ppo":
        meter.watch(module, "roll_out", "generate")
        meter.watch(module, "score", "score")
        meter.watch(module, "set_advantages", "train")
    sys.argv = [f"{script}.py", *flags]
    try:
        module.main()
    finally:
        Path(f"{out}.{os.environ.get('RANK', 0)}").write_text(json.dumps(meter.peaks))


# ---- From outside --------------------------------------------------------------------------------
def compare(folder, script, ranks, stage, size, flags=""):
    """Returns [(phase, estimated GiB, measured GiB)] of one run."""
    from tests import kit
    from tools import estimate, estimate_memory

    prepare(folder, size, script == "ppo" or "lora" in flags)
    words = FLAGS_OF[script].split()
    flags = [word.format(folder=folder, size=size, stage=stage) for word in words] + flags.split()
    env = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the system at once
    start = f"-m torch.distributed.run --standalone --nproc_per_node {ranks}".split()
    command = [sys.executable, *start, __file__, "--measure", script, f"{folder}/peaks", *flags]
    done = kit.start_command(command, env, limit=1800)
    if done.code:
        raise RuntimeError(str(done))
    seen = [json.loads(Path(f"{folder}/peaks.{rank}").read_text()) for rank in range(ranks)]
    args = importlib.import_module(script).get_args(flags)
    expected = estimate_memory.count(args, estimate.SCRIPTS[script][1](args), ranks, cpu=True)
    return [
        (phase, sum(parts.values()) / GIB, max(s.get(phase, 0) for s in seen) / GIB)
        for phase, parts in expected.items()
    ]


def main():
    one, errors = sys.argv[1:], []
    cases = [(one[0], int(one[1]), int(one[2]), "69M", " ".join(one[3:]))] if one else CASES
    print("| script | ranks | stage | model | flags | each phase, estimated / measured | peak |")
    print("| --- | ---: | ---: | --- | --- | --- | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            cells = [*case[:4], f"`{case[4]}`" if case[4] else ""]
            try:
                rows = compare(Path(folder), *case)
            except RuntimeError as error:
                cells += [f"did not run: {error}", ""]
            else:
                errors.append(max(e for _, e, _ in rows) / max(m for *_, m in rows) - 1)
                cells.append(", ".join(f"{phase} {e:.2f} / {m:.2f}" for phase, e, m in rows))
                cells.append(f"{errors[-1]:+.0%}")
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    if errors:
        mean = sum(map(abs, errors)) / len(errors)
        print(f"\nerror of the peak over {len(errors)} runs: {min(errors):+.0%} to ", end="")
        print(f"{max(errors):+.0%}, mean of its size {mean:.0%}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
    else:
        main()
