"""Prints what `make grpo` achieved on both held-out sets, beside what is known of them.

    python recipes/arithmetic/report.py output/grpo

It reads the samples of evaluations. For sums of the trained length, these are the first and the
last evaluation of the run `grpo`. For longer sums, they are those of the runs `longer-sft` and
`longer-grpo`, which only evaluate.
"""

import json
import sys
from itertools import groupby
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from verifier import all_steps_right


def read(file):
    """Returns the dicts of a .jsonl file."""
    return [json.loads(line) for line in open(file)]


def evaluation(folder, which):
    """Returns (metrics, responses) of a run's first evaluation (which 0) or last one (-1)."""
    metrics = [line for line in read(folder / "metrics.jsonl") if "eval_reward" in line][which]
    samples = read(folder / "samples.jsonl")
    return metrics, [line for line in samples if line["step"] == metrics["step"]]


def numbers(metrics, responses):
    """Returns what the table shows for an evaluation: {name: number}."""
    rows = groupby(responses, lambda response: response["row"])
    groups = [[response["reward"] for response in row] for _, row in rows]
    right = [response for response in responses if response["reward"] == 1]
    lucky = [not all_steps_right(response["prompt"], response["response"]) for response in right]
    samples = len(groups[0])
    return {
        "pass@1": metrics["eval_pass_at_1"],
        f"pass@{samples}": metrics[f"eval_pass_at_{samples}"],
        "right by luck": fmean(lucky) if lucky else 0.0,
        "groups that teach nothing": fmean(min(group) == max(group) for group in groups),
        "tokens a response": metrics["eval_response_length"],
    }


def print_table(folder):
    """Prints each set's numbers before and after GRPO, and what is known of them."""
    print(f"\n{'held-out sums':30}{'pupil':>8}{'SFT':>8}{'GRPO':>8}{'limit':>8}")
    sets = (
        ("two operations", "data", [("grpo", 0), ("grpo", -1)]),
        ("three: never trained on", "longer", [("longer-sft", -1), ("longer-grpo", -1)]),
    )
    for title, data, runs in sets:
        known = json.loads((HERE / data / "limits.json").read_text())["pupil"]
        before, after = (numbers(*evaluation(folder / name, which)) for name, which in runs)
        pupil = dict(zip(before, (known["imitation"], known["imitation_pass_at_8"], known["luck"])))
        pupil["tokens a response"] = known["length"]
        limits = dict(zip(before, (known["limit"], known["limit"])))
        print(title)
        for name in before:
            digits = 1 if name.startswith("tokens") else 3
            values = [each.get(name) for each in (pupil, before, after, limits)]
            shown = ["" if value is None else f"{value:.{digits}f}" for value in values]
            print(f"  {name:28}" + "".join(f"{text:>8}" for text in shown))


def print_samples(folder, count=3):
    """Prints the first held-out sums that SFT's first sample gets wrong, as answered by both."""
    (_, before), (_, after) = (evaluation(folder / "grpo", which) for which in (0, -1))
    first = {line["row"]: line for line in after if line["sample"] == 0}
    wrong = [line for line in before if line["sample"] == 0 and not line["reward"]]
    print("\nThe first held-out sums that SFT's first sample got wrong (temperature 1):")
    for line in wrong[:count]:
        print(f"\n  {line['prompt']}")
        for name, each in (("SFT", line), ("GRPO", first[line["row"]])):
            print(f"    {name:5}{each['reward']:3.0f} {each['response']}")


def main(folder):
    print_table(folder)
    print_samples(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "output/grpo"))
