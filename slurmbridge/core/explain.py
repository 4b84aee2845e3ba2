"""Answers for people: `status`, `explain POD`, `who NODE`, and the debug snapshot.

Each answer is a plain dict that is printed as text or as JSON by the command line.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np

from slurmbridge.core import agents, completing, evict, gang, lift, publish, shares
from slurmbridge.core.state import Entry, Phase, State
from slurmbridge.pool import keys
from slurmbridge.pool.gres import format_indices
from slurmbridge.pool.hostlist import fold
from slurmbridge.pool.ledger import GpuState
from slurmbridge.pool.policy import Refusal, resolve
from slurmbridge.pool.reason import CODES, REASONS, texts_for
from slurmbridge.pool.record import PodRecord
from slurmbridge.pool.verdict import judge
from slurmbridge.pool.view import Window


def status(state: State) -> dict[str, Any]:
    """The pool at a glance: GPUs by owner side, claims by phase, pods, ages, breaker."""
    publish.refresh(state)
    gpus, phases = gpus_by_state(state), claims_by_phase(state)
    waiting = [p for p in state.pods.values() if not p.node and not p.is_over]
    snapshot = state.snapshot
    return {
        "cluster": state.settings.policy.cluster,
        "granularity": str(state.settings.policy.granularity),
        "synced": state.is_synced,
        "nodes": len(state.slurm_of),
        "blockedNodes": sum(1 for v in state.views.values() if v.blocked or not v.agent),
        "gpuNodesOutside": _outside(state)[:100],
        "gpus": {str(s): gpus.get(str(s), 0) for s in GpuState},
        "claims": {str(p): phases.get(str(p), 0) for p in Phase},
        "podsWaiting": len(waiting),
        "podsBound": sum(1 for p in state.pods.values() if p.node and not p.is_over),
        "slurm": {
            "cluster": snapshot.config.cluster if snapshot else "",
            "version": snapshot.config.version if snapshot else "",
            "ageSeconds": round(state.age_s, 3) if snapshot else None,
            "stale": state.is_stale,
            "pollCostSeconds": round(snapshot.cost_s, 4) if snapshot else None,
            "pollIntervalSeconds": round(state.interval_s, 3),
            "error": state.poll_failed,
        },
        "breaker": breaker(state),
        "completing": _completing(state),
        "groups": shares.told(state),
        "nodeSync": {
            "drained": sorted(state.nodes.ours)[:100],
            "held": sorted(state.nodes.held)[:100],
        },
        "agents": {
            "needed": agents.are_needed(state),
            **{word: agents.count(state)[word] for word in agents.STATES},
            "findings": dict(agents.findings(state)),
        },
        "setAside": [msgspec.to_builtins(aside) for aside in state.aside.found.values()],
        "conflicts": [
            f"{name}: {text}"
            for name, ledger in sorted(state.ledgers.items())
            for text in ledger.conflicts
        ][:50],
    }


def _outside(state: State) -> list[str]:
    """Kubernetes nodes that offer pool GPUs and are no pool nodes: their pods need no claim.

    Right for machines that Slurm does not have; one that it has under another name is shared
    without any of our promises.
    """
    resources = state.settings.policy.resources
    return sorted(
        name
        for name, node in state.kube_nodes.items()
        if name not in state.slurm_of
        and name not in state.views
        and any(node.gpus.get(resource, 0) > 0 for resource in resources)
    )


def gpus_by_state(state: State) -> Counter[str]:
    """GPUs of the pool by `GpuState`, as of the last refresh."""
    gpus: Counter[str] = Counter()
    for slurm_node in state.kube_of:
        ledger = state.ledgers.get(slurm_node)
        if ledger is not None:
            gpus.update(str(owner.state) for owner in ledger.gpus)
    return gpus


def claims_by_phase(state: State) -> Counter[str]:
    """Claims by `Phase`; those that are ending and gangs' places stand beside the book."""
    phases = Counter(str(e.phase) for e in state.book.values())
    for ticket in state.waiting.tickets.values():
        phases[str(Phase.ASKING if ticket.now else Phase.QUEUED)] += 1
    phases[str(Phase.ENDING)] = len(state.ending)
    return phases


def breaker(state: State) -> dict[str, Any]:
    """Whether mass loss of claims has stopped evictions, and of whom."""
    lost = [entry.ref for entry in state.book.values() if entry.phase is Phase.LOST]
    return {
        "open": state.breaker_since is not None,
        "since": state.breaker_since,
        "lost": sorted([*lost, *evict.cancelled(state)])[:100],
    }


def _completing(state: State) -> dict[str, Any]:
    found = completing.long_ones(state)
    return {
        "longestSeconds": round(found.longest_s),
        "nodes": fold(found.nodes),
        "jobs": found.jobs[:100],
    }


def who(state: State, name: str) -> dict[str, Any] | None:
    """Which GPU of a node belongs to which job or pod; None: no such node.

    Args:
        state: the state.
        name: the node's name in Kubernetes or in Slurm.

    """
    publish.refresh(state)
    slurm_node = state.slurm_of.get(name, name)
    kube_node = state.kube_of.get(slurm_node, "")
    ledger = state.ledgers.get(slurm_node)
    if state.snapshot is None or ledger is None:
        return None
    node = state.snapshot.nodes.get(slurm_node)
    view = state.views.get(kube_node)
    rows = []
    for index, owner in enumerate(ledger.gpus):
        job = state.snapshot.jobs.get(owner.job_id)
        uid = state.user_of(slurm_node, owner.uid, index)
        pod, entry = state.pods.get(uid), state.book.get(uid)
        rows.append(
            {
                "gpu": index,
                "type": ledger.types[index],
                "state": str(owner.state),
                "jobId": owner.job_id or None,
                "user": job.user or job.user_id if job is not None else None,
                "account": job.account if job is not None else None,
                "jobName": job.name if job is not None else None,
                "pod": pod.ref if pod is not None else (entry.ref if entry is not None else None),
            }
        )
    return {
        "kubeNode": kube_node,
        "slurmNode": slurm_node,
        "state": str(node.state) if node is not None else "unknown to Slurm",
        "reason": node.reason if node is not None else "",
        "blocked": _blocked(state, kube_node),
        "numbered": ledger.numbered,
        "gpus": rows,
        "planStart": view.plan_start if view is not None else None,
        "reservations": [_window(w) for w in view.windows] if view is not None else [],
        "conflicts": list(ledger.conflicts),
        "agent": agents.about(state, kube_node),
        "ageSeconds": round(state.age_s, 3),
    }


def _window(window: Window) -> dict[str, object]:
    terms = msgspec.structs.asdict(window.terms)
    return {"reservation": window.reservation, "start": window.start, "end": window.end} | {
        "cpus": window.cpus or None,
        "terms": {word: list(v) if isinstance(v, tuple) else v for word, v in terms.items()},
    }


def _blocked(state: State, kube_node: str) -> str:
    view = state.views.get(kube_node)
    if view is None:
        return "not a node of the pool"
    faulty = agents.exposed(state, kube_node)
    return faulty or view.blocked or ("" if view.agent else agents.why_not(state, kube_node))


def explain(state: State, namespace: str, name: str) -> dict[str, Any] | None:
    """Where a pod stands, and if it waits, why each class of nodes refuses it; None: not known."""
    known = (*state.pods.values(), *state.aside.pods.values())
    pods = [p for p in known if p.namespace == namespace and p.name == name]
    if not pods:
        return None
    pod = max(pods, key=lambda p: p.created)
    entry, aside = state.book.get(pod.uid), state.aside.of_pod(pod)
    answer: dict[str, Any] = {
        "pod": pod.ref,
        "uid": pod.uid,
        "phase": pod.phase,
        "node": pod.node or None,
        "asks": {
            "gpus": pod.gpu.count if pod.gpu else 0,
            "cpus": pod.cpus,
            "memoryMiB": pod.memory_mib,
        },
        "gates": list(pod.gates),
        "reason": None,
        "claim": _claim(entry),
        "ageSeconds": round(state.age_s, 3),
    }
    if aside is not None:  # not looked into any further
        text = f"set aside, since the bridge has failed over this {aside.kind}: {aside.error}"
        return answer | {"waits": {"text": text, "nodes": {}}}
    answer["reason"] = pod.annotations.get(keys.REASON) or None
    if (group := gang.explain(state, pod)) is not None:
        answer["group"] = group
    if not pod.node and not pod.is_over:
        answer["waits"] = _why_waiting(state, pod, entry)
    return answer


def _claim(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    indices = entry.gpus.indices
    return {
        "phase": str(entry.phase),
        "jobId": entry.job_id or None,
        "node": entry.kube_node,
        "gpus": "" if indices is None else format_indices(indices),
        "ends": entry.claim.ends if entry.claim is not None else None,
        "why": entry.why or None,
    }


def _why_waiting(state: State, pod: PodRecord, entry: Entry | None) -> dict[str, Any]:
    if pod.gates and not lift.is_gated(pod):
        return {"text": f"behind the scheduling gate {', '.join(pod.gates)}", "nodes": {}}
    if state.is_stale:
        return {"text": f"Slurm is not readable: {state.poll_failed or 'no answer'}", "nodes": {}}
    ask = resolve(pod, state.settings.policy)
    if isinstance(ask, Refusal):
        return {"text": ask.text, "reason": ask.reason, "nodes": {}}
    if entry is None and pod.gates and (refused := state.waiting.refused(ask, state.now)):
        return {"text": refused, "nodes": {}}
    if entry is not None:
        return {"text": f"its claim is {entry.phase} on {entry.kube_node}", "nodes": {}}
    index = publish.index(state)
    codes = judge(
        ask,
        pod.uid,
        index,
        np.arange(len(index), dtype=np.int32),
        state.wall,
        horizon_minutes=state.settings.policy.plan_horizon_minutes,
    )
    classes: dict[str, list[str]] = {}
    for row, code in enumerate(codes):
        reason = REASONS[int(code)]
        word = "fits" if reason is None else str(reason)
        classes.setdefault(word, []).append(index.names[row])
    texts = texts_for(ask.reservation)
    nodes = {
        word: {
            "count": len(names),
            "text": next((texts[CODES[r]] for r in CODES if str(r) == word), "fits in Slurm"),
            "examples": names[:5],
        }
        for word, names in sorted(classes.items())
    }
    fits = len(classes.get("fits", []))
    text = (
        f"fits on {fits} nodes in Slurm; "
        + ("its claim is being made" if pod.gates else "kube-scheduler has not bound it yet")
        if fits
        else f"fits on none of {len(index)} nodes"
    )
    return {"text": text, "nodes": nodes}


def dump(state: State, story: list[str]) -> bytes:
    """Everything that the core knows, as JSON: for bug reports and offline replay."""
    snapshot = state.snapshot
    value = {
        "status": status(state),
        "story": story,
        "book": [
            {"uid": e.uid, "ref": e.ref, "slurmNode": e.slurm_node, "since": e.since}
            | (_claim(e) or {})
            for e in state.book.values()
        ],
        "pods": list(state.pods.values()),
        "names": state.slurm_of,
        "nodes": list(snapshot.nodes.values()) if snapshot else [],
        "jobs": [
            msgspec.structs.replace(j, comment="") if j.id not in state.ours else j
            for j in (snapshot.jobs.values() if snapshot else [])
        ],
        "reservations": snapshot.reservations if snapshot else [],
        "config": snapshot.config if snapshot else None,
    }
    return msgspec.json.encode(value)
