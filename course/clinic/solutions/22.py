"""Position ids count columns from the left edge, padding included."""

import torch

import common

SCRIPT = "ppo"
FLAGS = {"sft": "--model_name_or_path course/clinic/gpt2"}


def fault():
    def from_the_edge(mask):
        columns = torch.arange(mask.shape[-1], device=mask.device)
        return columns.repeat(len(mask), 1)

    common.position_ids = from_the_edge
