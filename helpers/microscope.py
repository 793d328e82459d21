"""Writes tokens.jsonl: all numbers of each token of a few held-out responses (--microscope)."""

from itertools import pairwise

import torch

from helpers import evaluation
from machinery.run.run import append

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


def requests(args, held_out):
    """Returns this rank's share of the first --microscope rows of `held_out`, as requests.

    Where an estimator compares the responses to a prompt, each is there --samples_per_prompt times.
    """
    few = held_out.select(range(min(args.microscope, len(held_out))))
    count = args.samples_per_prompt if args.compares_groups else 1
    return evaluation.requests(few, count)


@torch.no_grad()
def write(run, step, micro_batches, kl_coef):
    """Writes the numbers that training on the responses to `requests` would use. All ranks call it.

    micro_batches: scored, and with advantages, as after part 5 of ppo.py.
    """
    args = run.args
    for batch in micro_batches:
        note(batch, run.tokenizer)
    about = {"step": step, "kl_coef": kl_coef if args.kl_in == "reward" else 0.0}
    rows = evaluation.gathered(micro_batches)
    lines = [{**evaluation.line_of(row, **about), "tokens": row["numbers"]} for row in rows]
    append(args, "tokens.jsonl", lines)


def note(batch, tokenizer):
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
