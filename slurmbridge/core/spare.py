"""What of a gang's claim no member has: GPU indices by Slurm node, or how many without numbers.

Made once for all members that are looked at together; who uses what is kept by pod, so that what a
pod says of itself does not stand in its own way.
"""

from __future__ import annotations

from collections.abc import Iterable

from slurmbridge.core.evidence import Share, place_of, read_share, written_claim
from slurmbridge.core.state import Phase, State, asked_gpus
from slurmbridge.pool import keys
from slurmbridge.pool.record import GpuUse, PodRecord, SlurmJob

NO_NUMBER = -1
"""Stands for a GPU that Slurm has not numbered."""


class _Node:
    """One node of a claim.

    numbers: its GPUs, sorted; () where `count` alone is known. users: of each numbered one.
    vague: GPUs without a number, by user.
    """

    def __init__(self, use: GpuUse) -> None:
        self.numbers = () if use.indices is None else tuple(sorted(use.indices))
        self.count = use.total if use.indices is None else len(self.numbers)
        self.users: dict[int, set[str]] = {}
        self.vague: dict[str, int] = {}
        self.closed = False

    def charge(self, uid: str, gpus: GpuUse) -> None:
        if gpus.indices is None or not self.numbers:
            self.vague[uid] = gpus.total
            return
        for number in gpus.indices:
            self.users.setdefault(number, set()).add(uid)

    def left(self, but: str) -> list[int]:
        used = sum(self.vague.values()) - self.vague.get(but, 0)
        if not self.numbers:
            return [NO_NUMBER] * (0 if self.closed else max(0, self.count - used))
        free = [n for n in self.numbers if not self.users.get(n, set()) - {but}]
        return [] if self.closed else free[used:]


class Spare:
    """What no member has or may be bound with.

    Args:
        state: the state.
        uid: of the gang's claim.
        job: it, with its GPUs.
        pods: the gang's, those with a share in the book or without; others are of no matter.

    """

    def __init__(self, state: State, uid: str, job: SlurmJob, pods: Iterable[PodRecord]) -> None:
        self._nodes = {name: _Node(use) for name, use in (job.gpus or {}).items()}
        for entry in state.entries_of(uid):
            if entry.job_id == job.id:
                self.charge(entry.slurm_node, entry.uid, entry.gpus)
        for pod in pods:
            known = state.book.get(pod.uid)
            if pod.is_over or (known is not None and known.phase is not Phase.COVERING):
                continue
            written, told = written_claim(pod), promised(pod)
            counts = asked_gpus(pod).counts
            if pod.node and written is not None and written.job_id == job.id:
                self.charge(place_of(state, pod, job), pod.uid, GpuUse(counts, written.indices))
            elif told is not None and told.job_id == job.id:
                self.charge(told.slurm_node, pod.uid, GpuUse(counts, told.indices or None))

    def charge(self, slurm_node: str, uid: str, gpus: GpuUse) -> None:
        """A pod has these GPUs; on a node that is not the claim's that is of no matter."""
        if (node := self._nodes.get(slurm_node)) is not None:
            node.charge(uid, gpus)

    def close(self, slurm_node: str) -> None:
        """Nothing of this node is to be given away."""
        self._nodes[slurm_node].closed = True

    def on(self, slurm_node: str, but: str = "") -> list[int]:
        """GPUs left on a node, lowest first; `NO_NUMBER` for each that has none.

        but: UID of a pod that does not count.
        """
        node = self._nodes.get(slurm_node)
        return [] if node is None else node.left(but)

    def left(self) -> dict[str, list[int]]:
        """All that is left, by Slurm node; nodes that are full are not in it."""
        return {name: left for name, node in self._nodes.items() if (left := node.left(""))}


def promised(pod: PodRecord) -> Share | None:
    """The share that a pod may be bound with any moment: its gate is off, and it names one."""
    if pod.node or pod.gates or pod.deleting_since is not None:
        return None
    return read_share(pod.annotations.get(keys.SHARE, ""))
