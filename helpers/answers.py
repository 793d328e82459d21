"""Step 1 answers a few held-out prompts, greedily (--num_samples), and writes samples.jsonl."""

import torch
from transformers import GenerationConfig

import common
from helpers import functions
from machinery.base import ranks
from machinery.data.tokens import keep_end, tokenise_response
from machinery.engine import zero3
from machinery.run.run import append, show_sample


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
        golds = graded(gold, rows, [answer["response"] for answer in answers], tokenizer)
        lines = [{**line, "gold": score} for line, score in zip(lines, golds)]
    append(run.args, "samples.jsonl", lines)
    return {"eval_gold": sum(golds) / len(golds)} if gold else {}


def graded(function, rows, texts, tokenizer):
    """Returns the score that the function of --gold_fn gives to each response, as in step 3."""
    pairs = zip(rows, texts)
    made = [{**row, "text": t, "response_ids": tokenise_response(tokenizer, t)} for row, t in pairs]
    return [sum(score) for score in functions.scores_of(function, made)]


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
