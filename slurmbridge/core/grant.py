"""A pod asks for its claim: the way from `ClaimAsked` to a grant or a refusal."""

from __future__ import annotations

from slurmbridge.core import (
    agents,
    answer,
    cover,
    planned,
    publish,
    release,
    settle,
    together,
)
from slurmbridge.core.action import Allocate, LookPod, PollNow, Queue
from slurmbridge.core.event import (
    Allocated,
    AllocateRefused,
    AllocateUnknown,
    ClaimAsked,
    Covered,
    Queued,
    UnboundReleased,
)
from slurmbridge.core.evidence import has_ended, is_outdated, others_on
from slurmbridge.core.settle import drawn, must_queue, request_for
from slurmbridge.core.state import Entry, Phase, State, asked_gpus
from slurmbridge.pool.claim import Ask
from slurmbridge.pool.group import OWN
from slurmbridge.pool.policy import Refusal, resolve
from slurmbridge.pool.reason import CODES, Reason, texts_for
from slurmbridge.pool.record import GpuUse, PodRecord
from slurmbridge.pool.verdict import judge_one


def on_claim_asked(state: State, event: ClaimAsked) -> None:
    """Decide whether a pod may have a claim on a node, now.

    Idempotent: the same question gets the same claim, however often it is asked.
    """
    if not state.is_synced:
        answer.later(state, event.op, "the bridge has just started and is still reading both sides")
        return
    pod = state.pods.get(event.uid)
    entry = state.book.get(event.uid)
    if pod is not None:
        _decide(state, event, pod)
    elif entry is not None:
        _again(state, event, entry)
    elif event.uid in state.gone:
        answer.no(state, event.op, "request", "the pod is deleted")
    else:
        # The watch may be a moment behind the scheduler's: ask the API server about this one.
        entry = Entry(
            uid=event.uid,
            ref=f"{event.namespace}/{event.name}",
            kube_node=event.kube_node,
            slurm_node=state.slurm_of.get(event.kube_node, ""),
            phase=Phase.ASKING,
            since=state.now,
            waiters=[event.op],
            cause=event.cause,
            pod_looking=state.now,
        )
        state.put(entry)
        state.out.append(LookPod(event.uid, event.namespace, event.name))


def on_pod_looked(state: State, entry: Entry, pod: PodRecord | None) -> None:
    """Go on with a claim whose pod was not in the watch yet."""
    waiters, entry.waiters = entry.waiters, []
    state.drop(entry)
    namespace, _, name = entry.ref.partition("/")
    for op in waiters:
        asked = ClaimAsked(op, entry.uid, namespace, name, entry.kube_node, entry.cause)
        if pod is None:
            answer.no(state, op, "request", "there is no such pod")
        else:
            _decide(state, asked, pod)


def on_pod_look_failed(state: State, entry: Entry, text: str) -> None:
    """The API server did not tell about the pod: the askers have to come again."""
    answer.all_later(state, entry, text)
    state.drop(entry)


def _decide(state: State, event: ClaimAsked, pod: PodRecord) -> None:
    if pod.is_over or pod.deleting_since is not None:
        answer.no(state, event.op, "request", "the pod is over or being deleted")
        return
    if pod.node and pod.node != event.kube_node:
        answer.no(state, event.op, "claimed_elsewhere", f"the pod is bound to {pod.node}")
        return
    slurm_node = state.slurm_of.get(event.kube_node, "")
    if not slurm_node:
        answer.no(state, event.op, "unknown_node", f"{event.kube_node} is not a node of the pool")
        return
    entry = state.book.get(event.uid)
    if entry is not None:
        _again(state, event, entry)
        return
    # A group by our annotation is always planned, as the extender's filter has it: without a gate
    # too, and before its other members are known here.
    is_own = pod.group is not None and pod.group.kind == OWN
    if not pod.node and (is_own or planned.goes_with_gang(state, pod)):
        state.waiting.consider.add(pod.uid)
        answer.no(state, event.op, Reason.NO_PLAN, "its gang waits for its claims")
        return
    ask = resolve(pod, state.settings.policy)
    if isinstance(ask, Refusal):
        answer.no(state, event.op, ask.reason, ask.text)
        return
    if state.is_stale:
        answer.later(state, event.op, "Slurm has not been readable for a while")
        return
    if why := _judge(state, event.kube_node, ask):
        answer.no(state, event.op, why, texts_for(ask.reservation)[CODES[why]])
        return
    request = request_for(state, pod, slurm_node, drawn(state, ask, event.kube_node))
    entry = Entry(
        uid=event.uid,
        ref=pod.ref,
        kube_node=event.kube_node,
        slurm_node=slurm_node,
        phase=Phase.ASKING,
        since=state.now,
        request=request,
        gpus=asked_gpus(pod),
        boot=state.boot,
        waiters=[event.op],
        cause=event.cause,
    )
    state.put(entry)
    if must_queue(state, ask):
        state.out.append(Queue(event.uid, request, event.cause))
    else:
        state.out.append(Allocate(event.uid, request, event.cause))


def _again(state: State, event: ClaimAsked, entry: Entry) -> None:
    """The pod has an entry already."""
    if entry.kube_node != event.kube_node:
        answer.no(state, event.op, "claimed_elsewhere", f"its claim is on {entry.kube_node}")
    elif entry.phase is Phase.ASKING and together.gang_of(state, entry.uid) is not None:
        answer.no(state, event.op, Reason.NO_PLAN, "its gang is being claimed")
    elif entry.phase is Phase.ASKING:
        entry.waiters.append(event.op)
    elif entry.phase is Phase.HELD and _has_faulty(state, entry, entry.gpus):
        release.end_entry(state, entry, "a GPU of it is faulty")
        answer.later(state, event.op, Reason.GPU_FAULT.text)
    elif entry.phase is Phase.HELD:
        entry.since = state.now
        if not together.join(state, event.op, entry):
            answer.held(state, event.op, entry)
    elif entry.phase is Phase.BOUND and entry.claim is not None and not entry.suspect:
        answer.yes(state, event.op, entry)
    elif entry.phase in (Phase.LOST, Phase.LINGERING):
        answer.no(state, event.op, "ending", f"the pod's last claim is {entry.phase}")
    else:
        answer.later(state, event.op, f"the pod's claim is {entry.phase}, and not certain now")


def _has_faulty(state: State, entry: Entry, gpus: GpuUse) -> bool:
    """Whether Slurm chose a GPU of which the node's agent says that it takes no pods."""
    return bool(set(gpus.indices or ()) & agents.faulty(state, entry.kube_node).keys())


def _judge(state: State, kube_node: str, ask: Ask) -> Reason | None:
    """Why the node is no place for the pod, in the newest view; None if it is."""
    publish.refresh(state)
    view = state.views.get(kube_node)
    if view is None:
        return Reason.UNKNOWN_NODE
    return judge_one(ask, view, state.settings.policy, state.wall)


def on_allocated(state: State, event: Allocated) -> None:
    """Slurm granted: the claim is held, and the askers may bind."""
    claim = event.claim
    entry = state.book.get(event.uid)
    waits = entry is not None and entry.phase in (Phase.ASKING, Phase.DOUBT, Phase.QUEUED)
    if (
        entry is not None
        and entry.job_id == claim.job_id
        and (entry.claim is not None or not waits)
    ):
        return  # a reading was faster
    is_here = entry is not None and entry.slurm_node == claim.slurm_node
    if entry is not None and is_here and claim.gpus.indices == entry.gpus.indices:
        # Bound before we heard of the grant, with an earlier claim on the same GPUs.
        if entry.phase is Phase.BOUND and has_ended(state, entry.claim_uid, entry.job_id):
            cover.begin(state, entry, "Slurm has ended its claim")
        if entry.is_uncovered:
            cover.on_covered(state, Covered(event.uid, claim))
            return
    if entry is None or not waits or entry.slurm_node != claim.slurm_node:
        # Nobody waits for it any more (the pod went away, has another, or asks for another node by
        # now): the sweep would find it, but giving it back now is quicker.
        why = "its pod is gone" if entry is None else "the pod has another claim"
        release.end_claim(state, claim, why)
        return
    if is_outdated(state, claim):
        if entry.phase is Phase.ASKING:
            doubt(state, entry, 0, "slurmctld has restarted meanwhile")
        return
    if others_on(state, entry, claim.gpus):
        answer.all_no(state, entry, "gpu_busy", "Slurm gave GPUs that another pod may still use")
        state.drop(entry)
        release.end_claim(state, claim, "another pod may still use its GPUs")
        return
    if _has_faulty(state, entry, claim.gpus):
        answer.all_no(state, entry, Reason.GPU_FAULT, Reason.GPU_FAULT.text)
        state.drop(entry)
        release.end_claim(state, claim, "a GPU of it is faulty")
        return
    settle.take(state, entry, claim)


def on_allocate_refused(state: State, event: AllocateRefused) -> None:
    """Slurm said no: nothing is held, the pod goes back to the scheduler."""
    entry = state.book.get(event.uid)
    if entry is None or entry.phase not in (Phase.ASKING, Phase.DOUBT) or entry.pod_looking:
        return
    answer.all_no(state, entry, event.reason, event.text)
    state.drop(entry)


def on_allocate_unknown(state: State, event: AllocateUnknown) -> None:
    """No clear answer. The claim may exist: the next readings of slurmctld will tell."""
    entry = state.book.get(event.uid)
    if entry is None or entry.phase is not Phase.ASKING or entry.pod_looking is not None:
        return
    doubt(state, entry, event.job_id, f"Slurm gave no clear answer: {event.text}")


def doubt(state: State, entry: Entry, job_id: int, text: str) -> None:
    """A claim may have been made: keep its GPUs charged until readings have told."""
    answer.all_later(state, entry, text)
    if state.by_job.get(job_id, entry.uid) == entry.uid:
        state.set_job(entry, job_id)
    state.move(entry, Phase.DOUBT)
    state.out.append(PollNow())


def on_queued(state: State, event: Queued) -> None:
    """A placeholder stands in Slurm's queue; the pod is bound once it runs."""
    entry = state.book.get(event.uid)
    if entry is None or entry.phase not in (Phase.ASKING, Phase.DOUBT):
        if entry is None or entry.job_id != event.job_id:
            release.end(state, state.claim_id(event.uid), event.job_id, "its pod is gone")
        return
    answer.all_later(state, entry, f"waits in Slurm's queue as job {event.job_id}")
    state.set_job(entry, event.job_id)
    entry.sure_at = state.now
    state.move(entry, Phase.QUEUED)
    pod = state.pods.get(event.uid)
    if pod is None or pod.is_over or pod.node or pod.deleting_since is not None:
        release.end_entry(state, entry, "its pod is gone")


def on_unbound_released(state: State, event: UnboundReleased) -> None:
    """An extender will not bind with this claim. If nobody else may, see whether the pod is bound.

    "Refused" can mean that another extender was quicker: only the API server knows.
    """
    entry = state.book.get(event.uid)
    if entry is None or entry.job_id != event.job_id or entry.phase is not Phase.HELD:
        return
    entry.promised = max(0, entry.promised - 1)
    if not entry.promised:
        release.look_at_pod(state, entry)


def tick(state: State) -> None:
    """An answer that does not come counts as unknown."""
    for entry in list(state.book.values()):
        if entry.phase is Phase.ASKING and state.now - entry.since > state.settings.answer_s:
            text = "no answer in time"
            if entry.pod_looking is not None:
                on_pod_look_failed(state, entry, text)
            else:
                doubt(state, entry, 0, text)
