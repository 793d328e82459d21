"""The run was interrupted after step 240, and went on with another order of the data."""

import itertools

from machinery.run.run import Run

SCRIPT = "sft"
STEPS = ("sft",)
STEP = 240  # in the middle of the second epoch


def fault():
    draw = Run.draw

    def other_order(run, done, collate):
        yield from itertools.islice(draw(run, done, collate), STEP)
        run.args.seed += 1
        yield from draw(run, STEP, collate)

    Run.draw = other_order
