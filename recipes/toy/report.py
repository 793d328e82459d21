"""Prints what the demo's three steps achieved, beside the known limits.

python recipes/toy/report.py output/demo
"""

import json
import sys
from pathlib import Path

from gold import gold

TOY = Path(__file__).resolve().parent
METRICS = (
    ("sft", "eval_loss"),
    ("reward", "eval_accuracy"),
    ("ppo", "eval_gold"),
    ("ppo", "eval_reward"),
    ("ppo", "eval_kl"),
    ("ppo", "eval_response_length"),
)


def read(file):
    """Returns the dicts of a .jsonl file."""
    return [json.loads(line) for line in open(file)]


def print_table(folder):
    """Prints each metric at the first and at the last evaluation, and its limit."""
    limits = json.loads((TOY / "data/limits.json").read_text())
    print(f"\n{'step':8}{'metric':24}{'before':>10}{'after':>10}{'limit':>10}")
    for step, metric in METRICS:
        lines = read(folder / step / "metrics.jsonl")
        values = [line[metric] for line in lines if metric in line]
        limit = limits[step].get(metric)
        limit = "" if limit is None else f"{limit:.3f}"
        print(f"{step:8}{metric:24}{values[0]:10.3f}{values[-1]:10.3f}{limit:>10}")


def print_answers(folder):
    """Prints five held-out prompts with the responses of each step's model."""
    sft, ppo = (read(folder / step / "samples.jsonl") for step in ("sft", "ppo"))
    last = ppo[-1]["step"]
    lines = {
        "base": [line for line in sft if line["step"] == 0],
        "SFT": [line for line in ppo if line["step"] == 0],
        "PPO": [line for line in ppo if line["step"] == last],
    }
    models = {}
    for name, found in lines.items():
        models[name] = {line["prompt"]: line["response"] for line in reversed(found)}
    print(
        "\nHeld-out prompts, answered by the model from scratch (greedily), and after SFT and PPO "
        "(sampled at temperature 1). The gold score is in front:"
    )
    asked = dict.fromkeys(line["prompt"] for line in lines["base"])
    for prompt in [prompt for prompt in asked if prompt in models["PPO"]][:5]:
        print(f"\n  {prompt.splitlines()[0]}")
        for name, responses in models.items():
            [score] = gold([prompt], [responses[prompt]])
            print(f"    {name:5}{score:5.2f} {responses[prompt][:120]!r}")


def main(folder):
    print_table(folder)
    print_answers(folder)
    curves = [str(folder / step / "curves.png") for step in ("sft", "reward", "ppo")]
    print(f"\nCurves: {', '.join(curves)}")
    models = f"{folder}/sft {folder}/ppo --reward {folder}/reward"
    print(f"Talk to the models: .venv/bin/python tools/talk.py {models}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "output"))
