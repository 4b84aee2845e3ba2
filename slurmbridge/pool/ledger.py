"""The ledger: who owns each GPU of a node, from all that is known.

slurmctld is the only ledger that counts; this is our reading of it, made so that every doubt ends
as "not free". Three sources are united, never averaged:

- the node's own record (GresUsed). Alone it under-reports: after a slurmctld restart it showed 3
  GPUs while two jobs held 5 (Slurm 22.05.8), and it says 0 while an Epilog still runs;
- the records of all jobs on the node. Alone they miss jobs of hidden partitions;
- our own book: claims granted after the reading began, pods whose claim Slurm has ended, pods
  without a claim.

`build_node` is the only maker of a `NodeLedger`; nothing changes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from slurmbridge.pool.record import GpuCount, GpuUse, SlurmJob, SlurmNode


class GpuState(StrEnum):
    """What a GPU is to both schedulers. Only FREE may be given to anyone."""

    FREE = "free"
    NATIVE = "native"
    CLAIM = "claim"
    RELEASING = "releasing"
    HELD = "held"
    UNKNOWN = "unknown"


class GpuOwner(msgspec.Struct, frozen=True, omit_defaults=True):
    """Owner of one GPU. uid: pod UID where a claim of ours or a pod stands behind it."""

    state: GpuState
    job_id: int = 0
    uid: str = ""


FREE = GpuOwner(GpuState.FREE)


class Charge(msgspec.Struct, frozen=True):
    """GPUs that our own book holds on a node, whatever Slurm says.

    job_id 0: no Slurm job stands behind it (a pod whose claim is gone, or is being asked for).
    """

    uid: str
    gpus: GpuUse
    job_id: int = 0


class NodeLedger(msgspec.Struct, frozen=True):
    """Owners of the GPUs of one Slurm node.

    numbered: whether position i of `gpus` is GRES index i; otherwise positions only count.
    types: GPU type per position. native_jobs: ids of native jobs that hold anything here.
    conflicts: texts about GPUs that two owners seem to have: always worth an alarm.
    """

    slurm_node: str
    numbered: bool
    gpus: tuple[GpuOwner, ...]
    types: tuple[str, ...]
    cpus_free: int
    memory_free_mib: int
    native_jobs: tuple[int, ...] = ()
    conflicts: tuple[str, ...] = ()

    def free(self) -> tuple[GpuCount, ...]:
        """Free GPUs by type, in the order of the node's Gres."""
        counts: dict[str, int] = dict.fromkeys(self.types, 0)
        for owner, kind in zip(self.gpus, self.types, strict=True):
            if owner.state is GpuState.FREE:
                counts[kind] += 1
        return tuple(GpuCount(kind, n) for kind, n in counts.items())

    def in_state(self, state: GpuState) -> tuple[int, ...]:
        """Positions that are in a state, ascending."""
        return tuple(i for i, owner in enumerate(self.gpus) if owner.state is state)


def build_node(
    node: SlurmNode,
    jobs: Iterable[SlurmJob],
    claims: Mapping[int, str],
    charges: Iterable[Charge] = (),
) -> NodeLedger:
    """The ledger of one node.

    Args:
        node: its record.
        jobs: every job that is known to hold something there (finished ones are ignored).
        claims: job id -> pod UID of claims that were proved ours.
        charges: what our own book holds there; those whose job is among `jobs` add nothing.

    """
    types = tuple(g.type for g in node.gpus for _ in range(g.count))
    board = _Board(types)
    native: list[int] = []
    seen: set[int] = set()
    doubtful = False
    completing_told = False
    for job in jobs:
        if not job.state.holds_resources:
            continue
        seen.add(job.id)
        uid = claims.get(job.id, "")
        if not uid:
            native.append(job.id)
        completing = "COMPLETING" in job.state.flags
        state = GpuState.CLAIM if uid else GpuState.NATIVE
        if completing:
            state = GpuState.RELEASING
        if job.gpus is None:
            doubtful = True
            continue
        completing_told = completing_told or completing
        board.put(job.gpus.get(node.name, GpuUse()), GpuOwner(state, job.id, uid))
    for charge in charges:
        if charge.job_id and charge.job_id in seen:
            continue
        state = GpuState.CLAIM if charge.job_id else GpuState.HELD
        board.put(charge.gpus, GpuOwner(state, charge.job_id, charge.uid), ours=True)
    if node.gpus_used is None or doubtful:
        board.fill(GpuState.UNKNOWN)
    else:
        board.cover(node.gpus_used)
    if "COMPLETING" in node.state.flags and not completing_told:
        board.fill(GpuState.RELEASING)
    return NodeLedger(
        slurm_node=node.name,
        numbered=node.gpus_used is not None and node.gpus_used.indices is not None,
        gpus=board.owners(),
        types=types,
        cpus_free=max(0, node.cpus_total - node.cpus_used),
        memory_free_mib=max(0, node.memory_mib - node.memory_used_mib),
        native_jobs=tuple(sorted(native)),
        conflicts=tuple(board.conflicts),
    )


class _Board:
    """The positions of one node while they are being filled; first owner stays, doubts add up."""

    def __init__(self, types: tuple[str, ...]) -> None:
        self._types = types
        self._owner: list[GpuOwner | None] = [None] * len(types)
        self._counted: list[tuple[GpuCount, GpuOwner]] = []
        self.conflicts: list[str] = []

    def put(self, use: GpuUse, owner: GpuOwner, *, ours: bool = False) -> None:
        """Give `owner` its GPUs; by count where Slurm does not number them."""
        if use.indices is None:
            self._counted.extend((c, owner) for c in use.counts if c.count > 0)
            return
        for index in (*use.indices, *use.shared):
            if index >= len(self._owner):
                self.conflicts.append(f"GPU {index} of job {owner.job_id} is not on the node")
                continue
            other = self._owner[index]
            if other is None:
                self._owner[index] = owner
            elif not (ours and owner.job_id == 0):
                self.conflicts.append(f"GPU {index}: job {other.job_id} and job {owner.job_id}")

    def cover(self, used: GpuUse) -> None:
        """Mark what the node says is used and no known job owns."""
        self._settle()
        if used.indices is not None:
            for index in (*used.indices, *used.shared):
                if index < len(self._owner) and self._owner[index] is None:
                    self._owner[index] = GpuOwner(GpuState.HELD)
            return
        for count in used.counts:
            owned = sum(
                1
                for owner, kind in zip(self._owner, self._types, strict=True)
                if owner is not None and kind == count.type
            )
            self._take(GpuCount(count.type, count.count - owned), GpuOwner(GpuState.HELD))

    def fill(self, state: GpuState) -> None:
        """Everything without an owner gets `state`."""
        self._settle()
        self._owner = [owner or GpuOwner(state) for owner in self._owner]

    def owners(self) -> tuple[GpuOwner, ...]:
        self._settle()
        return tuple(owner or FREE for owner in self._owner)

    def _settle(self) -> None:
        counted, self._counted = self._counted, []
        for count, owner in counted:
            self._take(count, owner)

    def _take(self, count: GpuCount, owner: GpuOwner) -> None:
        """From the high end: Slurm fills from the low end, so doubts cover least there."""
        left = count.count
        for position in range(len(self._owner) - 1, -1, -1):
            if left <= 0:
                return
            fits = not count.type or count.type == self._types[position]
            if fits and self._owner[position] is None:
                self._owner[position] = owner
                left -= 1
        if left > 0 and owner.state is not GpuState.HELD:
            self.conflicts.append(f"job {owner.job_id} holds {left} GPUs more than the node has")
