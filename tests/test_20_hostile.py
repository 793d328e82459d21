"""A hostile user, drawn at random (tests/hostile.py): whatever is typed, found damaged or lying in
the way, a run ends with exit code 0, 1 or 2 and one message, and loses nothing.

Here the first cases of one seed, for a minute and a half; more by hand, with other seeds.
docs/reliability.md says how many were tried, and what was found.
"""

import sys

import pytest

from tests import workers


@pytest.mark.slow
def test_hostile_cases_keep_the_promises(tmp_path):
    """The output names each case that does not, with the command that repeats it."""
    command = [sys.executable, workers.ROOT / "tests/hostile.py", "--seconds", 90]
    code, log = workers.start_command([*map(str, command)], tmp_path)
    assert code == 0 and ", 0 wrong" in log, log[-9000:]
