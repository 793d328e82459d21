"""One prompt, all models: the answers that runs have written down in samples.jsonl."""

import pandas

from tools.report.text import is_number

PROMPTS = 5


def asked(runs):
    """Returns a few held-out prompts that all models were asked: dicts of prompt, answers.

    All models of the data of the last run: others would stand beside a prompt that is not theirs.
    An answer is a line of samples.jsonl, with the name of its model. The first prompt is the most
    typical one: the rewards of its answers are nearest to the models' means.
    """
    data = runs[-1].args.get("data_path")
    columns = written([run for run in runs if run.args.get("data_path") == data])
    last = next(reversed(columns.values()), {})
    columns = {name: own for name, own in columns.items() if not last.keys().isdisjoint(own)}
    shared = [prompt for prompt in last if all(prompt in own for own in columns.values())]
    rewards = [[own[prompt].get("reward") for own in columns.values()] for prompt in shared]
    numbers = [[x if is_number(x) else None for x in row] for row in rewards]
    table = pandas.DataFrame(numbers, dtype=float)
    apart = (table - table.mean()).abs().sum(axis="columns")
    found = []
    for prompt in [shared[i] for i in apart.sort_values(kind="stable").index[:PROMPTS]]:
        answers = [{"name": name, **own[prompt]} for name, own in columns.items()]
        found.append({"prompt": prompt, "answers": answers})
    return found


def written(runs):
    """Returns {name of a model: {prompt: line of samples.jsonl}}, in the order of training.

    What the one SFT model answers PPO has written down, too, at its step 0, on PPO's prompts.
    """
    columns, scripts = {}, [run.script for run in runs]
    for run in runs:
        if run.script in ("sft", "ppo") and run.samples:
            first, last = ({x["prompt"]: x for x in run.answers(last=end)[::-1]} for end in (0, 1))
            name = run.title() + f" ({run.name})" * (scripts.count(run.script) > 1)
            before = "base" if run.script == "sft" else "SFT"
            if run.samples[0]["step"] == 0 and (before == "base" or scripts.count("sft") < 2):
                columns[before] = first
            if run.samples[-1]["step"] > 0:
                columns[name] = last
    return columns
