"""Promises hold late in a run, too: what is only tested at its first steps may break at the tenth.

DeepSpeed's Adam on a CPU showed it: a run that was resumed differed in the last bit, but not before
its sixth step (machinery/patches.py, correct_by_step_number).
"""

import pytest

from tests import kit, runs


def after(name, step):
    """Returns the metrics of a run's steps after `step`, without clocks."""
    lines = kit.metrics(runs.run_of(name), clocks=False)
    return [line for line in lines if line["step"] > step]


@pytest.mark.slow
@pytest.mark.parametrize("step", runs.LATE_STEPS)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("script", kit.SCRIPTS)
def test_a_run_goes_on_to_the_bit_also_late(script, stage, step):
    """Seven steps after each checkpoint every metric is that of the run that was left alone; after
    the last one also every weight, of all the models that the run saves."""
    whole, resumed = f"{script}_late{stage}", f"{script}_late{stage}_{step}"
    expected, found = after(whole, step)[:7], after(resumed, step)
    for line in (expected[-1], found[-1]):  # the last step of the shorter run evaluates
        for name in [name for name in line if name.startswith("eval_")]:
            del line[name]
    assert len(found) == 7 and found == expected
    if step == max(runs.LATE_STEPS):
        assert kit.outcome(runs.run_of(resumed)) == kit.outcome(runs.run_of(whole))
