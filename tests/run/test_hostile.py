"""A hostile user, drawn at random (hostile.py): a run keeps its promises, whatever flags, models,
rows and output folders it is given."""

import pytest

from tests.run import hostile


@pytest.mark.slow
def test_hostile_cases_keep_the_promises():
    """The first cases of one seed; more by hand, with other seeds."""
    tried, failures = hostile.try_cases(range(60), 0, 30)
    assert tried and not failures, "\n".join(failures)
