"""How to get a claim on exactly given GPUs of a node, one step at a time: pure.

Slurm cannot be asked for GPU indices, and which free ones it picks depends on the site: the lowest
first, or from each socket in turn where gres.conf binds GPUs to cores (seen on 22.05). So nothing
is assumed about its order. Fillers of one GPU each take everything that is free beside the wanted
GPUs; then a claim of the right size can only get the wanted ones. Where fillers had to take wanted
GPUs on the way, the claim is queued at top priority *before* those are released, so that no native
job can come in between.

The plan is made anew from what slurmctld shows after each step: a filler that nobody remembers, a
job that ended meanwhile, a step that failed half-way need no case of their own.
"""

from __future__ import annotations

import msgspec

from slurmbridge.pool.record import SlurmJob

GpuSet = frozenset[int]


class Held(msgspec.Struct, frozen=True):
    """A filler: what it holds (empty while it waits in Slurm's queue).

    is_take: it was made with all that the pod asks for and may become the claim.
    """

    job_id: int
    gpus: GpuSet
    is_pending: bool = False
    is_take: bool = False


class NodeGpus(msgspec.Struct, frozen=True):
    """The GPUs of one node as a cover sees them.

    total: indices of all GPUs. others: held by jobs that stay. leaving: held by jobs that are
    ending; while there is one, Slurm starts nothing on the node. is_unknown: a job holds GPUs
    there that Slurm does not number.
    """

    total: GpuSet
    others: GpuSet = frozenset()
    leaving: GpuSet = frozenset()
    is_leaving: bool = False
    is_unknown: bool = False
    fillers: tuple[Held, ...] = ()

    @property
    def free(self) -> GpuSet:
        """Held by nobody."""
        mine = frozenset[int]().union(*(filler.gpus for filler in self.fillers))
        return self.total - self.others - self.leaving - mine


class Lost(msgspec.Struct, frozen=True):
    """The wanted GPUs cannot be had: others hold some, or the node has no such index."""

    gpus: GpuSet


class Wait(msgspec.Struct, frozen=True):
    """Something is on its way: look again."""

    why: str


class Fill(msgspec.Struct, frozen=True):
    """Ask for `least` fillers of one GPU; if they must queue, for `most`, to leave no gap."""

    least: int
    most: int


class Release(msgspec.Struct, frozen=True):
    """End these fillers."""

    job_ids: tuple[int, ...]


class Take(msgspec.Struct, frozen=True):
    """Ask for the claim: at once when `release` is empty, else queue it and then end those."""

    release: tuple[int, ...] = ()


class Promote(msgspec.Struct, frozen=True):
    """The filler holds exactly the wanted GPUs: make it the claim."""

    job_id: int


Step = Lost | Wait | Fill | Release | Take | Promote


def next_step(node: NodeGpus, want: GpuSet) -> Step:
    """The next step towards a claim on exactly `want`.

    Args:
        node: the node now; after each step it is read again.
        want: GPU indices, not empty.

    """
    if lost := want & node.others or want - node.total:
        return Lost(lost)
    for filler in node.fillers:
        if filler.is_take and filler.gpus == want:
            return Promote(filler.job_id)
    if node.is_unknown:
        return Wait("a job holds GPUs that Slurm does not number")
    running = [filler for filler in node.fillers if not filler.is_pending]
    takes = [filler for filler in node.fillers if filler.is_pending and filler.is_take]
    queued = [filler for filler in node.fillers if filler.is_pending and not filler.is_take]
    # Got other GPUs than hoped for: in the way when it holds any wanted one, a filler otherwise.
    mixed = tuple(filler.job_id for filler in running if filler.gpus & want and filler.gpus - want)
    if mixed:
        return Release(mixed)
    blocking = tuple(filler.job_id for filler in running if filler.gpus & want)
    if takes:
        if len(takes) > 1:
            return Release(tuple(filler.job_id for filler in takes[1:]))
        if blocking and not node.is_leaving:
            return Release(blocking)
        return Wait("the claim is queued")
    if node.is_leaving:
        # Slurm starts nothing here meanwhile, and does not tell which GPUs will be free.
        return Wait("jobs are ending on the node")
    surplus = node.free - want
    if surplus:
        missing = len(surplus) - len(queued)
        if missing <= 0:
            return Wait("fillers are queued")
        return Fill(missing, max(missing, len(node.free) - len(queued)))
    if queued:
        # Beside the claim they would compete for what is released.
        return Release(tuple(filler.job_id for filler in queued))
    return Take(blocking)


def node_gpus(
    name: str,
    gpu_total: int,
    jobs: list[SlurmJob],
    fillers: frozenset[int],
    takes: frozenset[int],
) -> NodeGpus:
    """The GPUs of a node from slurmctld's jobs.

    Args:
        name: Slurm node name.
        gpu_total: GPUs of all types on the node; their indices are 0 to gpu_total - 1.
        jobs: all jobs that hold the node, and our queued fillers.
        fillers: ids of those that are fillers of ours.
        takes: ids of the fillers that may become the claim.

    """
    others: GpuSet = frozenset()
    leaving: GpuSet = frozenset()
    is_leaving = is_unknown = False
    held: list[Held] = []
    for job in jobs:
        if job.state.base == "PENDING" and "COMPLETING" not in job.state.flags:
            if job.id in fillers:
                held.append(Held(job.id, frozenset(), is_pending=True, is_take=job.id in takes))
            continue
        if not job.state.holds_resources or name not in job.nodes:
            continue
        use = None if job.gpus is None else job.gpus.get(name)
        indices = _indices(job, name)
        gpus = frozenset(indices or ()) | frozenset(() if use is None else use.shared)
        if "COMPLETING" in job.state.flags:
            leaving |= gpus  # most often nothing: Slurm tells no indices of these any more
            is_leaving = True
        elif indices is None:
            is_unknown = True
        elif job.id in fillers:
            held.append(Held(job.id, gpus, is_take=job.id in takes))
        else:
            others |= gpus
    return NodeGpus(
        total=frozenset(range(gpu_total)),
        others=others,
        leaving=leaving - others,
        is_leaving=is_leaving,
        is_unknown=is_unknown,
        fillers=tuple(held),
    )


def _indices(job: SlurmJob, name: str) -> tuple[int, ...] | None:
    """Indices of a job on a node; () when it has no GPUs there, None when they are not known."""
    if job.gpus is None:
        return None
    use = job.gpus.get(name)
    if use is None:
        return ()
    return use.indices if use.indices is not None else (None if use.total else ())
