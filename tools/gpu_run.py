"""The recipe that waits for a GPU: Qwen2.5-0.5B through three steps, and GRPO on sums in words.

    make gpu-run            one GPU of 24 GB or more; planned for at most 3 hours; downloads 1.5 GB
    make gpu-run SMALL=1    the same lines on a CPU, with random weights of the same architecture
                            and a few steps of small rows: minutes. It shows that they run

What it leaves for others lies in output/gpu-run/report, some MB: metrics, samples, flags,
report.html, and summary.json, which holds each number below beside the range that we expect. **It
has not been run on a GPU yet. The ranges are arguments, not measurements:**

    sft       Capybara. A loss per token of 1 to 2: far below ln 151,936 = 11.9 of a blind guess,
              and not 0
    reward    UltraFeedback, half of it. Above chance, and below the 0.715 that a Qwen2.5 of 7B
              reached on HH-RLHF (hugingapi.com/usama10/qwen-7b-reward-model), with room for noise
    ppo       its other half. The reward rises; the KL is more than 0, and tens of nats at most
    sft-math  GSM8K's own solutions, one pass
    grpo      the share of GSM8K's problems that are solved. A Qwen2.5-0.5B went from 0.25 after
              SFT to 0.50 (tripathysagar.github.io/sagaTrip/13_grpo-reward-design.html: LoRA, a
              reward of 0 or 1, as here), another, Instruct, has 0.362 after SFT alone (OhhMoo's
              qwen05b-gsm8k-sft-instruct). Ours takes fewer steps
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SMALL = bool(os.environ.get("SMALL"))
OUT = ROOT / "output" / ("gpu-run-small" if SMALL else "gpu-run")
MODEL = f"{OUT}/model" if SMALL else "Qwen/Qwen2.5-0.5B"
# A small run takes the two columns of text in the cases of recipes/toy/maths.py for question and
# answer
DATA, QUESTION = (
    ("recipes/toy/maths.jsonl", "response") if SMALL else ("openai/gsm8k:main", "question")
)
MATHS = f"--data_path {DATA} --columns instruction={QUESTION}"
STEPS = {
    "sft": f"sft.py --model_name_or_path {MODEL} --max_steps 600 --eval_steps 200",
    "reward": f"""reward.py --model_name_or_path {OUT}/sft --max_steps 800 --eval_steps 200
        --per_device_train_batch_size 4 --gradient_accumulation_steps 2""",  # 8 fill 24 GB
    "ppo": f"""ppo.py --actor_model_name_or_path {OUT}/sft
        --critic_model_name_or_path {OUT}/reward --max_steps 60 --eval_steps 20""",
    "sft-math": f"""sft.py --model_name_or_path {MODEL} {MATHS},output=answer
        --data_split 1,0,0 --num_train_epochs 1 --max_seq_len 512 --eval_steps 200""",
    "grpo": f"""ppo.py --actor_model_name_or_path {OUT}/sft-math {MATHS} --data_split 0,0,1
        --advantage grpo --kl_in loss --kl_estimator k3 --kl_coef 0.01 --samples_per_prompt 8
        --reward_fn recipes/toy/maths.py:solved --max_steps 120 --eval_steps 40
        --num_eval_prompts 256""",
}
SMALL_DATA = " --data_path recipes/toy/data --data_split 4,5,1"
SMALL_FLAGS = {
    "sft.py": "--max_steps 2 --max_seq_len 64 --lora_dim 4 --num_samples 1 --max_answer_seq_len 8",
    "reward.py": "--max_steps 2 --max_seq_len 64 --lora_dim 4",
    "ppo.py": """--max_steps 2 --max_prompt_seq_len 32 --max_answer_seq_len 8 --num_eval_prompts 4
        --gradient_accumulation_steps 1""",
}
RANGES = {  # (step, metric): from, to; at the last evaluation
    ("sft", "eval_loss"): (1.0, 2.0),
    ("reward", "eval_accuracy"): (0.58, 0.74),
    ("ppo", "eval_kl"): (0.05, 60.0),
    ("sft-math", "eval_loss"): (0.3, 1.0),
    ("grpo", "eval_reward"): (0.30, 0.55),
}
SHOWN = "eval_loss eval_accuracy eval_reward eval_kl eval_response_length".split()


# ---- The runs ----
def command(name):
    """Returns the command of a step. One rank needs no launcher."""
    given = f"{STEPS[name]} --preset qwen2.5-0.5b --output_dir {OUT}/{name} --overwrite"
    if SMALL:
        given += SMALL_DATA * (MATHS not in given) + " --dtype fp32 --per_device_eval_batch_size 4 "
        given += SMALL_FLAGS[given.split()[0]]
    return [sys.executable, *given.split()]


def last_evaluations(name):
    """Returns the numbers of a step's first and last evaluation, and its median rate."""
    lines = [json.loads(line) for line in open(OUT / name / "metrics.jsonl")]
    found = {m: [x[m] for x in lines if x.get(m) is not None] for m in SHOWN}
    rates = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    return {m: (x[0], x[-1]) for m, x in found.items() if x}, statistics.median(rates)


def machine():
    """Returns what the numbers depend on, beside the versions in each run's args.json."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": gpu, "commit": commit.stdout.strip()}


def hand_over(seconds):
    """Writes output/gpu-run/report, and prints its summary."""
    report, rows = OUT / "report", []
    for name in seconds:
        (report / name).mkdir()
        for file in ("metrics.jsonl", "samples.jsonl", "args.json", "curves.png"):
            if (OUT / name / file).exists():
                shutil.copy(OUT / name / file, report / name)
        shown, rate = last_evaluations(name)
        print(f"{name:9}{seconds[name]:7.0f} s  {rate:9.0f} tokens/s")
        for metric, (first, last) in shown.items():
            low, high = RANGES.get((name, metric), (None, None))
            words = ""
            if low is not None and not SMALL:
                words = f"expected {low} to {high}: {'yes' if low <= last <= high else 'NO'}"
            print(f"         {metric:22}{first:10.3f}{last:10.3f}   {words}")
            rows.append([name, metric, first, last, low, high])
        rows.append([name, "tokens_per_second", rate, seconds[name]])
    summary = {**machine(), "seconds": sum(seconds.values()), "rows": rows}
    (report / "summary.json").write_text(json.dumps(summary, indent=1))
    print(f"If a GPU made what is in {report}, please send it to us.")


def main():
    shutil.rmtree(OUT if SMALL else OUT / "report", ignore_errors=True)  # runs are moved aside
    if SMALL:
        from tests import tiny_models  # a Qwen2 of two layers with random weights

        config = tiny_models.config_of("qwen2", max_position_embeddings=1024)
        tiny_models.folder_of(OUT / "model", config, weights=True)
    seconds = {}
    for name in STEPS:
        began = time.time()
        subprocess.run(command(name), cwd=ROOT, check=True)
        seconds[name] = time.time() - began
    (OUT / "report").mkdir()
    page = OUT / "report/report.html"
    runs = [OUT / name for name in STEPS]
    subprocess.run([sys.executable, "tools/look.py", *runs, "--out", page], cwd=ROOT, check=True)
    hand_over(seconds)


if __name__ == "__main__":
    main()
