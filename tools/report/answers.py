"""One prompt, all models: the answers that runs have written down in samples.jsonl."""

PROMPTS = 5


def asked(runs):
    """Returns a few held-out prompts that all models were asked: dicts of prompt, answers.

    All models of the data of the last run: others would stand beside a prompt that is not theirs.
    An answer is a line of samples.jsonl, with the name of its model.
    """
    columns = written([run for run in runs if data_of(run) == data_of(runs[-1])])
    if not columns:
        return []
    last = [*columns.values()][-1]
    columns = {
        name: column for name, column in columns.items() if not last.keys().isdisjoint(column)
    }
    shared = [prompt for prompt in last if all(prompt in column for column in columns.values())]
    found = []
    for prompt in shared[:PROMPTS]:
        answers = [{"name": name, **column[prompt]} for name, column in columns.items()]
        found.append({"prompt": prompt, "answers": answers})
    return found


def data_of(run):
    """Returns the --data_path of a run."""
    return run.args.get("data_path")


def written(runs):
    """Returns {name of a model: {prompt: line of samples.jsonl}}, in the order of training."""
    sft = next((run for run in runs if run.script == "sft" and run.samples), None)
    ppos = [run for run in runs if run.script == "ppo" and run.samples]
    columns = {}
    if sft and sft.answers(last=False)[0]["step"] == 0:
        columns["base"] = by_prompt(sft.answers(last=False))
    if sft and not ppos:
        columns["SFT"] = by_prompt(sft.answers(last=True))
    for run in ppos:
        first, last = run.answers(last=False), run.answers(last=True)
        if first[0]["step"] == 0:
            columns.setdefault("SFT", by_prompt(first))
        if last[0]["step"] > 0:
            columns[f"PPO ({run.name})" if len(ppos) > 1 else "PPO"] = by_prompt(last)
    return columns


def by_prompt(lines):
    """Returns {prompt: line}, the first of equal prompts."""
    return {line["prompt"]: line for line in reversed(lines)}
