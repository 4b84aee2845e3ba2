"""What a leader remembers of nodes, and the decisions about one node: values in, values out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from slurmbridge.core.settings import NodeSync
from slurmbridge.pool.drain import CORDONED, NOT_READY, is_away, our_reason
from slurmbridge.pool.nodestate import why_not_usable
from slurmbridge.pool.record import KubeNode, NodeState, SlurmNode

FLAP_S: Final = 3600.0
LONGEST_S: Final = 1800.0
MESSAGE_CHARS: Final = 256

_WORDS: Final = (
    ("REBOOT_ISSUED", "Rebooting"),
    ("REBOOT_REQUESTED", "Rebooting"),
    ("POWERED_DOWN", "PoweredDown"),
    ("POWERING_DOWN", "PoweredDown"),
    ("POWER_DOWN", "PoweredDown"),
    ("POWERING_UP", "PoweringUp"),
    ("FAIL", "Failing"),
    ("DRAIN", "Drained"),
    ("MAINTENANCE", "Maintenance"),
)


class Shown(NamedTuple):
    """The condition `SlurmReady`. status: `True` or `False`; reason: one CamelCase word."""

    status: str
    reason: str
    message: str


@dataclass(slots=True)
class NodeWatch:
    """What a leader remembers of nodes; all of it may be lost.

    read_at: beginning of the reading that was looked at last. is_due: a node of Kubernetes has
    changed since. asked: when a drain or its end was last asked for, by Slurm node; tries: whether
    it was the drain, and how often since it last came true. well: since when a node that we have
    drained gives no more cause for it. drains: when we drained it, lately. silent: since when a
    Kubernetes node is not Ready, inf while it is. seen: what is to be shown, since when. shown:
    what was written last. held: drains that the budget holds back now.
    """

    looked_at: float = 0.0
    read_at: float = 0.0
    is_due: bool = True
    minute: list[float] = field(default_factory=list)
    asked: dict[str, float] = field(default_factory=dict)
    tries: dict[str, tuple[bool, int]] = field(default_factory=dict)
    well: dict[str, float] = field(default_factory=dict)
    drains: dict[str, list[float]] = field(default_factory=dict)
    silent: dict[str, float] = field(default_factory=dict)
    seen: dict[str, tuple[Shown, float]] = field(default_factory=dict)
    shown: dict[str, tuple[Shown, float]] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()


class Pair(NamedTuple):
    """One node on both sides."""

    kube: KubeNode
    slurm: SlurmNode


def wish_of(pair: Pair, sync: NodeSync, silent_s: float) -> str:
    """Why Slurm should give the node no new jobs: `CORDONED`, `NOT_READY`, or "" for no reason.

    Args:
        pair: the node.
        sync: the policy.
        silent_s: seconds since it was last Ready; 0 when it is.

    """
    if sync.cordon and pair.kube.unschedulable:
        return CORDONED
    if sync.not_ready_s and silent_s >= sync.not_ready_s and not is_away(pair.slurm.state):
        return NOT_READY
    return ""


def patience_s(sync: NodeSync, drains: Iterable[float], now: float) -> float:
    """How long a node must have been well before a drain of ours is taken back.

    Twice as long for each drain of the last hour beyond the first, at most half an hour.
    """
    lately = sum(1 for at in drains if now - at < FLAP_S)
    return min(sync.resume_s * 2.0 ** min(max(0, lately - 1), 20), max(LONGEST_S, sync.resume_s))


def most_silent(sync: NodeSync, nodes: int) -> int:
    """How many nodes may be drained for not being Ready at a time, of a pool of so many."""
    return max(sync.at_least, int(sync.share * nodes))


def condition_of(node: SlurmNode | None, slurm_node: str, cluster: str) -> Shown:
    """What Kubernetes is shown of a node's state in Slurm; None: Slurm does not know it.

    It changes only with what keeps new jobs away for a while, not with jobs.
    """
    if node is None:
        return Shown("False", "UnknownToSlurm", f"Slurm has no node {slurm_node}")
    flags = node.state.flags - {"COMPLETING"}
    fault = why_not_usable(NodeState(node.state.base, flags))
    if fault is None:
        return Shown("True", "Usable", f"Slurm node {node.name} takes jobs")
    word = next((word for flag, word in _WORDS if flag in flags), "NotUsable")
    if node.state.base == "DOWN" and word not in ("Rebooting", "PoweredDown", "PoweringUp"):
        word = "Down"
    elif word == "Drained" and our_reason(node, cluster):
        word = "DrainedForKubernetes"
    text = f"Slurm node {node.name}: {fault}" + (f": {node.reason}" if node.reason else "")
    return Shown("False", word, text[:MESSAGE_CHARS])
