"""What we change in the API server: bindings, annotations, gates, conditions, evictions.

Every write is idempotent and names the UID it is meant for, so that a repeated or late one does no
harm: it never hits a new pod under an old name. Writes are patches of single keys, never of whole
objects, so that two writers keep each other's keys; each patch says its content type, because the
server's default differs.

`False` means: there is no such object (any more), said by the API server itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from slurmbridge.kube.session import JSON, MERGE_PATCH, STRATEGIC_PATCH, resource_path
from slurmbridge.kube.status import PEER, Answer, error_of
from slurmbridge.pool.errors import (
    UNREADABLE,
    Conflict,
    PeerProtocolError,
    PeerRejected,
    PeerUnavailable,
)
from slurmbridge.pool.podspec import read_pod
from slurmbridge.pool.raw import RawPod

if TYPE_CHECKING:
    from slurmbridge.pool.record import PodRecord

Annotations = Mapping[str, str | None]
"""Annotations to set; None removes a key."""

DEADLINE_S: Final = 5.0
"""Deadline of one write; the API server answers in milliseconds or not at all."""
EVICT_S: Final = 15.0
"""Deadline of an eviction: the API server retries conflicts by itself for up to ten seconds."""

_POD: Final = msgspec.json.Decoder(RawPod)


class Api(Protocol):
    """The part of `KubeSession` that is needed here."""

    async def exchange(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = JSON,
        params: Mapping[str, str] | None = None,
        deadline_s: float = 10.0,
    ) -> Answer:
        """See `KubeSession.exchange`."""


async def fetch_raw_pod(
    api: Api, namespace: str, name: str, uid: str = "", deadline_s: float = DEADLINE_S
) -> RawPod | None:
    """The pod as it is now (a consistent read), or None: there is none with this name and UID.

    Raises:
        PeerError: no answer, which says nothing about the pod.

    """
    path = resource_path("api", "v1", "namespaces", namespace, "pods", name)
    answer = await api.exchange("GET", path, deadline_s=deadline_s)
    if not answer.is_ok:
        error = error_of(f"GET {path}", answer)
        if isinstance(error, PeerRejected) and error.reason == "notfound":
            return None
        raise error
    try:
        raw = _POD.decode(answer.body)
    except UNREADABLE as error:
        raise PeerProtocolError(PEER, f"GET {path}", str(error)) from error
    if not raw.metadata.uid:
        raise PeerProtocolError(PEER, f"GET {path}", "the answer is no pod")
    return raw if uid in ("", raw.metadata.uid) else None


async def fetch_pod(
    api: Api,
    namespace: str,
    name: str,
    resources: Mapping[str, str],
    uid: str = "",
    deadline_s: float = DEADLINE_S,
) -> PodRecord | None:
    """Like `fetch_raw_pod`, as a record. resources: as in `slurmbridge.pool.podspec.read_pod`."""
    raw = await fetch_raw_pod(api, namespace, name, uid, deadline_s)
    return None if raw is None else read_pod(raw, resources)


async def post_binding(
    api: Api,
    namespace: str,
    name: str,
    uid: str,
    node: str,
    annotations: Mapping[str, str],
    deadline_s: float = DEADLINE_S,
) -> None:
    """Bind a pod to a node; its annotations reach the pod in the same write.

    A pod that is bound to this node already (an earlier try of ours whose answer was lost) is a
    success. After silence the pod is looked at once more, since the binding may have been made.

    Raises:
        PeerRejected: reason `notfound`: there is no pod with this UID.
        Conflict: reason `elsewhere`: it is bound to another node; or `conflict`: someone else wrote
            in between and it is not bound.
        PeerUnavailable: nobody can say; the pod may or may not be bound.

    """
    path = resource_path("api", "v1", "namespaces", namespace, "pods", name, "binding")
    op = f"POST {path}"
    body = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "uid": uid, "annotations": dict(annotations)},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
    failure: Exception
    try:
        answer = await api.exchange("POST", path, body, deadline_s=deadline_s)
        if answer.is_ok:
            return
        failure = error_of(op, answer)
        if isinstance(failure, PeerRejected) and not isinstance(failure, Conflict):
            raise failure
    except PeerUnavailable as error:
        failure = error
    raw = await fetch_raw_pod(api, namespace, name, uid, deadline_s)
    if raw is None:
        raise PeerRejected(PEER, op, f"there is no pod {namespace}/{name} {uid}", "notfound")
    bound = raw.spec.node_name or ""
    if bound == node:
        return
    if bound:
        raise Conflict(PEER, op, f"the pod is bound to {bound}", "elsewhere") from failure
    raise failure


async def patch_pod_annotations(
    api: Api, namespace: str, name: str, uid: str, annotations: Annotations
) -> bool:
    """Set or remove annotations of the pod with this UID."""
    path = resource_path("api", "v1", "namespaces", namespace, "pods", name)
    body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
    return await _patch_pod(api, path, body, MERGE_PATCH, (namespace, name, uid))


async def lift_gate(
    api: Api, namespace: str, name: str, uid: str, gate: str, annotations: Annotations
) -> bool:
    """Take our scheduling gate off and set annotations, in one write; other gates stay.

    Lifting a gate that is not there changes nothing.
    """
    path = resource_path("api", "v1", "namespaces", namespace, "pods", name)
    body = {
        "metadata": {"uid": uid, "annotations": dict(annotations)},
        "spec": {"schedulingGates": [{"$patch": "delete", "name": gate}]},
    }
    return await _patch_pod(api, path, body, STRATEGIC_PATCH, (namespace, name, uid))


async def nominate_node(
    api: Api, namespace: str, name: str, uid: str, node: str, *, is_anew: bool = False
) -> bool:
    """Set the pod's `status.nominatedNodeName` (Kubernetes >= 1.35 heeds it from outside).

    is_anew: kube-scheduler may have refused the pod before. Its condition says so no more: what it
    thinks of this node is news then, even if its words are the same.
    """
    path = resource_path("api", "v1", "namespaces", namespace, "pods", name, "status")
    status: dict[str, object] = {"nominatedNodeName": node}
    if is_anew:
        told = {"type": "PodScheduled", "status": "False", "reason": "ClaimedAnew"}
        told["message"] = f"slurmbridge: a claim is held for the pod on {node}"
        status["conditions"] = [told]
    body = {"metadata": {"uid": uid}, "status": status}
    return await _patch_pod(api, path, body, STRATEGIC_PATCH, (namespace, name, uid))


async def evict_pod(
    api: Api, namespace: str, name: str, uid: str, grace_s: int | None = None
) -> bool:
    """Ask for the pod's eviction; disruption budgets are obeyed, its grace period runs.

    Args:
        api: the session.
        namespace: of the pod.
        name: of the pod.
        uid: of the pod.
        grace_s: seconds, at least 1; None: the pod's own.

    Raises:
        PeerRejected: reason `pdb`: a PodDisruptionBudget does not allow it now.

    """
    # The API server itself retries a UID that does not match, for ten seconds (measured on 1.37).
    if await fetch_raw_pod(api, namespace, name, uid) is None:
        return False
    path = resource_path("api", "v1", "namespaces", namespace, "pods", name, "eviction")
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": _delete_options(uid, grace_s),
    }
    return await _end_pod(api, "POST", path, body, (namespace, name, uid), EVICT_S)


async def delete_pod(
    api: Api, namespace: str, name: str, uid: str, grace_s: int | None = None
) -> bool:
    """Delete the pod without asking disruption budgets; grace_s as in `evict_pod`."""
    path = resource_path("api", "v1", "namespaces", namespace, "pods", name)
    body = _delete_options(uid, grace_s)
    return await _end_pod(api, "DELETE", path, body, (namespace, name, uid), DEADLINE_S)


async def patch_node_annotations(api: Api, node: str, annotations: Annotations) -> bool:
    """Set or remove annotations of a node."""
    path = resource_path("api", "v1", "nodes", node)
    body = {"metadata": {"annotations": dict(annotations)}}
    return await _patch_node(api, path, body, MERGE_PATCH)


async def patch_node_condition(
    api: Api, node: str, condition: str, *, status: bool, reason: str, message: str, since: float
) -> bool:
    """Set one condition of a node; those of others stay.

    Args:
        api: the session.
        node: its name.
        condition: type of the condition, e.g. `SlurmAvailable`.
        status: `True` or `False`.
        reason: one CamelCase word.
        message: for people.
        since: Unix seconds of the last change of `status`.

    """
    path = resource_path("api", "v1", "nodes", node, "status")
    entry = {
        "type": condition,
        "status": "True" if status else "False",
        "reason": reason,
        "message": message,
        "lastTransitionTime": rfc3339(since),
    }
    body = {"status": {"conditions": [entry]}}
    return await _patch_node(api, path, body, STRATEGIC_PATCH)


def rfc3339(moment: float, *, micro: bool = False) -> str:
    """Unix seconds as Kubernetes writes a Time (whole seconds) or a MicroTime."""
    text = datetime.fromtimestamp(moment, UTC).isoformat(
        timespec="microseconds" if micro else "seconds"
    )
    return text.replace("+00:00", "Z")


def _delete_options(uid: str, grace_s: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": {"uid": uid},
    }
    if grace_s is not None:
        # With 0 the object vanishes at once while its processes live on (3 s, measured).
        options["gracePeriodSeconds"] = max(1, grace_s)
    return options


async def _patch_node(api: Api, path: str, body: object, content_type: str) -> bool:
    answer = await api.exchange(
        "PATCH", path, body, content_type=content_type, deadline_s=DEADLINE_S
    )
    if answer.is_ok:
        return True
    error = error_of(f"PATCH {path}", answer)
    if isinstance(error, PeerRejected) and error.reason == "notfound":
        return False
    raise error


async def _patch_pod(
    api: Api, path: str, body: object, content_type: str, pod: tuple[str, str, str]
) -> bool:
    answer = await api.exchange(
        "PATCH", path, body, content_type=content_type, deadline_s=DEADLINE_S
    )
    return answer.is_ok or await _is_there(api, f"PATCH {path}", answer, pod)


async def _end_pod(
    api: Api,
    method: str,
    path: str,
    body: object,
    pod: tuple[str, str, str],
    deadline_s: float,
) -> bool:
    answer = await api.exchange(method, path, body, deadline_s=deadline_s)
    if answer.is_ok:
        return True
    status = answer.status if answer.code == HTTPStatus.TOO_MANY_REQUESTS else None
    if status is not None and status.has_cause("DisruptionBudget"):
        raise PeerRejected(PEER, f"{method} {path}", status.message, "pdb")
    return await _is_there(api, f"{method} {path}", answer, pod)


async def _is_there(api: Api, op: str, answer: Answer, pod: tuple[str, str, str]) -> bool:
    """False when a refusal means that the pod is gone; raises what it means otherwise.

    A UID that does not match is a 409 of a deletion and a 422 of a patch (measured on 1.37), and
    both can be something else: only a look at the pod tells.
    """
    error = error_of(op, answer)
    if isinstance(error, PeerRejected):
        if error.reason == "notfound":
            return False
        if error.reason in ("conflict", "invalid") and await fetch_raw_pod(api, *pod) is None:
            return False
    raise error
