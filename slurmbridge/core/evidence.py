"""What a reading and the pods' annotations say of claims: look-ups, nothing is changed here."""

from __future__ import annotations

from typing import NamedTuple

from slurmbridge.core.state import Entry, Phase, State, is_live, is_running
from slurmbridge.pool import keys
from slurmbridge.pool.claim import Claim, ClaimId, group_uid
from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.gres import format_indices, parse_indices
from slurmbridge.pool.record import GpuUse, PodRecord, SlurmJob

MOST_DIGITS = 10
"""Of a job id."""


class Written(NamedTuple):
    """What a pod's annotations say of its claim. indices None: not numbered, or not readable."""

    job_id: int
    indices: tuple[int, ...] | None


def written_claim(pod: PodRecord) -> Written | None:
    """The claim that a pod was bound with; None: it says none, or not one of its own."""
    job_id, _, owner = pod.annotations.get(keys.CLAIM, "").partition("/")
    if owner != pod.uid or not _is_job_id(job_id):
        return None
    try:
        indices = parse_indices(pod.annotations.get(keys.GPUS, "")) or None
    except ParseError:
        indices = None
    return Written(int(job_id), indices)


class Share(NamedTuple):
    """A pod's share of its gang's claim, when its gate came off. indices (): not numbered."""

    job_id: int
    slurm_node: str
    indices: tuple[int, ...]


def write_share(entry: Entry) -> str:
    """The value of `slurmbridge.dev/share`: `<job id>/<Slurm node>/<GPU indices>`."""
    return f"{entry.job_id}/{entry.slurm_node}/{format_indices(entry.gpus.indices or ())}"


def read_share(text: str) -> Share | None:
    """The share that a pod names; None: it names none."""
    job_id, _, rest = text.partition("/")
    node, _, indices = rest.partition("/")
    if not node or not _is_job_id(job_id):
        return None
    try:
        return Share(int(job_id), node, parse_indices(indices))
    except ParseError:
        return None


def _is_job_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS


def plausible_indices(pod: PodRecord, written: Written | None) -> tuple[int, ...] | None:
    """The GPUs that a pod says it has, if they are as many as it asks for: it can say anything."""
    if written is None or written.indices is None or pod.gpu is None:
        return None
    return written.indices if len(written.indices) == pod.gpu.count else None


def uid_of_group(pod: PodRecord) -> str:
    """UID of the claim that the pod's gang may have; "" for a single pod."""
    return "" if pod.group is None else group_uid(pod.group.key)


def place_of(state: State, pod: PodRecord, job: SlurmJob) -> str:
    """The Slurm node on which a bound pod uses a claim; "" where it does not, or nobody can tell.

    Names go first. But a label that was taken off or changed, a second node with the same name or a
    deleted Node object move no pod: where names tell nothing, or that a pod is not where the claim
    is that it was bound with, the claim tells, unless another node is known to be the claim's.
    """
    mapped, is_its = state.slurm_of.get(pod.node, ""), is_bound_with(pod, job)
    if mapped in job.nodes:
        return mapped
    if not pod.node or (mapped and not is_its):
        return ""
    share = read_share(pod.annotations.get(keys.SHARE, ""))
    if share is not None and share.job_id == job.id:
        names: tuple[str, ...] = (share.slurm_node,) if share.slurm_node in job.nodes else ()
    else:
        names = job.nodes if len(job.nodes) == 1 else ()
    for name in names:
        may_be = pod.node not in state.kube_nodes or pod.node in state.hosts.get(name, ())
        if (is_its or may_be) and state.kube_of.get(name, pod.node) == pod.node:
            return name
    return ""


def is_bound_with(pod: PodRecord, job: SlurmJob) -> bool:
    """Whether a pod says that a job is the claim that it was bound with."""
    written = written_claim(pod) if pod.node else None
    return written is not None and written.job_id == job.id


def may_live_in(pod: PodRecord, job: SlurmJob) -> bool:
    """Whether a pod was bound with a gang's claim, by an annotation that only we write.

    Anybody may write it where the policies for the API server are not used: it has to be a gang of
    the pod's own namespace, whose name anybody there may take.
    """
    namespace = job.comment.partition(" ref=")[2].partition("/")[0]
    return is_bound_with(pod, job) and pod.namespace == namespace


def is_owner(pod: PodRecord, job: SlurmJob, owner: ClaimId) -> bool:
    """Whether a claim is a pod's, or that of its gang: the one that it says, or was bound with."""
    if owner.kind == "pod":
        return owner.uid == pod.uid
    return owner.uid == uid_of_group(pod) or may_live_in(pod, job)


def node_of(state: State, pod: PodRecord) -> str:
    """The Slurm node that a bound pod is on: by the claim it was bound with, else by its name."""
    written = written_claim(pod)
    job = None if written is None else _job(state, written.job_id)
    owner = None if job is None else state.owner_of(job)
    if job is not None and owner is not None and is_owner(pod, job, owner):
        place = place_of(state, pod, job)
        if place:
            return place
    return state.slurm_of.get(pod.node, "")


def _job(state: State, job_id: int) -> SlurmJob | None:
    return None if state.snapshot is None else state.snapshot.jobs.get(job_id)


def has_ended(state: State, claim_uid: str, job_id: int) -> bool:
    """Whether the last reading says that a claim has ended: a job that has does not run again."""
    job = _job(state, job_id)
    return job is not None and state.is_claim_of(job, claim_uid) and not is_live(job)


def is_old(state: State, claim_uid: str, job: SlurmJob | None) -> bool:
    """Whether a look at a claim is older than the last reading: it says nothing any more."""
    return job is not None and is_live(job) and has_ended(state, claim_uid, job.id)


def live_claims(state: State, uid: str) -> list[SlurmJob]:
    """The pod's claims in the last reading that nobody has ended, running ones first, by id."""
    jobs = [j for j in state.live.get(uid, ()) if j.id not in state.ending]
    return sorted(jobs, key=lambda j: (not is_running(j), j.id))


def use_of(job: SlurmJob, slurm_node: str) -> GpuUse | None:
    """What a job holds on a node; None: not known, or nothing."""
    return None if job.gpus is None else job.gpus.get(slurm_node)


def share_of(entry: Entry, job: SlurmJob) -> GpuUse | None:
    """What of a job is a pod's: all that it holds on the node, or the pod's share of its gang's.

    None: not known, nothing, or not what the pod was given.
    """
    use = use_of(job, entry.slurm_node)
    if use is None or not entry.group:
        return use
    if use.indices is None or entry.gpus.indices is None:
        return entry.gpus if use.total >= entry.gpus.total else None
    return entry.gpus if set(entry.gpus.indices) <= set(use.indices) else None


def fits(entry: Entry, job: SlurmJob) -> bool:
    """Whether a job covers exactly the GPUs that are charged to a pod."""
    use = share_of(entry, job)
    if use is None or not is_running(job):
        return False
    if entry.gpus.indices is None or use.indices is None:
        return use.total >= entry.gpus.total
    return use.indices == entry.gpus.indices


def is_elsewhere(entry: Entry, job: SlurmJob) -> bool:
    """Whether a job that runs holds other GPUs than those that the pod was given of it.

    It was made smaller, runs again on other nodes, or was given other indices. What Slurm does not
    tell, or not in full, says nothing.
    """
    if entry.claim is None or not job.nodes:
        return False
    if entry.slurm_node not in job.nodes:
        return True
    use = use_of(job, entry.slurm_node)
    if use is None or use.indices is None or entry.gpus.indices is None:
        return False
    is_whole = len(use.indices) >= len(entry.gpus.indices)
    return is_whole and not set(entry.gpus.indices) <= set(use.indices)


def is_outdated(state: State, claim: Claim) -> bool:
    """Whether what we know from after a grant contradicts it: slurmctld has forgotten it since."""
    uid = claim.id.uid
    owner = state.by_job.get(claim.job_id, uid)
    if owner != uid and any(e.sure_at > claim.granted for e in state.entries_of(owner)):
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
