"""Who scores the responses: reward models, and the user's own functions.

A judge takes a micro-batch and returns scores (B, R). Functions are called beforehand, once for all
responses of a rollout, so that one with a pool of processes, or with requests to send, can work on
all of them at once.
"""

from pathlib import Path

import torch

import common
from helpers.functions import load_function, scores_of
from machinery.flags import declaring


# ---- Reward models ----
def load_models(args, batch_size, tokenizer):
    """Returns the frozen reward models of --reward_model_name_or_path, with the critic's flags."""
    models, critic_args = [], declaring.of_role(args, "critic")
    for path in args.reward_model_name_or_path:
        judge_args = declaring.with_flags(critic_args, model_name_or_path=path)
        models.append(common.frozen_engine(judge_args, batch_size, tokenizer, "score"))
    return models


def combined(args, judges):
    """Returns one judge in place of several: it adds their scores up.

    It also notes what each says in the response dicts.
    """
    names = names_of(args)

    def scores_of_all(batch):
        scores = torch.stack([judge(batch) for judge in judges])  # (judges, B, R)
        for name, each in zip(names, scores.sum(-1).tolist()) if len(judges) > 1 else ():
            for response, score in zip(batch.responses, each):
                response[name] = score
        return scores.sum(0)

    return scores_of_all


def names_of(args):
    """Returns what metrics call the scores of each judge: reward_1_NAME, ...; of one: reward."""
    judges = [*args.reward_fn, *args.reward_model_name_or_path]
    names = [Path(judge.rpartition(":")[2]).name for judge in judges]
    return [f"reward_{i}_{n}" for i, n in enumerate(names, 1)] if len(names) > 1 else ["reward"]


# ---- Functions of the user's ----
def load_functions(args):
    """Returns {name: function} of --reward_fn, by `names_of`, and of --gold_fn as "gold"."""
    named = zip(names_of(args), args.reward_fn)
    functions = {name: load_function(spec, "--reward_fn") for name, spec in named}
    gold = {"gold": load_function(args.gold_fn, "--gold_fn")} if args.gold_fn else {}
    return functions | gold


@torch.no_grad()  # a function may have a model of its own
def call_functions(functions, responses):
    """Calls each function once, for all of this rank's responses, and notes what it says of them.

    functions: from `load_functions`. responses: dicts; response["said"][name] becomes a list, as
    `scores_of` returns it. What is said as a dict of parts is also noted as NAME_PART.
    """
    for name, function in functions.items():
        for response, score in zip(responses, scores_of(function, responses, name)):
            response["said"] = {**response.get("said", {}), name: score}


def said(batch, name):
    """Returns the scores (B, R) that a function gave a micro-batch; a filler's are 0.

    One number for a response is placed on its last token; of a list, each number on its token.
    batch: .responses, a list of B dicts, .response_mask and .last, (B, R).
    """
    scores = torch.zeros(batch.response_mask.shape)
    last = batch.last.cpu()
    for i, (whole, *tokens) in enumerate(response["said"][name] for response in batch.responses):
        scores[i, : len(tokens)] = torch.tensor(tokens)
        scores[i] += whole * last[i]
    return (scores * (batch.response_mask.cpu() > 0)).to(batch.response_mask.device)
