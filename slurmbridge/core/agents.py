"""What the node agents say: which nodes take pods, and which pods have left their node.

An agent's word that nothing of a pod is left counts when its look at the node began after we had
learnt that the pod is over or gone (`AgentReported.after`): no clock and no delay enters into it.
Silence says nothing: without a word a claim is kept until the node is fenced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slurmbridge.core.event import AgentLost, AgentReported
from slurmbridge.pool.ledger import GpuState
from slurmbridge.pool.noderecord import GpuOwner, NodeOrders, NodeReport
from slurmbridge.pool.policy import Granularity

if TYPE_CHECKING:
    from slurmbridge.core.state import State
    from slurmbridge.pool.record import GpuUse, KubeNode

STATES = ("ready", "closed", "silent", "absent")
_KINDS = {GpuState.FREE: "free", GpuState.NATIVE: "native", GpuState.CLAIM: "claim"}


@dataclass(slots=True)
class AgentSeen:
    """The newest report of a node's agent.

    run, sequence: of that report. fresh_at: when its look at the node began, as far as is known.
    after: `State.moment` before that look, for certain. is_lost: its stream has ended since.
    is_ready: whether pods may go to the node, as the view was last told. orders: what the agent was
    told last.
    """

    report: NodeReport
    run: str
    sequence: int
    fresh_at: float
    after: int
    is_lost: bool = False
    is_ready: bool = False
    orders: NodeOrders = field(default_factory=NodeOrders)


def on_reported(state: State, event: AgentReported) -> None:
    """Take over what an agent says; one that was overtaken by a newer one is nothing new."""
    old = state.agents.get(event.node)
    if old is not None and old.run == event.run and event.sequence <= old.sequence:
        return
    state.agents[event.node] = AgentSeen(
        report=event.report,
        run=event.run,
        sequence=event.sequence,
        fresh_at=state.now - event.age_s,
        after=event.after,
        is_ready=old is not None and old.is_ready,
        orders=NodeOrders() if old is None or old.run != event.run else old.orders,
    )
    if old is None or old.report.gpus != event.report.gpus:
        state.touch(state.slurm_of.get(event.node, ""))
    _settle(state, event.node)


def on_lost(state: State, event: AgentLost) -> None:
    """An agent's stream has ended; what it has said of pods that had left stays true."""
    seen = state.agents.get(event.node)
    if seen is not None:
        seen.is_lost = True
        _settle(state, event.node)


def tick(state: State) -> None:
    """Agents that have fallen silent take no pods any more."""
    for node in state.agents:
        _settle(state, node)


def prune(state: State) -> None:
    """Forget silent agents of nodes that are deleted: of those nothing has to be asked any more."""
    for node, seen in list(state.agents.items()):
        if node not in state.kube_nodes and not _is_fresh(state, seen):
            del state.agents[node]


def _settle(state: State, node: str) -> None:
    seen = state.agents[node]
    is_ready = not why_not(state, node)
    if is_ready != seen.is_ready:
        seen.is_ready = is_ready
        state.touch(state.slurm_of.get(node, ""))


def are_needed(state: State) -> bool:
    """Whether a node takes pods only, and gives claims back only, by its agent's word."""
    settings = state.settings
    return settings.agents_required and settings.policy.granularity is Granularity.GPU


def why_not(state: State, node: str) -> str:
    """Why no pod may be bound to a node for its agent's sake; "" when one may."""
    seen = state.agents.get(node)
    if seen is None:
        return "no agent has reported"
    if not _is_fresh(state, seen):
        return "the agent is silent"
    if seen.report.slurm_node != state.slurm_of.get(node):
        return f"the agent speaks for Slurm node {seen.report.slurm_node}"
    if seen.report.fault:
        return seen.report.fault
    return "" if seen.report.registered else "the agent is not registered with the kubelet"


def takes_pods(state: State, node: str) -> bool:
    """Whether a pod may be bound to a node, as far as agents matter."""
    return not are_needed(state) or not why_not(state, node)


def faulty(state: State, node: str) -> dict[int, str]:
    """GPUs of a node of which its live agent says that they take no pods: index -> why."""
    seen = state.agents.get(node)
    if seen is None or not _is_fresh(state, seen):
        return {}
    return {gpu.index: gpu.fault for gpu in seen.report.gpus if gpu.fault}


def sides(state: State, node: str) -> dict[int, int]:
    """NUMA nodes of a node's GPUs by index, as its agent has told them last; {}: not known."""
    seen = state.agents.get(node)
    gpus = () if seen is None else seen.report.gpus
    return {gpu.index: gpu.numa for gpu in gpus if gpu.numa >= 0}


def exposed(state: State, node: str) -> str:
    """Which faulty GPU Slurm might give to the next claim on a node, and why it is; "" for none.

    Slurm chooses the GPUs of a claim, so while a faulty one is not somebody's, the node is closed.
    """
    if state.settings.policy.granularity is not Granularity.GPU:
        return ""
    ledger = state.ledgers.get(state.slurm_of.get(node, ""))
    for index, why in faulty(state, node).items():
        is_told = ledger is not None and ledger.numbered and index < len(ledger.gpus)
        if ledger is None or not is_told or ledger.gpus[index].state is GpuState.FREE:
            return f"GPU {index} takes no pods ({why}), and Slurm may give it to the next one"
    return ""


def _is_fresh(state: State, seen: AgentSeen) -> bool:
    return not seen.is_lost and state.now - seen.fresh_at <= state.settings.freshness.agent


def is_left(
    state: State, node: str, uid: str, since: int, boot_id: str = "", until: float = 0.0
) -> bool | None:
    """Whether nothing of a pod can be left on a node.

    Args:
        state: the state.
        node: Kubernetes node name.
        uid: of the pod.
        since: `State.moment` at which we had learnt that the pod is over or gone.
        boot_id: of the node at that moment, "" when not known.
        until: the deletion of its Node object proves nothing before that, nor does a reboot.

    Returns:
        True: an agent's word or a fence says so. False: the agent sees something, or its word has
        to be waited for. None: there is no agent to wait for.

    """
    seen = state.agents.get(node)
    if seen is not None:
        if _is_fresh(state, seen) and any(pod.uid == uid for pod in seen.report.pods):
            return False
        if seen.after >= since and seen.report.has_left(uid):
            return True
    if _is_fenced(state, node, boot_id, until):
        return True
    if are_needed(state) or (seen is not None and _is_fresh(state, seen)):
        return False
    return None


def is_left_on(state: State, slurm_node: str, uid: str, since: int) -> bool | None:
    """As `is_left`, on whichever Kubernetes node a Slurm node is; None also where there is none."""
    words = {is_left(state, name, uid, since) for name in state.hosts.get(slurm_node, ())}
    if False in words:
        return False
    return True if words == {True} else None


def are_clear(
    state: State, gpus: Mapping[str, GpuUse | None], since: int, but: Collection[str] = ()
) -> bool | None:
    """Whether no pod but those that we know of can be left on some GPUs of a claim.

    Args:
        state: the state.
        gpus: the GPUs, by Slurm node; None: Slurm does not tell them, it may be any.
        since: `State.moment` at which we had learnt that no other pod of it is there.
        but: UIDs of pods that have GPUs of the claim besides these, or may.

    Returns:
        True: the agents of all nodes that may be its say so, or these are fenced. False: one sees a
        pod there, or has to be waited for. None: there are no agents to wait for.

    """
    if not are_needed(state):
        return None
    hosts = state.hosts
    for use, node in ((use, host) for n, use in gpus.items() for host in hosts.get(n, ())):
        seen = state.agents.get(node)
        if _is_fenced(state, node, ""):
            continue
        is_said = seen is not None and _is_fresh(state, seen) and seen.report.is_whole
        if seen is None or not is_said or seen.after < since:
            return False
        numbers = None if use is None else use.indices
        for pod in seen.report.pods:
            is_known = pod.uid in but and (not pod.gpus or numbers is None)
            if not is_known and (not pod.gpus or set(pod.gpus) & set(numbers or pod.gpus)):
                return False
    return True


def _is_fenced(state: State, name: str, boot_id: str, until: float = 0.0) -> bool:
    """Whether no process of before can run on a node: deleted, taken out of service, rebooted.

    A reboot may be told late: a pod that went just before that may have been started again on the
    new boot, so it counts not before `until`. A deleted Node object says little of its machine, and
    its kubelet may still be stopping what ran there: that counts after a while, and not before
    `until`. While other pods are there by its name it is the list of nodes that is wrong.
    """
    if not state.nodes_listed or not name:
        return False
    node = state.kube_nodes.get(name)
    if node is None:
        since = state.deleted_since(name)
        if since is None or state.has_pods(name):
            return False
        return state.now >= max(until, since + state.settings.linger_s)
    is_rebooted = bool(boot_id) and node.boot_id not in ("", boot_id)
    return node.fenced or (is_rebooted and state.now >= until)


def orders(state: State, node: str) -> NodeOrders | None:
    """The ledger of a node for its agent; the same object as long as it says the same."""
    seen, slurm_node = state.agents.get(node), state.slurm_of.get(node, "")
    ledger = state.ledgers.get(slurm_node)
    if seen is None or ledger is None or state.snapshot is None:
        return None
    owners = []
    for index, owner in enumerate(ledger.gpus):
        job = state.snapshot.jobs.get(owner.job_id)
        owners.append(
            GpuOwner(
                index=index,
                kind=_KINDS.get(owner.state, "unknown"),
                job_id=owner.job_id,
                pod_uid=state.user_of(slurm_node, owner.uid, index),
                user="" if job is None else job.user,
                account="" if job is None else job.account,
            )
        )
    if tuple(owners) != seen.orders.owners or not seen.orders.as_of:
        seen.orders = NodeOrders(as_of=state.snapshot.began, owners=tuple(owners))
    return seen.orders


def boot_id(node: KubeNode | None) -> str:
    """Which boot of a node this is; "" when not known."""
    return "" if node is None else node.boot_id


def count(state: State) -> Counter[str]:
    """Pool nodes by what their agents are: `STATES`."""
    found: Counter[str] = Counter()
    for node in state.slurm_of:
        seen = state.agents.get(node)
        if seen is None:
            found["absent"] += 1
        elif not _is_fresh(state, seen):
            found["silent"] += 1
        else:
            is_closed = why_not(state, node) or exposed(state, node)
            found["closed" if is_closed else "ready"] += 1
    return found


def findings(state: State) -> Counter[str]:
    """What the audits of the live agents have found, by kind."""
    return Counter(
        finding.kind
        for seen in state.agents.values()
        if _is_fresh(state, seen)
        for finding in seen.report.findings
    )


def about(state: State, node: str) -> dict[str, object] | None:
    """What is known of a node's agent, for people; None: none has reported."""
    seen = state.agents.get(node)
    if seen is None:
        return None
    why = why_not(state, node) or exposed(state, node)
    return {
        "ready": not why,
        "why": why,
        "ageSeconds": round(max(0.0, state.now - seen.fresh_at), 1),
        "registered": seen.report.registered,
        "whole": seen.report.is_whole,
        "pods": [
            {"uid": p.uid, "pod": p.ref, "gpus": list(p.gpus), "processes": p.processes}
            for p in seen.report.pods
        ],
        "holds": list(seen.report.held),
        "findings": [{"kind": f.kind, "text": f.text} for f in seen.report.findings],
    }
