"""Our drains in Slurm, and how they are told from everybody else's.

A drain is ours only while its reason is, letter by letter, one that we write: Slurm keeps one
reason a node, and whoever drains it, or adds to the reason (an operator, a health check, slurmctld
itself), has made the drain his. Ours are never taken back under such a reason.

What scontrol does (22.05.8, measured): a second `State=DRAIN` replaces the reason; `State=UNDRAIN`
leaves DOWN as it is, takes the reason away with the last of DRAIN, FAIL and DOWN, and clears FAIL
too, so that a node that is failing must not be undrained; the node is NOT_RESPONDING until the next
ping.
"""

from __future__ import annotations

import re
from typing import Final

from slurmbridge.pool.claim import CLUSTER_RE
from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.record import NodeState, SlurmNode

CORDONED: Final = "cordoned"
NOT_READY: Final = "not ready"

_NODE_RE: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_OURS: Final = re.compile(
    r"slurmbridge: cluster (?P<cluster>[a-z0-9-]{1,40}): node (?P<node>[a-z0-9.-]{1,253}) is"
    r" (?P<why>cordoned|not ready)(?: \[[^\[\]]{1,128}\])?"
)
_AWAY: Final = frozenset(
    {
        "POWERED_DOWN",
        "POWERING_DOWN",
        "POWERING_UP",
        "POWER_DOWN",
        "POWER_UP",
        "REBOOT_ISSUED",
        "REBOOT_REQUESTED",
    }
)


def write_reason(cluster: str, kube_node: str, why: str) -> str:
    """The reason of a drain of ours.

    Args:
        cluster: `Policy.cluster`: two clusters on one Slurm leave each other's drains alone.
        kube_node: the Kubernetes node.
        why: `CORDONED` or `NOT_READY`.

    Raises:
        ParseError: a part is not in Kubernetes' form.

    """
    if not CLUSTER_RE.fullmatch(cluster) or not _NODE_RE.fullmatch(kube_node):
        raise ParseError(f"{cluster} {kube_node}", "not a cluster id and a node name")
    return f"slurmbridge: cluster {cluster}: node {kube_node} is {why}"


def our_reason(node: SlurmNode, cluster: str) -> str:
    """Why we have drained a node (`CORDONED`, `NOT_READY`); "": its reason is not one of ours.

    Slurm shows a reason with its author and time behind it, in square brackets.
    """
    match = _OURS.fullmatch(node.reason)
    return match["why"] if match is not None and match["cluster"] == cluster else ""


def may_drain(node: SlurmNode) -> bool:
    """Whether a drain of ours would change something and take nothing from anybody.

    Not where it is drained, failing or down already, whoever did it: our reason would replace
    theirs. Not while Slurm itself has it powered down or rebooting: a drained node is never
    powered up again.
    """
    return node.state.base != "DOWN" and not node.state.flags & {"DRAIN", "FAIL", *_AWAY}


def is_drained(node: SlurmNode) -> bool:
    """Whether somebody has drained a node: Slurm gives its GPUs to nobody."""
    return "DRAIN" in node.state.flags


def may_resume(node: SlurmNode, cluster: str) -> bool:
    """Whether a node is drained by us and by nobody else."""
    return (
        is_drained(node)
        and "FAIL" not in node.state.flags
        and not {"REBOOT_ISSUED", "REBOOT_REQUESTED"} & node.state.flags
        and bool(our_reason(node, cluster))
    )


def is_away(state: NodeState) -> bool:
    """Whether Slurm itself has stopped or is starting the node: no wonder it is not Ready."""
    return bool(state.flags & _AWAY)
