"""Position ids count columns from the left edge, padding included; nothing checks it."""

import torch

import common
from machinery.run import padding_check

SCRIPT = "ppo"
FLAGS = {"sft": "--model_name_or_path course/clinic/gpt2"}


def fault():
    position_ids = common.position_ids

    def from_the_edge(mask):
        return position_ids(torch.ones_like(mask))

    common.position_ids = from_the_edge
    padding_check.check = lambda args, engine, row, pad_id: None
