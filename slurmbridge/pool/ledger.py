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

    job_id 0: no Slurm job is known to stand behind it.
    uncovered: a pod is on the node, and Slurm does not (or may soon not) hold its GPUs for it: it
    can give them to whomever it likes.
    """

    uid: str
    gpus: GpuUse
    job_id: int = 0
    uncovered: bool = False


class NodeLedger(msgspec.Struct, frozen=True):
    """Owners of the GPUs of one Slurm node.

    numbered: whether position i of `gpus` is GRES index i; otherwise positions only count.
    types: GPU type per position. native_jobs: ids of native jobs that hold anything here.
    conflicts: texts about GPUs that two owners seem to have: always worth an alarm.
    uncovered: UIDs of pods here that Slurm does not know of. While there is one, no new claim may
    be made on the node: which GPUs it gets is Slurm's choice, and it may choose the pod's.
    """

    slurm_node: str
    numbered: bool
    gpus: tuple[GpuOwner, ...]
    types: tuple[str, ...]
    cpus_free: int
    memory_free_mib: int
    native_jobs: tuple[int, ...] = ()
    conflicts: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()

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
        charges: what our own book holds there; where the pod's own claim is among `jobs` and says
            as much, a charge adds nothing.

    """
    types = tuple(g.type for g in node.gpus for _ in range(g.count))
    board = _Board(types)
    native: list[int] = []
    told: dict[int, int] = {}
    doubtful = False
    completing_told = False
    for job in jobs:
        if not job.state.holds_resources:
            continue
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
        use = job.gpus.get(node.name, GpuUse())
        told[job.id] = use.total
        board.put(use, GpuOwner(state, job.id, uid))
    uncovered: list[str] = []
    for charge in charges:
        if charge.uncovered:
            uncovered.append(charge.uid)
            board.put_uncovered(charge.gpus, GpuOwner(GpuState.HELD, 0, charge.uid))
        elif claims.get(charge.job_id) != charge.uid or (
            told.get(charge.job_id, -1) < charge.gpus.total
        ):
            state = GpuState.CLAIM if charge.job_id else GpuState.HELD
            board.add(charge.gpus, GpuOwner(state, charge.job_id, charge.uid))
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
        uncovered=tuple(uncovered),
    )


class _Board:
    """The positions of one node while they are being filled; first owner stays, doubts add up."""

    def __init__(self, types: tuple[str, ...]) -> None:
        self._types = types
        self._owner: list[GpuOwner | None] = [None] * len(types)
        self._counted: list[tuple[GpuCount, GpuOwner]] = []
        self.conflicts: list[str] = []

    def put(self, use: GpuUse, owner: GpuOwner) -> None:
        """Give a job of the reading its GPUs; by count where Slurm does not number them."""
        for index in self._numbered(use, owner):
            other = self._owner[index]
            if other is None:
                self._owner[index] = owner
            else:
                self.conflicts.append(f"GPU {index}: job {other.job_id} and job {owner.job_id}")
        self._count(use, owner)

    def add(self, use: GpuUse, owner: GpuOwner) -> None:
        """Add what the reading may not know yet. It is older, so it cannot contradict."""
        for index in self._numbered(use, owner):
            self._owner[index] = self._owner[index] or owner
        self._count(use, owner)

    def put_uncovered(self, use: GpuUse, owner: GpuOwner) -> None:
        """Add the GPUs of a pod without a claim: a job on one of them is the thing to alarm of."""
        for index in self._numbered(use, owner):
            other = self._owner[index]
            if other is None:
                self._owner[index] = owner
            elif other.uid != owner.uid and other.state in (GpuState.NATIVE, GpuState.CLAIM):
                text = f"GPU {index}: job {other.job_id} and a pod without a claim ({owner.uid})"
                self.conflicts.append(text)
        self._count(use, owner)

    def _numbered(self, use: GpuUse, owner: GpuOwner) -> Iterable[int]:
        for index in (*(use.indices or ()), *use.shared):
            if index < len(self._owner):
                yield index
            else:
                self.conflicts.append(f"GPU {index} of job {owner.job_id} is not on the node")

    def _count(self, use: GpuUse, owner: GpuOwner) -> None:
        if use.indices is None:
            self._counted.extend((c, owner) for c in use.counts if c.count > 0)
        elif use.total > len(use.indices):
            self._counted.append((GpuCount("", use.total - len(use.indices)), owner))

    def cover(self, used: GpuUse) -> None:
        """Mark what the node says is used and no known job owns."""
        self._settle()
        held = GpuOwner(GpuState.HELD)
        for index in (*(used.indices or ()), *used.shared):
            if index < len(self._owner):
                self._owner[index] = self._owner[index] or held
        if used.indices is not None:
            return
        for count in used.counts:
            owned = sum(
                1
                for owner, kind in zip(self._owner, self._types, strict=True)
                if owner is not None and count.type in ("", kind)
            )
            self._take(GpuCount(count.type, count.count - owned), held)

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
        """From the high end: Slurm fills from the low end, so doubts cover least there.

        A type that the node does not have takes any GPU: better one too many than one too few.
        """
        known = count.type in self._types
        left = count.count
        for position in range(len(self._owner) - 1, -1, -1):
            if left <= 0:
                return
            fits = not count.type or not known or count.type == self._types[position]
            if fits and self._owner[position] is None:
                self._owner[position] = owner
                left -= 1
        if left > 0 and owner.state in (GpuState.NATIVE, GpuState.CLAIM):
            self.conflicts.append(f"job {owner.job_id} holds {left} GPUs more than the node has")
