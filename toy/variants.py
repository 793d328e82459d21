"""PPO's variants on the toy, over three seeds each: the table of docs/ppo.md.

    python toy/variants.py output/demo

It comes after `make demo`, whose models it starts from. A run takes one to two minutes on 2 CPU
cores. Runs that are there already are not made again. It prints the table after each seed: means,
with the smallest and largest in brackets.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

SEEDS = (1, 2, 3)
GROUP = "--samples_per_prompt 4"  # 8 prompts with 4 answers each in place of 32 prompts with one
VARIANTS = {
    "gae": "",
    "gae, no KL": "--kl_coef 0",
    "rloo": f"--advantage rloo {GROUP}",
    "rloo, no KL": f"--advantage rloo {GROUP} --kl_coef 0",
    "grpo": f"--advantage grpo {GROUP}",
    "grpo, no KL": f"--advantage grpo {GROUP} --kl_coef 0",
    "reinforce": "--advantage reinforce",
    "reinforce, no KL": "--advantage reinforce --kl_coef 0",
    "gae, 2 epochs": "--allow_unstable 1 --ppo_epochs 2",
    "gae, 4 epochs": "--allow_unstable 1 --ppo_epochs 4",
}
COLUMNS = ["eval_gold", "eval_reward", "eval_kl", "eval_response_length", "ratio_max"]


def run(demo, name, seed):
    """Returns the last record of metrics.jsonl, and the largest ratio of the run."""
    output = demo / "variants" / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}"
    if not (output / "config.json").exists():
        command = [
            "torchrun",
            "--nproc_per_node",
            "2",
            "ppo.py",
            "--preset",
            "toy",
            "--actor_model_name_or_path",
            str(demo / "sft"),
            "--critic_model_name_or_path",
            str(demo / "reward"),
            "--output_dir",
            str(output),
            "--overwrite",
            "--seed",
            str(seed),
            "--enable_ema",
            "0",
            "--log_steps",
            "1",
            "--eval_steps",
            "120",
            *VARIANTS[name].split(),
        ]
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {**records[-1], "ratio_max": max(r["ratio_max"] for r in records[1:])}


def main(demo):
    found = {name: [] for name in VARIANTS}
    for count, seed in enumerate(SEEDS, 1):
        for name in VARIANTS:
            found[name].append(run(demo, name, seed))
        print(
            f"\n| {count} seeds | "
            + " | ".join(COLUMNS)
            + " |\n"
            + "| --- " * (len(COLUMNS) + 1)
            + "|"
        )
        for name, records in found.items():
            cells = ([r[c] for r in records] for c in COLUMNS)
            print(
                f"| {name} | "
                + " | ".join(f"{sum(c) / len(c):.3f} [{min(c):.3f}, {max(c):.3f}]" for c in cells)
                + " |",
                flush=True,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
