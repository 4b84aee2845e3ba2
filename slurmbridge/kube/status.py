"""What an HTTP status of the API server means to us: the one table of it.

A 404 or 409 only counts when Kubernetes itself says so, in a `Status` object about a named thing: a
proxy, an ingress or a half-started API server answers 404 too, and "not found" is what leads to
deletions. Bodies that are no `Status` are not quoted: they may hold anything.

Source: apimachinery `pkg/api/errors` and `metav1.Status`.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec

from slurmbridge.pool.errors import (
    UNREADABLE,
    Conflict,
    PeerBusy,
    PeerError,
    PeerProtocolError,
    PeerRejected,
    PeerUnavailable,
)

PEER: Final = "kube-apiserver"
MOST_RETRY_S: Final = 300.0
"""Longest Retry-After that is obeyed."""


class Cause(msgspec.Struct, frozen=True):
    """One of `details.causes`; reason `DisruptionBudget`: a PodDisruptionBudget refused."""

    reason: str = ""
    message: str = ""


class Details(msgspec.Struct, frozen=True, rename="camel"):
    """`details` of a Status: what it is about. kind is the plural resource (`pods`) or the kind."""

    name: str = ""
    kind: str = ""
    retry_after_seconds: int = 0
    causes: tuple[Cause, ...] | None = None


class Status(msgspec.Struct, frozen=True):
    """`metav1.Status`."""

    kind: str = ""
    reason: str = ""
    message: str = ""
    code: int = 0
    details: Details | None = None

    def has_cause(self, reason: str) -> bool:
        """Whether `details.causes` names this reason."""
        causes = self.details.causes if self.details is not None else None
        return any(c.reason == reason for c in causes or ())


class Answer(msgspec.Struct, frozen=True):
    """One answer of the API server. retry_after_s: its Retry-After header; None: it has none."""

    code: int
    body: bytes
    retry_after_s: float | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the request was carried out (2xx)."""
        return HTTPStatus.OK <= self.code < HTTPStatus.MULTIPLE_CHOICES

    @property
    def status(self) -> Status | None:
        """The Status object in the body; None: the body is something else."""
        return read_status(self.body)


_DECODER: Final = msgspec.json.Decoder(Status)

_INVALID: Final = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.METHOD_NOT_ALLOWED,
        HTTPStatus.NOT_ACCEPTABLE,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    }
)


def read_status(body: bytes) -> Status | None:
    """The Status object in a body, or None."""
    try:
        status = _DECODER.decode(body)
    except UNREADABLE:
        return None
    return status if status.kind == "Status" else None


def error_of(op: str, answer: Answer) -> PeerError:
    """What to raise for an answer that is not 2xx.

    Args:
        op: method and path of the request.
        answer: the answer; or the object of a watch's ERROR event, with its `code`.

    Returns:
        PeerRejected with reason `auth` (401), `forbidden` (403), `notfound` (404 about a named
        object), `unserved` (404 about anything else), `gone` (410), `invalid` (400, 422 ...);
        Conflict with reason `exists` or `conflict` (409); PeerBusy (429) and PeerUnavailable
        (5xx), with `retry_after_s` where given; PeerProtocolError where it is no answer of
        Kubernetes.

    """
    code, status = answer.code, answer.status
    text = f"HTTP {code}"
    if status is not None and status.message:
        text += f": {status.message}"
    if code == HTTPStatus.UNAUTHORIZED:
        return PeerRejected(PEER, op, text, "auth")
    if code == HTTPStatus.FORBIDDEN:
        return PeerRejected(PEER, op, text, "forbidden")
    if code == HTTPStatus.TOO_MANY_REQUESTS:
        return PeerBusy(PEER, op, text, _retry_after(answer, status))
    if code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return PeerUnavailable(PEER, op, text, _retry_after(answer, status))
    if code == HTTPStatus.NOT_FOUND:
        named = status is not None and status.reason == "NotFound" and status.details is not None
        is_object = named and status.details.name != ""  # type: ignore[union-attr]
        return PeerRejected(PEER, op, text, "notfound" if is_object else "unserved")
    if status is None:
        return PeerProtocolError(PEER, op, f"{text} with a body that is not from Kubernetes")
    if code == HTTPStatus.CONFLICT:
        reason = "exists" if status.reason == "AlreadyExists" else "conflict"
        return Conflict(PEER, op, text, reason)
    if code == HTTPStatus.GONE:
        return PeerRejected(PEER, op, text, "gone")
    if code in _INVALID:
        return PeerRejected(PEER, op, text, "invalid")
    if HTTPStatus.BAD_REQUEST < code < HTTPStatus.INTERNAL_SERVER_ERROR:
        return PeerRejected(PEER, op, text)
    return PeerProtocolError(PEER, op, f"{text} is no status that we know")


def _retry_after(answer: Answer, status: Status | None) -> float | None:
    asked = answer.retry_after_s
    if asked is None and status is not None and status.details is not None:
        asked = float(status.details.retry_after_seconds) or None
    return None if asked is None else max(0.0, min(asked, MOST_RETRY_S))
