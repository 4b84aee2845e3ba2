"""What an HTTP status of the API server means to us."""

from __future__ import annotations

import json

import pytest

from slurmbridge.kube.status import MOST_RETRY_S, Answer, error_of, read_status
from slurmbridge.pool.errors import (
    Conflict,
    PeerBusy,
    PeerError,
    PeerProtocolError,
    PeerRejected,
    PeerUnavailable,
)

HTML = b"<html><title>404 Not Found</title> secret=hunter2</html>"


def status(code: int, reason: str = "", *, details: object = None) -> Answer:
    body = {"kind": "Status", "apiVersion": "v1", "message": "why", "reason": reason, "code": code}
    if details is not None:
        body["details"] = details
    return Answer(code, json.dumps(body).encode())


POD = {"name": "p1", "kind": "pods"}

REFUSALS = {
    "bad token": (status(401, "Unauthorized"), PeerRejected, "auth"),
    "bad token, said by a proxy": (Answer(401, HTML), PeerRejected, "auth"),
    "no right": (status(403, "Forbidden", details=POD), PeerRejected, "forbidden"),
    "no such pod": (status(404, "NotFound", details=POD), PeerRejected, "notfound"),
    "no such kind of thing": (status(404, "NotFound", details={}), PeerRejected, "unserved"),
    "404 without details": (status(404, "NotFound"), PeerRejected, "unserved"),
    "no such API group": (Answer(404, b"404 page not found\n"), PeerRejected, "unserved"),
    "404 of a proxy": (Answer(404, HTML), PeerRejected, "unserved"),
    "someone else wrote": (status(409, "Conflict", details=POD), Conflict, "conflict"),
    "there is one": (status(409, "AlreadyExists", details=POD), Conflict, "exists"),
    "too old": (status(410, "Expired"), PeerRejected, "gone"),
    "bad patch": (status(400, "BadRequest"), PeerRejected, "invalid"),
    "annotations too large": (status(422, "Invalid", details=POD), PeerRejected, "invalid"),
    "wrong content type": (status(415, "UnsupportedMediaType"), PeerRejected, "invalid"),
    "a teapot": (status(418), PeerRejected, "rejected"),
}


@pytest.mark.parametrize(("answer", "kind", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_a_definite_no_has_a_reason(answer: Answer, kind: type[PeerError], reason: str) -> None:
    error = error_of("GET /x", answer)
    assert type(error) is kind
    assert isinstance(error, PeerRejected)
    assert error.reason == reason


SILENCES = {
    "overloaded": (status(429, "TooManyRequests"), PeerBusy),
    "server error": (status(500, "InternalError"), PeerUnavailable),
    "no leader in etcd": (status(503, "ServiceUnavailable"), PeerUnavailable),
    "gateway": (Answer(502, HTML), PeerUnavailable),
    "409 of a proxy": (Answer(409, HTML), PeerProtocolError),
    "410 of a proxy": (Answer(410, HTML), PeerProtocolError),
    "redirect": (status(302), PeerProtocolError),
    "a number that is no status": (status(0), PeerProtocolError),
}


@pytest.mark.parametrize(("answer", "kind"), SILENCES.values(), ids=SILENCES)
def test_what_says_nothing_about_the_question_is_no_answer(
    answer: Answer, kind: type[PeerError]
) -> None:
    error = error_of("GET /x", answer)
    assert type(error) is kind
    assert isinstance(error, PeerUnavailable)


def test_a_body_that_is_not_from_kubernetes_is_never_quoted() -> None:
    for code in (401, 403, 404, 409, 429, 500):
        assert "hunter2" not in str(error_of("GET /x", Answer(code, HTML)))


WAITS = {
    "header": (Answer(429, b"", retry_after_s=3.0), 3.0),
    "body": (status(429, details={"retryAfterSeconds": 7}), 7.0),
    "neither": (status(429), None),
    "absurd": (Answer(503, b"", retry_after_s=1e9), MOST_RETRY_S),
    "negative": (Answer(503, b"", retry_after_s=-4.0), 0.0),
}


@pytest.mark.parametrize(("answer", "expected"), WAITS.values(), ids=WAITS)
def test_the_wait_that_the_server_asks_for_is_kept_within_bounds(
    answer: Answer, expected: float | None
) -> None:
    error = error_of("GET /x", answer)
    assert isinstance(error, PeerUnavailable)
    assert error.retry_after_s == expected


def test_only_a_status_object_is_a_status() -> None:
    assert read_status(b'{"kind":"Pod","code":404}') is None
    assert read_status(b"") is None
    assert read_status(b"\xff\xfe") is None
    assert read_status(b'[{"kind":"Status"}]') is None
