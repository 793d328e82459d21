"""What the demo's three steps achieved, against the known limits: `python
toy/report.py output/demo`."""

import json
import sys
from pathlib import Path

from gold import gold

TOY = Path(__file__).resolve().parent


def read(file):
    """Returns the dicts of a .jsonl file."""
    return [json.loads(line) for line in open(file)]


def main(folder):
    limits = json.loads((TOY / "data" / "limits.json").read_text())
    rows = []
    for step, metric in (
        ("sft", "eval_loss"),
        ("reward", "eval_accuracy"),
        ("ppo", "eval_gold"),
        ("ppo", "eval_reward"),
        ("ppo", "eval_kl"),
        ("ppo", "eval_response_length"),
    ):
        values = [r[metric] for r in read(folder / step / "metrics.jsonl") if metric in r]
        rows.append(
            (
                step,
                metric,
                f"{values[0]:.3f}",
                f"{values[-1]:.3f}",
                f"{limits[step][metric]:.3f}" if metric in limits[step] else "",
            )
        )
    print(f"\n{'step':8}{'metric':24}{'before':>10}{'after':>10}{'limit':>10}")
    for step, metric, *numbers in rows:
        print(f"{step:8}{metric:24}" + "".join(f"{n:>10}" for n in numbers))

    sft, ppo = read(folder / "sft" / "samples.jsonl"), read(folder / "ppo" / "samples.jsonl")
    answers = {
        "base": [s for s in sft if s["step"] == 0],
        "SFT": [s for s in ppo if s["step"] == 0],
        "PPO": [s for s in ppo if s["step"] == ppo[-1]["step"]],
    }
    by_prompt = {
        name: {s["prompt"]: s["response"] for s in reversed(samples)}
        for name, samples in answers.items()
    }
    print(
        "\nHeld-out prompts, answered by the model from scratch, after SFT, and after PPO "
        "(sampled at temperature 1; gold score in front):"
    )
    for prompt in [
        p for p in dict.fromkeys(s["prompt"] for s in answers["base"]) if p in by_prompt["PPO"]
    ][:5]:
        print(f"\n  {prompt.splitlines()[0]}")
        for name, texts in by_prompt.items():
            print(f"    {name:5}{gold([prompt], [texts[prompt]])[0]:5.2f} {texts[prompt][:120]!r}")
    print(
        "\nCurves: "
        + ", ".join(str(folder / step / "curves.png") for step in ("sft", "reward", "ppo"))
    )
    models = f"{folder}/sft {folder}/ppo --reward {folder}/reward"
    print(f"Talk to the models: .venv/bin/python tools/talk.py {models}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "output"))
