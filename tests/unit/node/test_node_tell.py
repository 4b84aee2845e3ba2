"""Findings of the audit, as Events: each kind has a reason, and each finds its pod or its node."""

import re

import pytest

from slurmbridge.node.identity import PodFacts
from slurmbridge.node.tell import REASONS, pod_of
from slurmbridge.pool.noderecord import KINDS, NodeFinding

OLD = PodFacts("u-0", "a", "b", is_over=True)
NOW = PodFacts("u-1", "a", "b")
OTHER = PodFacts("u-2", "a", "c")
PODS = [OLD, NOW, OTHER]


def test_each_kind_of_finding_has_a_reason_of_its_own():
    assert set(REASONS) == set(KINDS)
    assert len(set(REASONS.values())) == len(KINDS)
    assert all(re.fullmatch(r"([A-Z][a-z]+)+", reason) for reason in REASONS.values())


@pytest.mark.parametrize(
    ("subject", "found"),
    [
        ("pod a/b", NOW),
        ("pod u-0", OLD),
        ("pod u-2", OTHER),
        ("pod a/gone", None),
        ("process 12", None),
        ("GPU 3", None),
        ("job 7", None),
    ],
)
def test_a_finding_stands_on_its_pod_or_on_the_node(subject, found):
    assert pod_of(NodeFinding("outside_claim", subject, "text"), PODS) is found
