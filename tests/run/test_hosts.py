"""Many machines: two network namespaces stand for two hosts (bench/hosts.py), each with one rank,
joined by a cable.

What a run computes must not depend on where its ranks sit. (`python bench/hosts.py` also counts
what it sends.)
"""

import pytest

from bench import hosts

pytestmark = pytest.mark.skipif(
    not hosts.can_namespace(), reason="no right to make network namespaces (root, or `unshare -n`)"
)


def test_two_hosts_give_the_losses_of_one(tmp_path):
    """ZeRO-3, so that weights cross the cable in both directions at every layer: the same losses to
    the last digit logged."""
    two, one, where = hosts.losses(tmp_path)
    assert len(two) == 5 and two == one and "10.77.0.2" in where
