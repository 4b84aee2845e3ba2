"""Errors over the link, both ways: our error tree <-> gRPC status and trailing metadata.

A definite no (`PeerRejected`) is believed only when it carries our own trailer: a proxy, a full
server or a bug can produce any status, and those say nothing about the question.

| ours | status | kind in the trailer |
|---|---|---|
| PeerRejected, ParseError | FAILED_PRECONDITION | rejected |
| Conflict | ABORTED | conflict |
| not the leader | FAILED_PRECONDITION | not-leader |
| PeerTimeout, TimeoutError | DEADLINE_EXCEEDED | timeout |
| PeerUnavailable, PeerProtocolError | UNAVAILABLE | unavailable |
| too many at once | RESOURCE_EXHAUSTED | overloaded |
| anything else, a bug | INTERNAL | bug |
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import grpc
import msgspec

from slurmbridge.pool.errors import (
    SAMPLE_CHARS,
    UNREADABLE,
    Conflict,
    ParseError,
    PeerError,
    PeerProtocolError,
    PeerRejected,
    PeerTimeout,
    PeerUnavailable,
)

FAULT_KEY: Final = "slurmbridge-fault-bin"

REJECTED: Final = "rejected"
CONFLICT: Final = "conflict"
NOT_LEADER: Final = "not-leader"
TIMEOUT: Final = "timeout"
UNAVAILABLE: Final = "unavailable"
OVERLOADED: Final = "overloaded"
FORBIDDEN: Final = "forbidden"
BUG: Final = "bug"

_CODES: Final = {
    REJECTED: grpc.StatusCode.FAILED_PRECONDITION,
    CONFLICT: grpc.StatusCode.ABORTED,
    NOT_LEADER: grpc.StatusCode.FAILED_PRECONDITION,
    TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    BUG: grpc.StatusCode.INTERNAL,
}


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """The trailer, as JSON. leader: address of the leader, where the answer is not-leader."""

    kind: str
    text: str = ""
    peer: str = ""
    op: str = ""
    reason: str = ""
    leader: str = ""


_decoder: Final = msgspec.json.Decoder(Fault)


def fault_of(error: BaseException) -> Fault:
    """What to tell the client about an error of the bridge."""
    if isinstance(error, Conflict):
        return _of_peer(CONFLICT, error, error.reason)
    if isinstance(error, PeerRejected):
        return _of_peer(REJECTED, error, error.reason)
    if isinstance(error, ParseError):
        return Fault(REJECTED, text=str(error)[: 4 * SAMPLE_CHARS], reason="form")
    if isinstance(error, PeerTimeout):
        return _of_peer(TIMEOUT, error)
    if isinstance(error, PeerUnavailable):
        return _of_peer(UNAVAILABLE, error)
    if isinstance(error, TimeoutError):
        return Fault(TIMEOUT, text="the deadline passed in the bridge")
    # The text of a bug may hold anything: it stays in the bridge's log.
    return Fault(BUG, text=f"{type(error).__name__} in the bridge; see its log")


def _of_peer(kind: str, error: PeerError, reason: str = "") -> Fault:
    op = error.op[:SAMPLE_CHARS]
    return Fault(kind, text=error.text, peer=error.peer, op=op, reason=reason)


async def abort(context: grpc.aio.ServicerContext[Any, Any], fault: Fault) -> NoReturn:
    """End a call with a fault."""
    await context.abort(
        _CODES[fault.kind],
        fault.text[:SAMPLE_CHARS],
        ((FAULT_KEY, msgspec.json.encode(fault)),),
    )


def read_fault(error: grpc.aio.AioRpcError) -> Fault | None:
    """The trailer of a failed call, or None when it has none of ours."""
    for key, value in error.trailing_metadata() or ():
        if key == FAULT_KEY:
            try:
                return _decoder.decode(value)
            except UNREADABLE:
                return None
    return None


def error_of(op: str, error: grpc.aio.AioRpcError) -> PeerError:
    """The error that a failed call means to the caller."""
    fault, code = read_fault(error), error.code()
    details = error.details() or ""
    if fault is None:
        text = f"{code.name}: {details}"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return PeerTimeout("bridge", op, text)
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
            return PeerUnavailable("bridge", op, text)
        return PeerProtocolError("bridge", op, text)
    peer, of_op = fault.peer or "bridge", fault.op or op
    if fault.kind == REJECTED:
        return PeerRejected(peer, of_op, fault.text, fault.reason or "rejected")
    if fault.kind == CONFLICT:
        return Conflict(peer, of_op, fault.text, fault.reason or "conflict")
    if fault.kind == TIMEOUT:
        return PeerTimeout(peer, of_op, fault.text)
    if fault.kind == NOT_LEADER:
        hint = f"; the leader is {fault.leader}" if fault.leader else ""
        return PeerUnavailable(peer, of_op, f"{fault.text}{hint}")
    if fault.kind == BUG:
        return PeerProtocolError(peer, of_op, fault.text)
    return PeerUnavailable(peer, of_op, fault.text)
