"""Position ids count columns from the left edge, padding included; nothing checks it."""

import torch

import common
from helpers import checks

SCRIPT = "ppo"
FLAGS = {"sft": "--model_name_or_path course/clinic/gpt2"}


def fault():
    position_ids = common.position_ids

    def from_the_edge(mask):
        return position_ids(torch.ones_like(mask))

    common.position_ids = from_the_edge
    checks.refuse_if_padding_matters = lambda run, *engines: None
