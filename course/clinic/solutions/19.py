"""Scoring gives rows that are padded on the left no position ids."""

import torch

import ppo

SCRIPT = "ppo"


def fault():
    plain_rows = ppo.plain_rows

    def counted_from_the_edge(responses, pad_id):
        layout = plain_rows(responses, pad_id)
        layout.positions = torch.arange(layout.ids.shape[1]).expand_as(layout.ids)
        return layout

    ppo.plain_rows = counted_from_the_edge
    ppo.checks.stop_unless_sampled_as_scored = lambda run, micro_batches: None
