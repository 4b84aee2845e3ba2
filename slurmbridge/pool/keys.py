"""Every key of the public contract, once: annotations, gate, job names.

Writers, readers and docs/annotations.md take the keys from here. Prefix: `slurmbridge.dev/`.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "slurmbridge.dev/"

# On pods, written by users.
ACCOUNT: Final = PREFIX + "account"
PARTITION: Final = PREFIX + "partition"
QOS: Final = PREFIX + "qos"
RESERVATION: Final = PREFIX + "reservation"
DURATION: Final = PREFIX + "duration"
GROUP: Final = PREFIX + "group"
GROUP_SIZE: Final = PREFIX + "group-size"
RANK: Final = PREFIX + "rank"
TOPOLOGY: Final = PREFIX + "topology"
SEGMENT: Final = PREFIX + "segment"
MODE: Final = PREFIX + "mode"

# On pods, written by us.
CLAIM: Final = PREFIX + "claim"
"""Slurm job id of the claim and the pod UID it was made for: `<job id>/<pod UID>`."""
GPUS: Final = PREFIX + "gpus"
"""GPU indices of the claim on the pod's node, as a Slurm index list: `0-3,6`; empty when Slurm
counts the GPUs of the node but does not number them."""
REASON: Final = PREFIX + "reason"
"""Why the pod waits or was stopped: one of `slurmbridge.pool.verdict.Reason` and a text."""
SHARE: Final = PREFIX + "share"
"""What of its gang's claim a pod is given, before it is bound: `<job id>/<Slurm node>/<GPUs>`."""
TOGETHER: Final = PREFIX + "together"
"""On members of a gang that were let go together, and end together: the UID of the first."""
PART: Final = PREFIX + "part"
"""On pods of a JobSet that starts one replicated Job after the other: each of these is a gang."""
WAKE: Final = PREFIX + "wake"
"""Changed on a waiting pod when it now fits: any change makes kube-scheduler try it again."""

# On nodes, written by us.
POOL: Final = PREFIX + "pool"
"""JSON, version 1; grammar in docs/annotations.md."""

SLURM_READY: Final = "SlurmReady"
"""Type of the node condition that shows the node's state in Slurm."""

GATE: Final = PREFIX + "claim"
"""The scheduling gate of the planned way (same text as the CLAIM annotation's key)."""

PLANNED: Final = PREFIX + "planned"
"""Label of a namespace whose pods get the gate (manifests/planned)."""

TAINT: Final = PREFIX + "pool"
"""Taint of pool nodes, by the site; pods with pool GPUs tolerate it (manifests/admission)."""
TRUSTED: Final = PREFIX + "trusted"
"""Label of a namespace whose pods run on every node (manifests/admission)."""

USER_KEYS: Final = frozenset(
    {
        ACCOUNT,
        PARTITION,
        QOS,
        RESERVATION,
        DURATION,
        GROUP,
        GROUP_SIZE,
        RANK,
        TOPOLOGY,
        SEGMENT,
        MODE,
    }
)
OUR_KEYS: Final = frozenset({CLAIM, GPUS, REASON, SHARE, TOGETHER, PART, WAKE, POOL})
