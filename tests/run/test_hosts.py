"""Many machines: two network namespaces stand for two hosts (hosts.py), each with one rank, joined
by a cable.

What a run computes must not depend on where its ranks sit.
"""

import pytest

from tests import kit, runs
from tests.run import hosts

pytestmark = pytest.mark.skipif(
    not hosts.can_namespace(), reason="no right to make network namespaces (root, or `unshare -n`)"
)


@pytest.mark.slow
def test_two_hosts_give_the_numbers_of_one(tmp_path):
    """ZeRO-3, so that weights cross the cable in both directions at every layer: every metric is
    that of one host, to the last digit."""
    flags = [*runs.base_flags("sft", runs.base()), *runs.RUNS["sft_zero3"]["flags"]]
    with hosts.Hosts() as two:
        two.launch(kit.ROOT / "sft.py", *flags, "--output_dir", tmp_path / "two")
        assert min(two.sent(host) for host in (0, 1)) > 100_000  # bytes
    assert kit.metrics(tmp_path / "two", clocks=False) == runs.without_clocks("sft_zero3")
