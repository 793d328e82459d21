"""Writes tokens.jsonl: all numbers of each token of a few held-out responses (--microscope)."""

from itertools import pairwise

import torch

from helpers import rollout_metrics
from machinery.run import logs

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


@torch.no_grad()
def look(run, step, rollout, set_advantages, kl_coef, score_statistics):
    """Answers the first held-out prompts as an evaluation does, and notes all that trains.

    All ranks call it. rollout: ppo.scored_rollout. set_advantages, and what it takes: part 5.
    """
    args, tokenizer = run.args, run.tokenizer
    if not args.microscope:
        return
    size = args.per_device_eval_batch_size
    micro_batches = rollout(prompts(args, run.held_out), 0, size, size)
    set_advantages(args, micro_batches, kl_coef, score_statistics)
    for batch in micro_batches:
        note(batch, tokenizer)
    penalty, lines = kl_coef if args.kl_in == "reward" else 0.0, []
    for row in rollout_metrics.gathered(micro_batches):
        line = {"step": step, "row": row["row"], "sample": row["sample"], "kl_coef": penalty}
        line |= {"prompt": row["prompt"], "response": row["text"], "ended": row["ended"]}
        line |= {name: row[name] for name in rollout_metrics.evaluated(row)}
        lines.append({**line, "tokens": row["numbers"]})
    logs.append(args, "tokens.jsonl", lines)


def prompts(args, held_out):
    """Returns this rank's share of the first --microscope rows of `held_out`.

    Where an estimator compares the responses to a prompt, each is there --samples_per_prompt times.
    """
    few = held_out.select(range(min(args.microscope, len(held_out))))
    count = args.samples_per_prompt if args.compares_groups else 1
    return rollout_metrics.held_out_prompts(few, count)


def note(batch, tokenizer):
    """Gives each response its `numbers`: {name: list}, the tokens' texts and their NUMBERS."""
    held = {name: getattr(batch, tensor) for name, tensor in NUMBERS.items()}
    held |= {"kl": batch.kl.get("k1"), "kl_k3": batch.kl.get("k3")}  # k1: logprob - ref_logprob
    for i, response in enumerate(batch.responses):
        ids = response["response_ids"][:MOST_TOKENS]
        # after another token: alone, some tokenizers leave out the space before a word
        ends = [tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
        response["numbers"] = {"text": [b[len(a) :] for a, b in pairwise(ends)]}
        for name, tensor in held.items():
            if tensor is not None:
                numbers = tensor[i, : len(ids)].tolist()
                response["numbers"][name] = [float(f"{number:.6g}") for number in numbers]
