"""The end of a pod: when its claim is given back to Slurm, and when not yet."""

from __future__ import annotations

from slurmbridge.core import adopted, agents
from slurmbridge.core.action import End, LookPod, Tell
from slurmbridge.core.event import Ended
from slurmbridge.core.evidence import is_outdated, uid_of_group
from slurmbridge.core.state import NO_GPUS, Ending, Entry, Phase, State, is_live
from slurmbridge.pool.claim import Claim, ClaimId
from slurmbridge.pool.record import GpuUse, PodRecord, SlurmJob

LOOK_AGAIN_S = 10.0


def end(
    state: State,
    claim_id: ClaimId,
    job_id: int,
    why: str,
    slurm_node: str = "",
    gpus: GpuUse = NO_GPUS,
) -> None:
    """Give a claim back. Its GPUs stay charged until a reading no longer shows it."""
    if state.by_job.get(job_id, claim_id.uid) != claim_id.uid:
        return  # slurmctld forgot the claim and gave its id to another pod's
    known = state.ending.get(job_id)
    if known is not None and known.claim_id == claim_id:
        return
    state.ending[job_id] = Ending(claim_id, job_id, slurm_node, gpus, state.now, state.now, why)
    state.orphans.pop((job_id, claim_id.uid), None)
    state.out.append(End(claim_id, job_id, why))
    state.touch(slurm_node)


def end_claim(state: State, claim: Claim, why: str) -> None:
    """Give back a claim that Slurm has just granted and nobody needs."""
    if is_outdated(state, claim):
        return
    other = state.by_job.get(claim.job_id)
    if other is not None and other != claim.id.uid:
        del state.by_job[claim.job_id]
        state.robbed.add(other)
    known = state.ending.get(claim.job_id)
    if known is not None and (known.slurm_node, known.gpus) != (claim.slurm_node, claim.gpus):
        del state.ending[claim.job_id]  # of a claim that slurmctld forgot
    end(state, claim.id, claim.job_id, why, claim.slurm_node, claim.gpus)


def end_job(state: State, uid: str, job: SlurmJob, why: str, *, is_proven: bool = False) -> None:
    """Give back a claim that a reading shows, unless it is one of those found and may be in use.

    is_proven: nothing of its pod is left.
    """
    claim_id = state.ours.get(job.id, state.claim_id(uid))
    if claim_id.uid == uid and (is_proven or not _may_be_used(state, uid, job)):
        end(state, claim_id, job.id, why, job.nodes[0] if job.nodes else "")


def _may_be_used(state: State, uid: str, job: SlurmJob) -> bool:
    """Whether something may run in a claim that was found, though its pod is not bound there.

    An earlier leader may have had it bound a moment ago. Or the API server was set back: what was
    bound since runs on until its kubelet has seen that.
    """
    found, pod = state.found.get((job.id, uid)), state.pods.get(uid)
    if found is None or not job.nodes:
        return False
    if pod is not None and pod.node and state.slurm_of.get(pod.node) in job.nodes:
        return False  # where it is, it has what it was bound with
    is_left = agents.is_left_on(state, job.nodes[0], uid, found.moment)
    if is_left is None:
        is_early = state.now - found.at < state.settings.linger_s
        return is_early or is_silent_on(state, job.nodes[0])
    return not is_left


def end_entry(state: State, entry: Entry, why: str) -> None:
    """The pod needs its claim no more: give it back, and forget the pod.

    A gang's claim is given back when the last of its members needs it no more: until then the share
    of one that has ended stays in the gang's hands, for a member that replaces it.
    """
    if entry.phase is Phase.ASKING:
        return  # the answer is still to come: `grant` ends it then
    job_id, claim_id, is_group = entry.job_id, state.claim_id_of(entry), bool(entry.group)
    state.drop(entry)
    found = state.found.get((job_id, claim_id.uid))
    if found is not None and entry.phase is Phase.HELD:
        found.let_go = why  # `sweep` ends it once nothing can be in it
        return
    if is_group and job_id and not state.lives_in(claim_id.uid, job_id):
        end_group(state, claim_id.uid, job_id, why, entry.slurm_node, entry.gpus)
    elif job_id and not is_group:
        end(state, claim_id, job_id, why, entry.slurm_node, entry.gpus)


def end_group(
    state: State,
    uid: str,
    job_id: int,
    why: str,
    slurm_node: str = "",
    gpus: GpuUse = NO_GPUS,
) -> None:
    """Give a job of a gang back, in which no member that we know of lives.

    One that was found running is kept while there may be others in it: `gangsweep` comes again
    after each reading.
    """
    job = None if state.snapshot is None else state.snapshot.jobs.get(job_id)
    found = state.waiting.adopted.get(job_id)
    if job is not None and found is not None and (left := adopted.unclear(state, job)):
        if state.now - found.since > state.settings.linger_s and not found.told_kept:
            found.told_kept = True
            ref = job.comment.partition(" ref=")[2]
            tell_kept(state, state.hosts.get(left[0], left)[0], ref)
        return
    claim_id = ClaimId(state.settings.policy.cluster, uid, "group")
    end(state, claim_id, job_id, why, slurm_node, gpus)


def on_ended(state: State, event: Ended) -> None:
    """Slurm has taken the cancel, or has no such claim. Only a younger reading is proof."""
    ending = state.ending.get(event.job_id)
    if ending is not None and ending.claim_id.uid == event.uid:
        ending.asked = state.now


def settle_endings(state: State) -> None:
    """After a reading: which claims have ended, and which have to be told again."""
    snapshot = state.snapshot
    if snapshot is None:
        return
    for ending in list(state.ending.values()):
        if snapshot.began <= ending.since:
            continue
        job = snapshot.jobs.get(ending.job_id)
        is_mine = state.is_claim_of(job, ending.claim_id.uid)
        if job is None or not is_mine or not (is_live(job) or job.state.holds_resources):
            del state.ending[ending.job_id]
            state.touch(ending.slurm_node)
        elif (
            is_live(job)
            and state.now - ending.asked > state.settings.end_retry_s
            and not _may_be_new(state, ending)
        ):
            # Not taken, or undone: a cancelled claim can come back with a restarted slurmctld.
            ending.asked = state.now
            state.out.append(End(ending.claim_id, ending.job_id, ending.why))


def _may_be_new(state: State, ending: Ending) -> bool:
    """Whether the pod, or one of the gang, is being given another claim.

    That may have got the same id; or the pod was bound with the one that ends, and needs it.
    """
    uid = ending.claim_id.uid
    ticket = state.waiting.tickets.get(uid)
    if ticket is not None and not ticket.job_id:
        return True
    if ending.claim_id.kind == "group":
        pods = (p for p in state.pods.values() if uid_of_group(p) == uid)
        entries = [state.book.get(pod.uid) for pod in pods]
    else:
        entries = [state.book.get(uid)]
    unsure = (Phase.ASKING, Phase.DOUBT, Phase.COVERING)
    return any(entry is not None and entry.phase in unsure for entry in entries)


def on_pod_over(state: State, pod: PodRecord) -> None:
    """Its phase is Succeeded or Failed. That is no proof: others than the kubelet may write it."""
    entry = state.book.get(pod.uid)
    if entry is not None:
        leave(state, entry, pod, f"pod is {pod.phase}")


def on_pod_vanished(state: State, entry: Entry, pod: PodRecord, *, may_run: bool) -> None:
    """The object is deleted. That alone does not prove that its processes are gone.

    kubelet sets a terminal phase before it takes the object away; an object that vanishes while
    the pod still counted as running was deleted by force (measured: processes lived on for 3 s).
    """
    if not may_run:
        leave(state, entry, pod, "pod is deleted")
    elif entry.phase not in (Phase.ASKING, Phase.DOUBT):
        linger(state, entry, pod.grace_s)


def on_pod_back(state: State, entry: Entry, pod: PodRecord) -> None:
    """A pod that was taken for gone is listed again: it lives in its claim as before."""
    if entry.job_id and pod.node == entry.kube_node:
        entry.why = ""
        state.move(entry, Phase.BOUND)
    else:
        state.drop(entry)


def leave(state: State, entry: Entry, pod: PodRecord, why: str) -> None:
    """The pod is over: give its claim back, where there is an agent as soon as that says so."""
    if entry.phase is Phase.LINGERING or entry.phase is Phase.ASKING:
        return
    if pod.node == entry.kube_node and may_be_left(state, pod):
        keep(state, entry, why)
        entry.linger_until = state.now
        if state.deleted_since(pod.node) is not None:
            entry.linger_until += max(state.settings.linger_s, pod.grace_s)
    else:
        end_entry(state, entry, why)


def may_be_left(state: State, pod: PodRecord) -> bool:
    """Whether the phase of a pod which is over is not enough: an agent has to say so, or time.

    Where the Node object is gone it is not the kubelet that has written the phase.
    """
    if not pod.node:
        return False
    if state.deleted_since(pod.node) is not None:
        return True
    return agents.is_left(state, pod.node, pod.uid, state.moment) is not None


def linger(state: State, entry: Entry, grace_s: float = 0.0) -> None:
    """Keep a claim whose pod is gone for as long as its processes may run."""
    keep(state, entry, "pod was deleted by force; its processes may still run")
    entry.linger_until = state.now + max(state.settings.linger_s, grace_s)


def keep(state: State, entry: Entry, why: str) -> None:
    """Keep what is charged to a pod until nothing of it is left."""
    entry.why, entry.left_at = why, state.moment
    entry.boot_id = agents.boot_id(state.kube_nodes.get(entry.kube_node))
    state.move(entry, Phase.LINGERING)


def tick(state: State) -> None:
    """Unbound claims that nobody uses, and force-deleted pods whose time is over."""
    for entry in list(state.book.values()):
        if entry.phase is Phase.LINGERING:
            _settle_lingering(state, entry)
        elif (
            entry.phase in (Phase.HELD, Phase.QUEUED)
            and state.now - entry.since > state.settings.hold_s
        ):
            look_at_pod(state, entry)


def look_at_pod(state: State, entry: Entry) -> None:
    """Ask the API server whether a claim's pod still waits for it."""
    if entry.pod_looking is None or state.now - entry.pod_looking > LOOK_AGAIN_S:
        namespace, _, name = entry.ref.partition("/")
        entry.pod_looking = state.now
        state.out.append(LookPod(entry.uid, namespace, name))


def on_agent_spoke(state: State, kube_node: str) -> None:
    """An agent has told what is left on its node: claims may be given back."""
    slurm_node = state.slurm_of.get(kube_node, "")
    for entry in list(state.by_node.get(slurm_node, {}).values()):
        if entry.phase is Phase.LINGERING:
            _settle_lingering(state, entry)


def _settle_lingering(state: State, entry: Entry) -> None:
    is_left = agents.is_left(
        state, entry.kube_node, entry.uid, entry.left_at, entry.boot_id, entry.linger_until
    )
    if is_left:
        end_entry(state, entry, "its pod is gone")
    elif is_left is False:
        if state.now - entry.since > state.settings.linger_s and not entry.told_kept:
            entry.told_kept = True
            tell_kept(state, entry.kube_node, entry.ref)
    elif state.now >= entry.linger_until:
        _settle_by_time(state, entry)


def _settle_by_time(state: State, entry: Entry) -> None:
    """Where no agent is: after a while, if the node's kubelet can have done its work."""
    if is_silent(state, entry.kube_node):
        entry.linger_until = state.now + state.settings.linger_s
        if not entry.told_kept:
            entry.told_kept = True
            tell_kept(state, entry.kube_node, entry.ref)
        return
    since = state.deleted_since(entry.kube_node)
    if since is None or state.now >= since + state.settings.linger_s:
        end_entry(state, entry, "its pod is gone")


def is_silent(state: State, kube_node: str) -> bool:
    """Whether a node is there and cannot tell what runs on it.

    A fenced one is off, as somebody has vouched: nothing runs on it.
    """
    node = state.kube_nodes.get(kube_node)
    return node is not None and not node.ready and not node.fenced


def is_silent_on(state: State, slurm_node: str) -> bool:
    """Whether a Kubernetes node that may be this Slurm node cannot tell what runs on it."""
    return any(is_silent(state, name) for name in state.hosts.get(slurm_node, ()))


def on_node_back(state: State, kube_node: str) -> None:
    """A silent node speaks again: only now does its kubelet stop what was deleted meanwhile."""
    for slurm_node in state.may_be.get(kube_node, ()):
        for entry in state.by_node.get(slurm_node, {}).values():
            if entry.phase is Phase.LINGERING:
                entry.linger_until = max(entry.linger_until, state.now + state.settings.linger_s)
        for job in state.jobs_on.get(slurm_node, ()):
            owner = state.ours.get(job.id)
            orphan = None if owner is None else state.orphans.get((job.id, owner.uid))
            if orphan is not None and orphan.gone_at is not None:
                orphan.gone_at = state.now


def tell_kept(state: State, kube_node: str, ref: str) -> None:
    """Tell why a claim without a pod is not given back."""
    node = state.kube_nodes.get(kube_node)
    if node is None:
        return
    if is_silent(state, kube_node):
        why = "its pod was deleted while the node is not ready"
    else:
        why = agents.why_not(state, kube_node) or "the node's agent still sees processes of its pod"
    text = f"claim of {ref} is kept: {why}"
    state.out.append(Tell("", node.name, node.uid, "ClaimKept", text, warning=True))


def on_hold_looked(state: State, entry: Entry, pod: PodRecord | None) -> None:
    """An unbound claim was looked into: is the pod still waiting for it?

    Whoever was told to bind since then has called the look off (`answer.yes`).
    """
    entry.pod_looking = None
    if pod is None or pod.node:
        return  # the watch will tell how it ended; `pods.see` has settled that it is bound
    if entry.phase is Phase.QUEUED and not pod.is_over and pod.deleting_since is None:
        entry.since = state.now
    else:
        end_entry(state, entry, "the pod was not bound in time")
