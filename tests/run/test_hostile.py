"""A hostile user, drawn at random (hostile.py): a run keeps its promises, whatever flags, models,
rows and output folders it is given."""

import pytest

from tests.run import hostile


@pytest.mark.slow
def test_hostile_cases_keep_the_promises():
    """As many of the first cases of one seed as half a minute has room for; more by hand, with
    other seeds."""
    tried, failures = hostile.try_cases(range(60), 0, 30)
    assert tried >= 5 and not failures, "\n".join(failures)
