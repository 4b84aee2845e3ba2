"""Which object a fault of ours is about: read from the traceback of the exception.

The innermost function that was given a pod, a claim or a job when it failed was about that one. No
code has to say what it is about, and a loop over all pods that fails at one tells which. A wrong
guess costs one object its service and one more restart; `aside.MOST` bounds both.
"""

from __future__ import annotations

import traceback
from types import FrameType
from typing import Final

from slurmbridge.core import event as ev
from slurmbridge.core.aside import MOST, Aside
from slurmbridge.core.state import Entry, State
from slurmbridge.core.waiting import Ticket
from slurmbridge.pool.claim import group_uid
from slurmbridge.pool.record import PodRecord, SlurmJob

PURE: Final = ("slurmbridge.core.", "slurmbridge.pool.", "slurmbridge.topology.")
ERROR_CHARS: Final = 200


def blame(state: State, error: Exception) -> Aside | None:
    """The object to set aside for an exception out of the core.

    Args:
        state: as the exception has left it, perhaps half-changed; only looked at.
        error: with its traceback.

    Returns:
        None: it is about no single object, or about one that is set aside already, or too many are.

    """
    text = f"{type(error).__name__}: {error}"[:ERROR_CHARS]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    pure = [f for f in frames if str(f.f_globals.get("__name__", "")).startswith(PURE)]
    for depth, frame in enumerate(reversed(pure)):
        found = _in_frame(state, frame, text, is_innermost=depth == 0)
        if found is not None:
            known = state.aside.found
            return None if (found.kind, found.key) in known or len(known) >= MOST else found
    return None


def _in_frame(state: State, frame: FrameType, text: str, *, is_innermost: bool) -> Aside | None:
    """What a function is about: by its arguments; where the fault is, by what it had in hand too.

    Not so further out: the variable of a loop that is over names the last object of that loop.
    """
    code, values = frame.f_code, frame.f_locals
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for name in code.co_varnames if is_innermost else arguments:
        value = values.get(name)
        found = _of_uid(state, value, text) if name == "uid" else _of_value(state, value, text)
        if found is not None:
            return found
    return None


def _of_value(state: State, value: object, text: str) -> Aside | None:
    match value:
        case PodRecord():
            return _of_pod(state, value, text)
        case Entry():
            return _of_uid(state, value.uid, text)
        case Ticket():
            return _of_uid(state, value.uid, text)
        case SlurmJob():
            return _of_job(state, value, text)
        case ev.AgentReported():
            return Aside("agent", value.node, value.node, text)
        case ev.PodChanged() | ev.PodGone():
            return _of_pod(state, value.pod, text)
        case ev.Event():
            return _of_uid(state, getattr(value, "uid", ""), text)
        case _:
            return None


def _of_pod(state: State, pod: PodRecord, text: str) -> Aside:
    if pod.group is not None:
        return Aside("gang", group_uid(pod.group.key), pod.group.key, text)
    return Aside("pod", pod.uid, pod.ref, text, alone=pod.uid not in state.pods)


def _of_uid(state: State, uid: object, text: str) -> Aside | None:
    if not isinstance(uid, str) or not uid:
        return None
    pod, entry = state.pods.get(uid), state.book.get(uid)
    if pod is not None:
        return _of_pod(state, pod, text)
    ticket = state.waiting.tickets.get(uid)
    group = uid if ticket is not None or uid in state.live_groups else entry and entry.group
    if group:
        has_pods = any(
            p.group is not None and group_uid(p.group.key) == group for p in state.pods.values()
        )
        ref = ticket.ref if ticket is not None else group
        return Aside("gang", group, ref, text, alone=not has_pods)
    return Aside("pod", uid, uid if entry is None else entry.ref, text, alone=True)


def _of_job(state: State, job: SlurmJob, text: str) -> Aside | None:
    owner = state.ours.get(job.id)
    if owner is not None:
        return _of_uid(state, owner.uid, text)
    return Aside("job", str(job.id), f"Slurm job {job.id}", text)
