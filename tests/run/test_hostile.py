"""A hostile user, drawn at random: whatever flags, models, rows and output folders a run is given, it
keeps what it promises."""

import pytest

from bench import hostile


@pytest.mark.slow
def test_hostile_cases_keep_the_promises():
    """The first cases of one seed; more by hand, with other seeds."""
    tried, failures = hostile.try_cases(range(60), 0, 60)
    assert tried and not failures, "\n".join(failures)
