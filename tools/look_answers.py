"""One prompt, all models: answers that a run has written down, and those of its saved models.

The averaged actor (ema/) has answered nothing while it was trained, and the base model's answers
have no score, so small models are asked anew, as talk.py does it.
"""

import contextlib
import io
import json
from pathlib import Path

import talk
import talk_models

from machinery.data import tokens
from machinery.rollout import reward_functions

PROMPTS = 5
SMALL = 1e9  # bytes of weights that are loaded without being asked for
KEPT = """temperature top_p top_k min_new_tokens max_answer_seq_len max_prompt_seq_len
          seed""".split()


def asked(runs, ask):
    """Returns (prompts, notes). Prompts: dicts of prompt, answers; an answer has name, text, ...

    ask: whether to load models; None: if they are small. notes: why something is missing.
    """
    sft = next((run for run in runs if run.script == "sft" and run.samples), None)
    ppos = [run for run in runs if run.script == "ppo" and run.samples]
    columns = written(sft, ppos)
    if not columns:
        return [], []
    last = [*columns.values()][-1]
    prompts = [prompt for prompt in last if all(prompt in column for column in columns.values())]
    prompts = (prompts or [*last])[:PROMPTS]
    out = []
    for prompt in prompts:
        found = [{"name": n, **c[prompt]} for n, c in columns.items() if prompt in c]
        out.append({"prompt": prompt, "answers": found})
    return out, sum((ask_models(run, out, ask, name_in(run, ppos)) for run in ppos), [])


def name_in(run, runs):
    """Returns what is put behind the names of a run's models: its own, if there are several."""
    return f" ({run.name})" if len(runs) > 1 else ""


def written(sft, ppos):
    """Returns {name of a model: {prompt: answer}} from samples.jsonl, in the order of training."""
    columns = {}
    if sft and sft.answers(last=False)[0]["step"] == 0:
        columns["base"] = column(sft.answers(last=False))
    if sft and not ppos:
        columns["SFT"] = column(sft.answers(last=True))
    for run in ppos:
        first, last = (run.answers(last=end) for end in (False, True))
        if first[0]["step"] == 0 and "SFT" not in columns:
            columns["SFT"] = column(first)
        if last[0]["step"] > 0:
            columns[f"PPO{name_in(run, ppos)}"] = column(last)
    return columns


def column(lines):
    """Returns {prompt: answer} of lines of samples.jsonl, the first of equal prompts."""
    found = {}
    for place, line in enumerate(lines):
        row = line.get("row", place)
        scores = {name: line[name] for name in ("reward", "gold", "ended") if name in line}
        found.setdefault(line["prompt"], {"text": line["response"], "row": row, **scores})
    return found


# ---- Models ----
def ask_models(ppo, prompts, ask, name):
    """Adds EMA's answers, and scores for the base model's, to `prompts`. Returns notes.

    name: what is put behind "EMA".
    """
    ema, judges = ppo.path / "ema", ppo.args.get("reward_model_name_or_path") or []
    judge = placed(ppo, judges[0]) if len(judges) == 1 else None
    size = sum(file.stat().st_size for file in ema.glob("*.safetensors"))
    if not size or ask == 0:
        return []
    size += sum(file.stat().st_size for file in Path(judge or ema).glob("*.safetensors"))
    if ask is None and size > SMALL:
        return [f"EMA{name} was not asked: {size / 1e9:.1f} GB of weights; --ask 1 loads them."]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            add_answers(ppo, prompts, str(ema), judge, f"EMA{name}")
    except (Exception, SystemExit) as error:
        why = said.getvalue().rpartition("error: ")[-1].strip() or repr(error)
        return [f"EMA{name} could not be asked: {why:.300}"]
    return []


def placed(run, path):
    """Returns a model's folder, also if all folders have moved together; None if it is gone."""
    beside = run.path.parent / Path(path).name
    return next((str(one) for one in (Path(path), beside) if one.is_dir()), None)


def add_answers(ppo, prompts, ema, judge, name):
    """Has EMA answer `prompts` with the random numbers of the run's evaluations, and scores."""
    asked = column(ppo.answers(last=True))
    given = [[f"--{name}", str(ppo.args[name])] for name in KEPT if ppo.args.get(name) is not None]
    stop = ["--stop", *ppo.args["stop"]] if ppo.args.get("stop") else []
    args = talk.get_args([ema, *sum(given, []), *stop])
    writer = talk_models.Writer(args, ema)
    judge = judge and talk_models.Judge(args, judge)
    gold = None
    if ppo.args.get("gold_fn"):
        gold = reward_functions.load_function(ppo.args["gold_fn"], "--gold_fn")
    numbers = [asked.get(one["prompt"], {"row": 0})["row"] for one in prompts]
    rows = [row_of(writer, args, one["prompt"], i) for one, i in zip(prompts, numbers)]
    for one, row in zip(prompts, rows):
        [answer] = writer.answers(args, [row], step=0)
        one["answers"].append({"name": name, "text": answer["text"], "made": answer})
    for one, row in zip(prompts, rows):
        for answer in one["answers"]:
            made = answer.pop("made", None) or as_written(writer, row, answer)
            if judge and "reward" not in answer:
                [answer["reward"]] = judge.scores(args, writer, [made])
            if gold and "gold" not in answer:
                [score] = reward_functions.scores_of(gold, [made])
                answer["gold"] = sum(score) if isinstance(score, list) else score


def row_of(writer, args, prompt, number):
    """Returns a prompt of samples.jsonl, whose row is `number`, as the run has made it."""
    if writer.tokenizer.chat_template and prompt.startswith("[{"):
        with contextlib.suppress(ValueError):
            prompt = json.loads(prompt)
    return writer.prompt(args, number, prompt)


def as_written(writer, row, answer):
    """Returns a response of samples.jsonl as `answers` returns one, tokenised from its text."""
    ids, ended = tokens.tokenise_response(writer.tokenizer, answer["text"]), answer.get("ended", 1)
    return {
        **row,
        "text": answer["text"],
        "ended": ended,
        "response_ids": ids[: None if ended else -1],
    }
