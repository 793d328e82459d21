"""Loads the reward models of step 3, and makes one judge of several.

A judge takes a micro-batch and returns scores (B, R).
"""

import torch

import common
from machinery.flags import declaring


def load_models(args, batch_size, tokenizer):
    """Returns the frozen reward models of --reward_model_name_or_path, with the critic's flags."""
    models = []
    for path in args.reward_model_name_or_path:
        judge_args = declaring.of_role(args, "critic", model_name_or_path=path)
        models.append(common.frozen_engine(judge_args, batch_size, tokenizer, "score"))
    return models


def combined(judges, way):
    """Returns one judge in place of several: --reward_combine.

    way: "sum", or "min": of the judge with the smallest sum over the response.
    """

    def scores_of_all(batch):
        scores = torch.stack([judge(batch) for judge in judges])  # (judges, B, R)
        if way == "sum":
            return scores.sum(0)
        harshest = scores.sum(-1).argmin(0)  # (B,)
        return scores[harshest, torch.arange(len(harshest))]

    return scores_of_all
