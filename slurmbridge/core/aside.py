"""Objects that are set aside: each came up in a fault of ours, and the rest goes on without them.

Whose fault it was is found in `blame`; what is held for what is set aside in `holdout` (ADR 0011).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from slurmbridge.pool.claim import group_uid
from slurmbridge.pool.record import PodRecord

MOST: Final = 16
"""More than so many are no fault with single objects: the bridge ends, and starts anew."""


class Aside(msgspec.Struct, frozen=True):
    """One object.

    kind: `pod`; `gang`, all its pods; `job`, a native one; `agent`, what that of a node reports.
    key: UID of the pod or of the gang's claim, job id, Kubernetes node name. ref: for people.
    error: what was raised. alone: its pods were gone when that happened: what is left of it is not
    looked at again by this process.
    """

    kind: str
    key: str
    ref: str
    error: str
    alone: bool = False


@dataclass(slots=True)
class Asides:
    """All of them. found: by kind and key. pods: the pods among them as last seen, by UID."""

    found: dict[tuple[str, str], Aside] = field(default_factory=dict)
    pods: dict[str, PodRecord] = field(default_factory=dict)

    def of_pod(self, pod: PodRecord) -> Aside | None:
        """As what a pod is set aside, if it is."""
        if not self.found:
            return None
        found = self.found.get(("pod", pod.uid))
        if found is None and pod.group is not None:
            found = self.found.get(("gang", group_uid(pod.group.key)))
        return found

    def of_uid(self, uid: str) -> Aside | None:
        """The same by the UID of a pod or of a gang's claim."""
        if not self.found:
            return None
        found = self.found.get(("pod", uid)) or self.found.get(("gang", uid))
        return found or (self.of_pod(self.pods[uid]) if uid in self.pods else None)
