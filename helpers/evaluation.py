"""What an evaluation looks at and writes down: answers of step 1, pairs of 2, responses of 3."""

import json
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from transformers import GenerationConfig

import common
from helpers import judging, metrics
from machinery.base import ranks, statistics
from machinery.data import batching
from machinery.data.tokens import keep_end, tokenise_response
from machinery.engine import zero3
from machinery.run import logs

PAIR_COLUMNS = "row chosen_score rejected_score chosen_length rejected_length".split()


# ---- Step 1: a few prompts, answered greedily (--num_samples) ----
def answer_and_keep(run, engine, tokenizer, held_out, step, gold=None):
    """Answers the first held-out prompts, writes them to samples.jsonl and shows the first.

    gold: the function of --gold_fn. Returns {"eval_gold": their mean score}, or {} without it.
    """
    rows = [held_out[i] for i in range(min(run.args.num_samples, len(held_out)))]
    if not rows:
        return {}
    answers = answer_greedily(run.args, engine, tokenizer, [row["prompt_ids"] for row in rows])
    logs.show_sample(rows[0], answers[0]["response"])
    lines = [{"step": step, "prompt": row["prompt"], **a} for row, a in zip(rows, answers)]
    if gold:
        golds = graded(gold, rows, [answer["response"] for answer in answers], tokenizer)
        lines = [{**line, "gold": score} for line, score in zip(lines, golds)]
    logs.append(run.args, "samples.jsonl", lines)
    return {"eval_gold": sum(golds) / len(golds)} if gold else {}


def graded(function, rows, texts, tokenizer):
    """Returns the score that the function of --gold_fn gives to each response, as in step 3."""
    pairs = zip(rows, texts)
    made = [{**row, "text": t, "response_ids": tokenise_response(tokenizer, t)} for row, t in pairs]
    return [float(np.sum(score)) for score in judging.scores_of(function, made)]


@torch.no_grad()
def answer_greedily(args, engine, tokenizer, prompts):
    """Returns the likeliest response to each of `prompts` (lists of ids), and if it ended."""
    room = min(args.max_answer_seq_len, args.max_seq_len // 2)  # a long prompt keeps its end
    prompts = [keep_end(tokenizer, ids, args.max_seq_len - room) for ids in prompts]
    ids, mask = (x.to(ranks.device()) for x in common.pad(prompts, tokenizer.pad_token_id))
    special = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    greedy = GenerationConfig(max_new_tokens=room, do_sample=False, **special)
    engine.eval()  # no dropout
    with zero3.gather_for_generation(engine) as (model, synced):
        own = model.generation_config  # generate() fills in from it what `greedy` leaves open
        model.generation_config = greedy
        out = model.generate(ids, attention_mask=mask, generation_config=greedy, synced_gpus=synced)
        model.generation_config = own
    engine.train()
    out = out[:, ids.shape[1] :]
    ended = (out == tokenizer.eos_token_id).any(-1).tolist()
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    return [{"response": text, "ended": float(end)} for text, end in zip(texts, ended)]


# ---- Step 2: judge.jsonl ----
def write_pairs(args, held_out, pairs):
    """Writes a line for each pair, in place of those of the evaluation before. All ranks call it.

    held_out: the rows of all ranks. pairs: (n, 3), of this rank's: number of the row, chosen score,
    rejected score. A length is the number of tokens of a response, EOS included. The line has the
    data's own columns, too, and `place`, the file and its line: this is how to find the pairs that
    the judge gets wrong.
    """
    judged = [{"pair": pair, "row_weight": 1} for pair in pairs.tolist()]
    judged, output = ranks.each_once(judged), Path(args.output_dir)
    if ranks.get_rank() > 0 or not output.is_dir():  # a benchmark has no folder
        return
    lines = []
    for number, *scores in sorted(one["pair"] for one in judged):
        row = held_out[int(number)]
        texts = {"place": row["place"], "prompt": row["prompt"], **json.loads(row["extra"])}
        numbers = zip(PAIR_COLUMNS, (int(number), *scores, *map(len, row["responses"])))
        lines.append(json.dumps(texts | dict(numbers)) + "\n")
    (output / "judge.jsonl").write_text("".join(lines))


# ---- Step 3: held-out prompts, answered and scored ----
def requests(held_out, samples=1):
    """Returns this rank's share of the held-out rows as requests: each row `samples` times.

    Every rank has the same number: fillers complete the shares.
    """
    count = ranks.data_parallel_size()
    order = [*range(len(held_out)), *[-1] * (-len(held_out) % count)]
    dealt = batching.Rows(held_out)
    mine = order[ranks.data_parallel_rank() :: count]
    each = enumerate(mine)
    return [{**dealt[i], "sample": n, "group": g} for g, i in each for n in range(samples)]


def report(run, step, responses, samples=1):
    """Writes the scored responses of all ranks down, shows two, and returns their means: eval_...

    responses: from `gathered`. samples: how many there are to each prompt.
    """
    names = reported(responses[0])
    lines = []
    for response in responses:
        line = {name: response[name] for name in ("row", "sample", "prompt", *names)}
        lines.append({"step": step, **line, "response": response["text"]})
    logs.append(run.args, "samples.jsonl", lines)
    for response in responses[::samples][:2]:
        numbers = [f"{name} {response[name]:.4g}" for name in names]
        logs.show_sample(response, response["text"], f"  {', '.join(numbers)}")
    return means_of(responses, samples)


def gathered(micro_batches):
    """Returns all ranks' responses, in the order of their rows, each with its metrics.

    Refuses functions whose parts are others for other responses, also on another rank.
    """
    responses = []
    for batch in micro_batches:
        for name, values in metrics.per_response(batch).items():
            for response, value in zip(batch.responses, values.tolist()):
                response[name] = value
        responses += batch.responses
    responses = sorted(ranks.each_once(responses), key=lambda row: (row["row"], row["sample"]))
    metrics.refuse_unlike_parts(tuple(sorted(reported(row))) for row in responses)
    return responses


def reported(response):
    """Returns the names of the metrics in a scored response that an evaluation reports.

    Those that go on after reward_ and gold_ are of several judges, or of a function's dict.
    """
    others = ("kl", "response_length")
    return [name for name in response if name.startswith(("reward", "gold")) or name in others]


def means_of(responses, samples):
    """Returns {eval_reward: mean, ...} of scored responses, `samples` to each prompt.

    If these are several, also the share of prompts that one of k solves, pass_at_k with k = 1, 2,
    4, ..., and its 95 % interval over the prompts, pass_at_k_ci. Where the rewards are not all 0 or
    1 it is the largest reward of k: best_of_k.
    """
    names, count = reported(responses[0]), len(responses)
    means = {name: sum(response[name] for response in responses) / count for name in names}
    rewards = [response.get("reward") for response in responses]
    what = "pass_at" if {*rewards} <= {0.0, 1.0} else "best_of"
    for k in [2**i for i in range(samples.bit_length())] if samples > 1 else ():
        starts = range(0, len(rewards), samples)
        values = [statistics.best_of(rewards[i : i + samples], k) for i in starts]
        means[f"{what}_{k}"] = fmean(values)
        means[f"{what}_{k}_ci"] = statistics.mean_interval(values)
    return {f"eval_{name}": value for name, value in means.items()}
