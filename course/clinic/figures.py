"""Writes the tables of figures into the clinic's pages:  python course/clinic/figures.py

A solution's table has the metrics that its text mentions, of the broken run and of a healthy one.
The table in README.md says what is healthy on the toy. Each stands between two markers.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "course/labs")]
import pages  # noqa: E402

from tools.report import runs  # noqa: E402

SHOWN = {  # case: its metrics, each after the step that logs it
    "01": "sft:eval_loss ppo:eos_rate ppo:response_length ppo:eval_gold",
    "02": "ppo:kl ppo:eval_kl ppo:eval_reward ppo:eval_gold",
    "03": "ppo:kl ppo:kl_k3 ppo:ratio_max ppo:sampling_gap ppo:approx_kl ppo:eval_gold",
    "04": "reward:eval_accuracy reward:eval_loss",
    "05": "ppo:kl ppo:grad_norm ppo:eval_reward ppo:eval_gold",
    "06": "ppo:actor_loss ppo:eval_kl ppo:eval_gold",
    "07": "ppo:kl ppo:ratio_max ppo:sampling_gap ppo:eval_kl ppo:eval_gold",
    "08": "ppo:entropy ppo:eval_kl ppo:eval_reward ppo:eval_response_length ppo:eval_gold",
    "09": "ppo:kl ppo:ratio_max ppo:sampling_gap ppo:entropy ppo:eval_gold",
    "10": "reward:eval_accuracy reward:eval_chosen_score reward:eval_rejected_score "
    "ppo:eval_reward ppo:eval_gold",
    "11": "ppo:critic_loss ppo:explained_variance ppo:eval_reward ppo:eval_response_length "
    "ppo:eval_gold",
    "12": "ppo:reward ppo:eval_gold",
    "13": "ppo:eval_reward ppo:eval_kl ppo:eval_gold",
    "14": "ppo:explained_variance ppo:critic_loss ppo:eval_reward ppo:eval_gold",
    "15": "ppo:eval_reward ppo:eval_response_length ppo:eval_gold",
    "16": "ppo:reward ppo:gold ppo:kl ppo:eval_reward ppo:eval_kl ppo:eval_gold",
    "17": "reward:eval_accuracy reward:eval_loss reward:eval_margin",
    "18": "ppo:reward ppo:equal_groups ppo:grad_norm ppo:kl",
    "19": "ppo:sampling_gap ppo:entropy ppo:eval_kl ppo:eval_gold",
    "20": "ppo:kl ppo:kl_k3 ppo:sampling_gap ppo:eval_response_length ppo:eval_gold",
    "21": "sft:loss sft:eval_loss ppo:eval_response_length ppo:eval_gold",
    "22": "ppo:kl ppo:ratio_max ppo:sampling_gap ppo:eval_gold",
}
BESIDE = {"13": "healthy/grpo/1", "18": "healthy/grpo/1", "22": "healthy/gpt2"}  # else healthy/1
ENDS = "eval_loss eval_accuracy eval_reward eval_gold eval_kl".split()
STEPS = "kl ratio_max sampling_gap actor_loss grad_norm critic_loss explained_variance entropy "
STEPS += "eos_rate equal_groups"


def series(folder, script, metric):
    """Returns {step: value} of a run's metric, empty if the run has none."""
    found = [run.metrics for run in runs.find([HERE / folder]) if run.script == script]
    return {line["step"]: line[metric] for lines in found for line in lines if metric in line}


def of_case(case):
    """Returns the table of a solution: first, last, smallest and largest of each metric."""
    healthy, lines = BESIDE.get(case, "healthy/1"), []
    for name in SHOWN[case].split():
        script, metric = name.split(":")
        for folder in (case, healthy):
            found = [*series(folder, script, metric).values()]
            numbers = [found[0], found[-1], min(found), max(found)] if found else []
            lines.append([f"`{metric}`", folder, *(f"{x:.4g}" for x in numbers)])
    heads = ["metric", "run", "first", "last", "smallest", "largest"]
    return pages.markdown(heads, [line for line in lines if len(line) > 2])


def of_healthy():
    """Returns the table of README.md: the smallest and the largest value over three seeds."""

    def cell(kind, metric, at_end):
        script = {"eval_accuracy": "reward", "eval_loss": "sft"}.get(metric, "ppo")
        found = [series(f"healthy/{kind}{seed}", script, metric) for seed in (1, 2, 3)]
        numbers = [x for own in found if own for x in [*own.values()][-1 if at_end else 0 :]]
        return f"{min(numbers):.3g} to {max(numbers):.3g}" if numbers else "none"

    lines = [
        [f"`{metric}`, {when}", cell("", metric, when == "at the end")]
        + [cell("grpo/", metric, when == "at the end")]
        for metrics, when in ((ENDS, "at the end"), (STEPS.split(), "in all steps"))
        for metric in metrics
    ]
    return pages.markdown(["metric", "PPO", "GRPO, with a verifier that is right"], lines)


def main():
    for case in SHOWN:
        pages.put(HERE / f"solutions/{case}.md", of_case(case))
    pages.put(HERE / "README.md", of_healthy())


if __name__ == "__main__":
    main()
