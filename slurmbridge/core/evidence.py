"""What a reading and the pods' annotations say of claims: look-ups, nothing is changed here."""

from __future__ import annotations

from typing import NamedTuple

from slurmbridge.core.state import Entry, Phase, State, is_live, is_running
from slurmbridge.pool import keys
from slurmbridge.pool.claim import Claim
from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.gres import parse_indices
from slurmbridge.pool.record import GpuUse, PodRecord, SlurmJob


class Written(NamedTuple):
    """What a pod's annotations say of its claim. indices None: not numbered, or not readable."""

    job_id: int
    indices: tuple[int, ...] | None


def written_claim(pod: PodRecord) -> Written | None:
    """The claim that a pod was bound with; None: it says none, or not one of its own."""
    job_id, _, owner = pod.annotations.get(keys.CLAIM, "").partition("/")
    if owner != pod.uid or not job_id.isascii() or not job_id.isdigit():
        return None
    try:
        indices = parse_indices(pod.annotations.get(keys.GPUS, "")) or None
    except ParseError:
        indices = None
    return Written(int(job_id), indices)


def live_claims(state: State, uid: str) -> list[SlurmJob]:
    """The pod's claims in the last reading that nobody has ended, running ones first, by id."""
    jobs = [j for j in state.live.get(uid, ()) if j.id not in state.ending]
    return sorted(jobs, key=lambda j: (not is_running(j), j.id))


def use_of(job: SlurmJob, slurm_node: str) -> GpuUse | None:
    """What a job holds on a node; None: not known, or nothing."""
    return None if job.gpus is None else job.gpus.get(slurm_node)


def fits(entry: Entry, job: SlurmJob) -> bool:
    """Whether a job covers exactly the GPUs that are charged to a pod."""
    use = use_of(job, entry.slurm_node)
    if use is None or not is_running(job):
        return False
    if entry.gpus.indices is None or use.indices is None:
        return use.total >= entry.gpus.total
    return use.indices == entry.gpus.indices


def is_outdated(state: State, claim: Claim) -> bool:
    """Whether what we know from after a grant contradicts it: slurmctld has forgotten it since."""
    uid = claim.id.uid
    other = state.book.get(state.by_job.get(claim.job_id, uid))
    if other is not None and other.uid != uid and other.sure_at > claim.granted:
        return True
    if state.snapshot is None or state.snapshot.began <= claim.granted:
        return False
    job = state.snapshot.jobs.get(claim.job_id)
    return job is None or not state.is_claim_of(job, uid) or not is_live(job)


def others_on(state: State, entry: Entry, gpus: GpuUse) -> bool:
    """Whether GPUs that Slurm chose for a pod may still be used by another.

    Slurm knows nothing of a pod whose claim it has ended or forgotten, and gives its GPUs away.
    """
    given = set(gpus.indices or ())
    for other in state.by_node.get(entry.slurm_node, {}).values():
        if other is entry or other.phase in (Phase.ASKING, Phase.DOUBT, Phase.QUEUED):
            continue
        if given & set(other.gpus.indices or ()):
            return True
        if other.is_uncovered and given and other.gpus.indices is None:
            return True
    return False
