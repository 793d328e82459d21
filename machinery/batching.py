"""Which rows each optimizer step and each evaluation take, the same on any number of ranks."""

import numpy as np

from machinery import ranks


class Rows:
    """Rows by number. A negative number is a filler: row 0 again, with row_weight 0."""

    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, i):
        row = self.rows[max(i, 0)]
        return {**row, "row": i, "row_weight": row.get("row_weight", 1) * (i >= 0)}


def epoch_batches(lengths, seed, epoch, batch_size, micro_steps, group_by_length):
    """This rank's micro-batches of one epoch (lists of row numbers), `micro_steps` per step.

    The rows of each optimizer step depend on (seed, epoch) and on how many rows a step takes, not
    on ranks and micro-batches: they do not change with the number of GPUs. A short last step is
    filled up with -1, so that every rank makes the same number of forwards.
    """
    rank, share = ranks.data_parallel_rank(), ranks.data_parallel_size() * batch_size
    rng = np.random.default_rng([seed, epoch])
    size = share * micro_steps
    order = rng.permutation(len(lengths))  # a curriculum's goes here (--group_by_length 0)
    if group_by_length:  # sort within windows of 32 steps, then shuffle the steps: like lengths
        windows = [order[i : i + 32 * size] for i in range(0, len(order), 32 * size)]
        order = np.concatenate([w[np.argsort(-lengths[w], kind="stable")] for w in windows])
    steps = [order[i : i + size] for i in range(0, len(order), size)]
    if group_by_length:
        steps = [steps[i] for i in rng.permutation(len(steps))]
    batches = []
    for rows in steps:
        rows = rows[np.argsort(-lengths[rows], kind="stable")].tolist()
        rows += [-1] * (size - len(rows))
        for start in range(rank * batch_size, size, share):
            batches.append(rows[start : start + batch_size])
    return batches


def eval_loader(args, rows, collate):
    """Yields this rank's batches of `rows`, in order, each with the numbers of its rows.

    All ranks make the same number of forwards: fillers (-1) complete the last batches.
    """
    size = min(args.per_device_eval_batch_size, len(rows))
    share = ranks.data_parallel_size() * size  # as in epoch_batches
    order = [*range(len(rows))] + [-1] * (-len(rows) % share)
    starts = range(ranks.data_parallel_rank() * size, len(order), share)
    for start in ranks.shown(starts, "evaluation"):
        part = order[start : start + size]
        yield part, collate([Rows(rows)[i] for i in part]).to(ranks.device())
