"""The run was interrupted after step 20, and went on with another order of the data."""

import itertools

from machinery.data import batching
from machinery.run.run import Run

SCRIPT = "ppo"
STEP = 20


def fault():
    draw, epoch_batches, resumed = Run.draw, batching.epoch_batches, []

    def ordered(lengths, seed, *others):
        return epoch_batches(lengths, seed + len(resumed), *others)

    def other_order(run, done, collate):
        yield from itertools.islice(draw(run, done, collate), STEP)
        resumed.append(True)
        yield from draw(run, STEP, collate)

    batching.epoch_batches, Run.draw = ordered, other_order
