"""Answers to those who ask for a claim. Each op is answered exactly once."""

from __future__ import annotations

from slurmbridge.core import agents
from slurmbridge.core.action import Reply
from slurmbridge.core.evidence import others_on
from slurmbridge.core.state import Entry, State
from slurmbridge.pool.gres import format_indices
from slurmbridge.pool.reason import Reason


def yes(state: State, op: int, entry: Entry) -> None:
    """The asker may bind. Not where no agent is: the kubelet fails a pod without one for good."""
    if not agents.takes_pods(state, entry.kube_node):
        later(state, op, Reason.NO_AGENT.text)
        return
    entry.promised += 1
    entry.pod_looking = None
    indices = entry.gpus.indices
    gpus = "" if indices is None else format_indices(indices)
    state.out.append(Reply(op, job_id=entry.job_id, gpus=gpus))


def held(state: State, op: int, entry: Entry) -> None:
    """The asker may bind with a held claim, unless something is wrong with that by now."""
    if entry.claim is None or entry.suspect:
        later(state, op, f"the pod's claim is {entry.phase}, and not certain now")
    elif others_on(state, entry, entry.gpus):
        # Another pod has turned up on its GPUs: bound late, with a claim that is forgotten.
        later(state, op, "another pod may still use the GPUs of its claim")
    else:
        yes(state, op, entry)


def no(state: State, op: int, reason: str, text: str) -> None:
    """A refusal: it will not help to ask the same again soon."""
    state.out.append(Reply(op, reason=reason, text=text))


def later(state: State, op: int, text: str) -> None:
    """Nothing was decided: ask again."""
    state.out.append(Reply(op, reason="unavailable", text=text, unavailable=True))


def all_no(state: State, entry: Entry, reason: str, text: str) -> None:
    """Refuse everybody who waits for an entry."""
    for op in entry.waiters:
        no(state, op, reason, text)
    entry.waiters.clear()


def all_later(state: State, entry: Entry, text: str) -> None:
    """Send everybody away who waits for an entry."""
    for op in entry.waiters:
        later(state, op, text)
    entry.waiters.clear()
