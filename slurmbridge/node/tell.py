"""Findings of the audit as Kubernetes Events: on the pod that they are about, or the node. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from slurmbridge.node.identity import PodFacts
from slurmbridge.pool.noderecord import NodeFinding

REASONS: Final[Mapping[str, str]] = {
    "shared_gpu": "SharedGpu",
    "outside_claim": "OutsideClaim",
    "stray_process": "StrayProcess",
    "no_claim": "NoClaim",
    "loose_pod": "LoosePod",
    "ledger": "Ledger",
    "alarm": "Alarm",
}
"""Reason of the Event by kind of finding (`noderecord.KINDS`)."""
CLOSED: Final = "NodeAgentClosed"
"""Reason of the Event on a node whose map of GPUs has a fault."""


def pod_of(finding: NodeFinding, pods: Collection[PodFacts]) -> PodFacts | None:
    """The pod that a finding is about; None: it is about none that the API server has here.

    Args:
        finding: its `subject` may name a pod, as `pod <namespace>/<name>` or `pod <uid>`.
        pods: those that the API server has on this node.

    """
    what, _, name = finding.subject.partition(" ")
    if what == "pod":
        for pod in sorted(pods, key=lambda p: p.is_over):
            if name in (pod.uid, pod.ref):
                return pod
    return None
