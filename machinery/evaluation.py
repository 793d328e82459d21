"""What runs write of held-out rows: samples.jsonl (steps 1, 3), judge.jsonl (2), tokens.jsonl (3).

step 1   answer_and_keep    answers a few prompts, greedily (--num_samples)
step 2   write_pairs        scores the held-out pairs
step 3   requests, gathered, report
         microscope_requests, write_microscope    all numbers of each token of a few responses
"""

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
from transformers import GenerationConfig

import common
from machinery import batching, folders, judges, metrics, ranks, zero3
from machinery.run import append, show_sample
from machinery.tokens import as_text, keep_end, tokenise_response


# ---- Step 1 ----
def answer_and_keep(run, engine, tokenizer, held_out, step, gold):
    """Answers the first held-out prompts, writes them to samples.jsonl and shows the first.

    gold: the function of --gold_fn. Returns {"eval_gold": their mean score}, or {} without it.
    """
    rows = [held_out[i] for i in range(min(run.args.num_samples, len(held_out)))]
    if not rows:
        return {}
    answers = answer_greedily(run.args, engine, tokenizer, [row["prompt_ids"] for row in rows])
    show_sample(rows[0], answers[0]["response"])
    lines = [{"step": step, "prompt": row["prompt"], **a} for row, a in zip(rows, answers)]
    if gold:
        texts = [answer["response"] for answer in answers]
        ids = [tokenise_response(tokenizer, text) for text in texts]
        made = [{**row, "text": t, "response_ids": i} for row, t, i in zip(rows, texts, ids)]
        for line, score in zip(lines, judges.scores_of(gold, made)):
            line["gold"] = sum(score)
    append(run.args, "samples.jsonl", lines)
    return {"eval_gold": sum(line["gold"] for line in lines) / len(lines)} if gold else {}


@torch.no_grad()
def answer_greedily(args, engine, tokenizer, prompts):
    """Returns the likeliest response to each of `prompts` (lists of ids), and if it ended."""
    room = min(args.max_answer_seq_len, args.max_seq_len // 2)  # a long prompt keeps its end
    prompts = [keep_end(tokenizer, ids, args.max_seq_len - room) for ids in prompts]
    ids, mask = (x.to(ranks.device()) for x in common.pad(prompts, tokenizer.pad_token_id))
    ends = folders.ends_of(zero3.unwrap_model(engine), tokenizer)
    special = dict(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    greedy = GenerationConfig(max_new_tokens=room, do_sample=False, **special)
    options = {"generation_config": greedy, **folders.accepted(engine)}
    engine.eval()  # no dropout
    with zero3.gather_for_generation(engine) as (model, synced):
        own = model.generation_config  # generate() fills in from it what `greedy` leaves open
        model.generation_config = greedy
        out = model.generate(ids, attention_mask=mask, synced_gpus=synced, **options)
        model.generation_config = own
    engine.train()
    out = out[:, ids.shape[1] :].tolist()
    texts = [as_text(tokenizer, response, ends) for response in out]
    ended = [not set(ends).isdisjoint(response) for response in out]
    return [{"response": text, "ended": float(end)} for text, end in zip(texts, ended)]


# ---- Step 2 ----
def write_pairs(args, held_out, pairs):
    """Writes judge.jsonl: a line for each pair, in place of those of the evaluation before.

    All ranks call it. held_out: the rows of all ranks. pairs: (n, 3), of this rank's: number of the
    row, chosen score, rejected score. A length is the number of tokens of a response, EOS included.
    The line has the data's own columns, too, and `place`, the file and its line: this is how to
    find the pairs that the judge gets wrong.
    """
    # Ranks that share layers have the same pairs.
    scores = {int(number): own for number, *own in ranks.all_gather_objects(pairs.tolist())}
    output = Path(args.output_dir)
    if ranks.get_rank() > 0 or not output.is_dir():  # a benchmark has no folder
        return
    lines = []
    for number in sorted(scores):
        row = held_out[number]
        line = {"place": row["place"], "prompt": row["prompt"], **json.loads(row["extra"])}
        line["row"] = number
        line["chosen_score"], line["rejected_score"] = scores[number]
        line["chosen_length"], line["rejected_length"] = map(len, row["responses"])
        lines.append(json.dumps(line) + "\n")
    (output / "judge.jsonl").write_text("".join(lines))


# ---- Step 3 ----
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


def gathered(micro_batches):
    """Returns all ranks' responses, in the order of their rows, each with its metrics."""
    responses = []
    for batch in micro_batches:
        for name, values in metrics.per_response(batch).items():
            for response, value in zip(batch.responses, values.tolist()):
                response[name] = value
        responses += batch.responses
    return sorted(ranks.each_once(responses), key=lambda row: (row["row"], row["sample"]))


def report(run, step, responses, samples=1):
    """Writes the scored responses of all ranks down, shows two, and returns their means: eval_...

    responses: from `gathered`. samples: how many there are to each prompt.
    """
    append(run.args, "samples.jsonl", [line_of(each, step=step) for each in responses])
    for response in responses[::samples][:2]:
        numbers = [f"{name} {response[name]:.4g}" for name in reported(response)]
        show_sample(response, response["text"], f"  {', '.join(numbers)}")
    return means_of(responses, samples)


def line_of(response, **about):
    """Returns what samples.jsonl and tokens.jsonl say of a scored response, after `about`."""
    names = ("row", "sample", "prompt", "ended", *reported(response))
    return {**about, **{name: response[name] for name in names}, "response": response["text"]}


def reported(response):
    """Returns the names of the metrics in a scored response that an evaluation reports.

    Those that go on after reward_ are of several judges.
    """
    others = ("kl", "response_length")
    return [name for name in response if name.startswith(("reward", "gold")) or name in others]


def means_of(responses, samples):
    """Returns {eval_reward: mean, ...} of scored responses, `samples` to each prompt.

    If these are several, also the share of prompts that one of k solves, pass_at_k with k = 1, 2,
    4, ..., and its 95 % interval over the prompts, pass_at_k_ci. Where the rewards are not all 0 or
    1 it is the largest reward of k: best_of_k.
    """
    means = {name: fmean(each[name] for each in responses) for name in reported(responses[0])}
    rewards = [response.get("reward") for response in responses]
    what = "pass_at" if {*rewards} <= {0.0, 1.0} else "best_of"
    for k in [2**i for i in range(samples.bit_length())] if samples > 1 else ():
        starts = range(0, len(rewards), samples)
        values = [metrics.best_of(rewards[i : i + samples], k) for i in starts]
        means[f"{what}_{k}"] = fmean(values)
        means[f"{what}_{k}_ci"] = metrics.mean_interval(values)
    return {f"eval_{name}": value for name, value in means.items()}


# ---- Step 3's microscope ----
MOST_TOKENS = 512  # of a response that are written; the rest is left out
# name in tokens.jsonl: the tensor (B, R) of a micro-batch. The advantage is before whitening
NUMBERS = {
    "logprob": "old_logprobs",
    "ref_logprob": "ref_logprobs",
    "entropy": "entropy",
    "reward": "rewards",
    "value": "old_values",
    "return": "returns",
    "advantage": "raw_advantages",
}


def microscope_requests(args, held_out):
    """Returns this rank's share of the first --microscope rows of `held_out`, as requests.

    Where an estimator compares the responses to a prompt, each is there --samples_per_prompt times.
    """
    few = held_out.select(range(min(args.microscope, len(held_out))))
    return requests(few, args.samples_per_prompt if args.compares_groups else 1)


@torch.no_grad()
def write_microscope(run, step, micro_batches):
    """Writes tokens.jsonl: what training on the responses to `microscope_requests` would use.

    micro_batches: scored, and with advantages, as after part 5 of ppo.py. All ranks call it.
    """
    args = run.args
    for batch in micro_batches:
        note_numbers(batch, run.tokenizer)
    about = {"step": step, "kl_coef": args.kl_coef if args.kl_in == "reward" else 0.0}
    rows = gathered(micro_batches)
    lines = [{**line_of(row, **about), "tokens": row["numbers"]} for row in rows]
    append(args, "tokens.jsonl", lines)


def note_numbers(batch, tokenizer):
    """Gives each response its `numbers`: {name: list}, the tokens' texts and their NUMBERS."""
    held = {name: getattr(batch, tensor) for name, tensor in NUMBERS.items()}
    if batch.ref_logprobs is not None:
        held |= {"kl": batch.kl("k1"), "kl_k3": batch.kl("k3")}  # k1: logprob - ref_logprob
    for i, response in enumerate(batch.responses):
        ids = response["response_ids"][:MOST_TOKENS]
        # after another token: alone, some tokenizers leave out the space before a word
        ends = [tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
        response["numbers"] = {"text": [b[len(a) :] for a, b in pairwise(ends)]}
        for name, tensor in held.items():
            if tensor is not None:
                numbers = tensor[i, : len(ids)].tolist()
                response["numbers"][name] = [float(f"{number:.6g}") for number in numbers]
