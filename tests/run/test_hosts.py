"""Many machines: two network namespaces stand for two hosts (bench/hosts.py), each with one rank,
joined by a cable.

What a run computes must not depend on where its ranks sit; what it sends is what the theory of ZeRO
says, or we say why not.
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


def test_bytes_sent_are_those_of_the_theory(tmp_path):
    """On 2 ranks psi bytes of weights cost (N - 1) / N = 1/2 of 2 psi at stage 0 and with one root
    a bucket, of 3 psi else.

    Stages 1 and 2 send 3 psi in place of the paper's 2 because DeepSpeed all-reduces buckets that
    several ranks share, and then gathers the weights; stage 3 a little less than 3, because the
    last layers need not be gathered again for the backward.
    """
    found = hosts.count_bytes(tmp_path)[0]
    sent = {name: hosts.sent_by_log(f["ops"]) / f["psi"] for name, f in found.items()}
    assert sent == pytest.approx(
        {"0": 1.0, "1": 1.5, "2": 1.5, "2, one root a bucket": 1.0, "3": 1.5}, abs=0.15
    )
    # the kernel's count agrees
    assert found["0"]["wire"] / found["0"]["psi"] == pytest.approx(1.0, abs=0.15)
    assert found["2"]["wire"] / found["2"]["psi"] == pytest.approx(1.5, abs=0.15)
