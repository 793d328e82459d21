"""Decides which rows of the data a step takes (--data_split)."""

import numpy as np

STAGES = ("sft", "reward", "ppo")  # in the order of --data_split


def share_of(rows, data_split, stage):
    """Returns the stage's share of the rows, in their order.

    The shares are disjoint, and do not depend on --seed: stages may be run with different ones.
    """
    order = np.random.default_rng(0).permutation(len(rows))
    ends = np.cumsum([0, *data_split]) / (sum(data_split) or 1) * len(order)
    start, end = ends.round().astype(int)[STAGES.index(stage) :][:2]
    return rows.select(np.sort(order[start:end]))
