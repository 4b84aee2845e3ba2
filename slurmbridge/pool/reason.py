"""Why a pod may not go to a node: the closed set of reasons, their codes and their texts.

A text goes into the pod's condition through kube-scheduler, which joins nodes of the same text
(`12 slurmbridge: not enough free GPUs`) and tries a refused pod again whenever the text changes:
so texts are short, the same for every node of a class, and hold no counter, no time and no name
(but that of the reservation that the pod itself has named).
The reason itself is the label in metrics and logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple


class Reason(StrEnum):
    """One class of refusal. The order is the order of the codes; new ones go to the end."""

    SLURM_STATE = "slurm_state"
    UNKNOWN_NODE = "unknown_node"
    CEILING = "ceiling"
    NO_AGENT = "no_agent"
    GPU_TYPE = "gpu_type"
    GPU_TOTAL = "gpu_total"
    OUTSIDE_RESERVATION = "outside_reservation"
    GPU_BUSY = "gpu_busy"
    CPU_BUSY = "cpu_busy"
    MEMORY_BUSY = "memory_busy"
    NATIVE_ON_NODE = "native_on_node"
    RESERVED = "reserved"
    PLANNED = "planned"
    CLAIMED_ELSEWHERE = "claimed_elsewhere"
    NO_PLAN = "no_plan"
    REQUEST = "request"
    ANNOTATION = "annotation"
    IDENTITY = "identity"
    DURATION = "duration"
    STALE = "stale"
    BLIND = "blind"
    SLURM_SILENT = "slurm_silent"
    GPU_COUNT = "gpu_count"
    GPU_FAULT = "gpu_fault"
    OUTSIDE_PARTITION = "outside_partition"
    RESERVATION_DENIED = "reservation_denied"

    @property
    def text(self) -> str:
        """What people are told."""
        return ABOUT[self].text


class About(NamedTuple):
    """What there is to say of a reason.

    text: for people. evictable: evicting Kubernetes pods from the node could cure it.
    """

    text: str
    evictable: bool = False


ABOUT: Final[Mapping[Reason, About]] = {
    Reason.SLURM_STATE: About("slurmbridge: node is not usable in Slurm"),
    Reason.UNKNOWN_NODE: About("slurmbridge: node is unknown to Slurm"),
    Reason.CEILING: About("slurmbridge: Kubernetes share of the node group is used up", True),
    Reason.NO_AGENT: About("slurmbridge: no live node agent"),
    Reason.GPU_TYPE: About("slurmbridge: no GPU of the type asked for"),
    Reason.GPU_TOTAL: About("slurmbridge: fewer GPUs than asked for"),
    Reason.OUTSIDE_RESERVATION: About("slurmbridge: not in the Slurm reservation asked for"),
    Reason.GPU_BUSY: About("slurmbridge: not enough free GPUs", True),
    Reason.CPU_BUSY: About("slurmbridge: not enough free CPUs in Slurm", True),
    Reason.MEMORY_BUSY: About("slurmbridge: not enough free memory in Slurm", True),
    Reason.NATIVE_ON_NODE: About("slurmbridge: Slurm jobs run on the node"),
    Reason.RESERVED: About("slurmbridge: reserved in Slurm"),
    Reason.PLANNED: About("slurmbridge: planned for a pending Slurm job"),
    Reason.CLAIMED_ELSEWHERE: About("slurmbridge: the pod's claim is on another node"),
    Reason.NO_PLAN: About("slurmbridge: the pod waits for its claim"),
    Reason.REQUEST: About("slurmbridge: GPU request cannot be served"),
    Reason.ANNOTATION: About("slurmbridge: annotation is not valid"),
    Reason.IDENTITY: About("slurmbridge: Slurm identity is not allowed"),
    Reason.DURATION: About("slurmbridge: duration is longer than allowed"),
    Reason.STALE: About("slurmbridge: state of the pool is too old, trying again"),
    Reason.BLIND: About("slurmbridge: state of the pool is not known, trying again"),
    Reason.SLURM_SILENT: About("slurmbridge: Slurm does not answer"),
    Reason.GPU_COUNT: About("slurmbridge: node has more GPUs in Kubernetes than in Slurm"),
    Reason.GPU_FAULT: About("slurmbridge: a free GPU of the node is faulty"),
    Reason.OUTSIDE_PARTITION: About("slurmbridge: not in the Slurm partition asked for"),
    Reason.RESERVATION_DENIED: About("slurmbridge: may not use the Slurm reservation asked for"),
}

PASSES: Final = 0
"""The code of no reason: the pod may go there."""
REASONS: Final[tuple[Reason | None, ...]] = (None, *Reason)
"""The reason of each code; `REASONS[PASSES]` is None."""
CODES: Final[Mapping[Reason, int]] = {reason: code for code, reason in enumerate(Reason, start=1)}
"""The code of each reason, 1 <= code <= 127 (int8)."""
TEXTS: Final[tuple[str, ...]] = ("", *(ABOUT[reason].text for reason in Reason))
"""The text of each code."""


def texts_for(reservation: str) -> tuple[str, ...]:
    """`TEXTS` for a pod that has named a reservation, with its name; "": as they are."""
    if not reservation:
        return TEXTS
    named = {CODES[Reason.OUTSIDE_RESERVATION], CODES[Reason.RESERVATION_DENIED]}
    return tuple(f"{t}: {reservation}" if code in named else t for code, t in enumerate(TEXTS))


_BLOCKED: Final[Mapping[str, Reason]] = {
    "unknown to Slurm": Reason.UNKNOWN_NODE,
    Reason.UNKNOWN_NODE: Reason.UNKNOWN_NODE,
    Reason.CEILING: Reason.CEILING,
    Reason.NO_AGENT: Reason.NO_AGENT,
    Reason.GPU_COUNT: Reason.GPU_COUNT,
    Reason.GPU_FAULT: Reason.GPU_FAULT,
}


def blocked_code(blocked: str) -> int:
    """The code of a `NodeView.blocked` text: `PASSES` when empty, never when not."""
    if not blocked:
        return PASSES
    return CODES[_BLOCKED.get(blocked, Reason.SLURM_STATE)]
