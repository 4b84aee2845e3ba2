"""List and watch, against a scripted server: every way in which it may fail."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
import pytest

from slurmbridge.kube.reflector import (
    IDLE_S,
    LIST_S,
    MOST_EMPTY,
    SPACE_S,
    WATCH_S,
    Added,
    Change,
    Deleted,
    Listed,
    Modified,
    Reflector,
)
from slurmbridge.pool.errors import (
    AnswerTooLong,
    ParseError,
    PeerBusy,
    PeerError,
    PeerProtocolError,
    PeerRejected,
    PeerTimeout,
    PeerUnavailable,
    SlurmBridgeError,
)
from tests.support.clock import HandClock

PEER = "kube-apiserver"


class Thing(msgspec.Struct, frozen=True):
    name: str
    resource_version: str


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    resource_version: str


class _Raw(msgspec.Struct):
    metadata: _Meta


def decode(raw: bytes) -> Thing | None:
    meta = msgspec.json.decode(raw, type=_Raw).metadata
    if meta.name.startswith("odd"):
        raise ParseError(meta.name, "odd")
    return None if meta.name.startswith("dull") else Thing(meta.name, meta.resource_version)


def obj(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def listing(version: int, *objects: dict[str, Any], token: str = "") -> bytes:
    meta = {"resourceVersion": str(version), "continue": token}
    return json.dumps({"kind": "PodList", "metadata": meta, "items": list(objects)}).encode()


def event(kind: str, name: str, version: int) -> bytes:
    return json.dumps({"type": kind, "object": obj(name, version)}).encode()


def bookmark(version: int) -> bytes:
    return json.dumps(
        {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}
    ).encode()


def error_line(code: int) -> bytes:
    status = {"kind": "Status", "code": code, "reason": "Expired", "message": "too old"}
    return json.dumps({"type": "ERROR", "object": status}).encode()


GONE = PeerRejected(PEER, "WATCH", "HTTP 410", "gone")
DOWN = PeerUnavailable(PEER, "WATCH", "connection refused")
BUSY = PeerBusy(PEER, "WATCH", "HTTP 429")
SILENT = PeerTimeout(PEER, "WATCH", "idle")

Script = list[bytes | Exception]


class Server:
    """Answers lists and watches from two scripts; a watch script is a list of lines and errors."""

    def __init__(self, lists: list[bytes | Exception], watches: list[Script]) -> None:
        self._lists = list(lists)
        self._watches = list(watches)
        self.asked: list[Mapping[str, str]] = []
        self.watched: list[str] = []

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        params: Mapping[str, str] | None = None,
        deadline_s: float = 10.0,
    ) -> bytes:
        assert (method, path, body, deadline_s) == ("GET", "/api/v1/things", None, LIST_S)
        self.asked.append(params or {})
        answer = self._lists.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def stream(
        self, path: str, params: Mapping[str, str], *, idle_s: float, total_s: float
    ) -> AsyncGenerator[bytes, None]:
        assert path == "/api/v1/things"
        assert params["watch"] == params["allowWatchBookmarks"] == "true"
        assert WATCH_S <= int(params["timeoutSeconds"]) < total_s
        assert idle_s == IDLE_S
        self.watched.append(params["resourceVersion"])
        for line in self._watches.pop(0):
            if isinstance(line, Exception):
                raise line
            yield line


class Story:
    """A reflector before a scripted server, with what it told."""

    def __init__(self, lists: list[bytes | Exception], watches: list[Script], **how: Any) -> None:
        self.server = Server(lists, watches)
        self.clock = HandClock()
        self.told: list[Change[Thing]] = []
        self.errors: list[SlurmBridgeError] = []
        self.reflector: Reflector[Thing] = Reflector(
            self.server,
            "/api/v1/things",
            decode,
            clock=self.clock,
            uniform=lambda: 0.0,
            report=self.errors.append,
            **how,
        )

    async def take(self, change: Change[Thing]) -> None:
        self.told.append(change)

    async def steps(self, count: int) -> list[float]:
        return [await self.reflector.step(self.take) for _ in range(count)]

    @property
    def names(self) -> list[str]:
        return [
            "+".join(["list", *(i.name for i in c.items)])
            if isinstance(c, Listed)
            else f"{type(c).__name__.lower()} {c.item.name}"
            for c in self.told
        ]


async def test_a_list_of_another_cluster_is_never_told() -> None:
    answers = [PeerProtocolError(PEER, "GET", "another cluster answers"), None]

    async def check() -> None:
        if error := answers.pop(0):
            raise error

    lists: list[bytes | Exception] = [listing(5), listing(6, obj("a", 3))]
    story = Story(lists, [[]], check=check)
    await story.steps(2)
    assert story.names == ["list+a"]
    assert "another cluster" in str(story.errors[0])


async def test_a_list_comes_first_and_changes_after_it() -> None:
    story = Story(
        [listing(5, obj("a", 3), obj("b", 4))],
        [[event("ADDED", "c", 6), event("MODIFIED", "a", 7), event("DELETED", "b", 8)]],
    )
    assert await story.steps(1) == [SPACE_S]
    a, b, c = Thing("a", "3"), Thing("b", "4"), Thing("c", "6")
    assert story.told == [
        Listed((a, b)),
        Added(c),
        Modified(Thing("a", "7")),
        Deleted(Thing("b", "8")),
    ]
    assert story.server.watched == ["5"]


async def test_a_watch_goes_on_where_the_last_one_ended() -> None:
    story = Story(
        [listing(5)],
        [[event("ADDED", "a", 6)], [bookmark(9)], [event("DELETED", "a", 12)], []],
    )
    await story.steps(4)
    assert story.server.watched == ["5", "6", "9", "12"]
    assert story.names == ["list", "added a", "deleted a"]


async def test_long_lists_come_in_pages_of_one_version() -> None:
    story = Story(
        [listing(5, obj("a", 1), token="t1"), listing(5, obj("b", 2), token="t2"), listing(5)],
        [[]],
        selection={"labelSelector": "x=y"},
        page=1,
    )
    await story.steps(1)
    assert story.names == ["list+a+b"]
    assert story.server.asked == [
        {"labelSelector": "x=y", "limit": "1"},
        {"labelSelector": "x=y", "limit": "1", "continue": "t1"},
        {"labelSelector": "x=y", "limit": "1", "continue": "t2"},
    ]


async def test_a_page_that_comes_too_late_leads_to_one_list_in_one_piece() -> None:
    story = Story(
        [listing(5, obj("a", 1), token="t1"), GONE, listing(9, obj("a", 1), obj("b", 2))], [[]]
    )
    await story.steps(1)
    assert story.names == ["list+a+b"]
    assert "limit" not in story.server.asked[2]
    assert story.server.watched == ["9"]


TOO_LONG = AnswerTooLong(PEER, "GET", "answer above 1 bytes")


async def test_where_objects_are_too_fat_for_a_page_fewer_are_asked_for() -> None:
    lists = [
        listing(5, obj("a", 1), token="next"),
        TOO_LONG,
        TOO_LONG,
        listing(5, obj("b", 2), token="last"),
        listing(5, obj("c", 3)),
    ]
    story = Story(lists, [[]], page=20)
    await story.steps(1)
    assert story.names == ["list+a+b+c"]
    asked = [(params["limit"], params.get("continue")) for params in story.server.asked]
    assert asked == [
        ("20", None), ("20", "next"), ("5", "next"), ("1", "next"), ("1", "last"),
    ]  # fmt: skip
    assert story.errors == []


async def test_one_object_that_is_too_long_alone_is_an_error() -> None:
    story = Story([TOO_LONG, TOO_LONG, listing(5, obj("a", 1))], [[]], page=3)
    await story.steps(1)
    assert story.errors == [TOO_LONG]
    await story.steps(1)
    assert story.names == ["list+a"]


async def test_half_a_list_is_never_told() -> None:
    story = Story([listing(5, obj("a", 1), token="t1"), DOWN, listing(6, obj("b", 2))], [[]])
    await story.steps(2)
    assert story.names == ["list+b"]


TOO_OLD: dict[str, Script] = {"as HTTP status": [GONE], "as event in the stream": [error_line(410)]}


@pytest.mark.parametrize("script", TOO_OLD.values(), ids=TOO_OLD)
async def test_a_version_that_is_too_old_leads_to_a_list(script: Script) -> None:
    story = Story([listing(5, obj("a", 1)), listing(9)], [script, [bookmark(10)]])
    await story.steps(2)
    assert story.names == ["list+a", "list"]  # the consumer sees that a is gone
    assert story.server.watched == ["5", "9"]


async def test_gone_again_and_again_is_asked_ever_less_often() -> None:
    story = Story([listing(v) for v in range(8)], [[GONE]] * 8)
    delays = await story.steps(8)
    assert delays == sorted(delays)
    assert delays[-1] > 50 * delays[0]


async def test_a_server_that_closes_each_watch_at_once_is_asked_ever_less_often() -> None:
    story = Story([listing(v) for v in range(9)], [[] for _ in range(9)])
    delays = await story.steps(9)
    assert delays[0] > 0
    assert delays == sorted(delays)
    assert delays[-1] >= 15.0
    assert story.reflector.lists == 9 // MOST_EMPTY  # and the version is doubted at times


async def test_a_watch_that_says_something_resets_the_delay() -> None:
    story = Story([listing(1), listing(2)], [[GONE], [bookmark(3), DOWN], [BUSY], [bookmark(4)]])
    first, after_talk, second, last = await story.steps(4)
    assert (first, after_talk, second, last) == (0.1, 0.1, 0.2, SPACE_S)


async def test_a_lost_connection_goes_on_without_a_list() -> None:
    story = Story([listing(5)], [[event("ADDED", "a", 6), DOWN], [bookmark(7)]])
    await story.steps(2)
    assert story.reflector.lists == 1
    assert story.server.watched == ["5", "6"]


async def test_a_server_that_was_away_may_have_been_set_back_and_is_listed() -> None:
    """It takes a version of its future, and leaves out what happens until it is there again."""
    story = Story(
        [listing(500, obj("a", 400)), listing(20, obj("a", 10))],
        [[event("MODIFIED", "a", 501), DOWN], [DOWN], [event("MODIFIED", "a", 21)]],
    )
    await story.steps(3)
    assert story.names == ["list+a", "modified a", "list+a", "modified a"]
    assert story.server.watched == ["500", "501", "20"]


async def test_a_server_that_is_busy_was_not_away() -> None:
    story = Story([listing(5)], [[BUSY], [BUSY], [BUSY], [bookmark(7)]])
    await story.steps(4)
    assert story.reflector.lists == 1


async def test_silence_from_the_first_moment_leads_to_a_list() -> None:
    # A dead peer; or, after a restore of etcd, a version that lies in the future.
    story = Story([listing(500), listing(20)], [[SILENT], [bookmark(21)]])
    await story.steps(2)
    assert story.server.watched == ["500", "20"]


async def test_silence_after_some_talk_goes_on_where_it_was() -> None:
    story = Story([listing(5)], [[bookmark(8), SILENT], [bookmark(9)]])
    await story.steps(2)
    assert story.server.watched == ["5", "8"]


async def test_a_torn_line_goes_on_where_it_was() -> None:
    torn = event("ADDED", "b", 7)[:20]
    story = Story([listing(5)], [[event("ADDED", "a", 6), torn], [event("ADDED", "b", 7)]])
    await story.steps(2)
    assert story.names == ["list", "added a", "added b"]
    assert story.server.watched == ["5", "6"]
    assert isinstance(story.errors[0], PeerProtocolError)


ODD: dict[str, bytes] = {
    "object that cannot be decoded": event("ADDED", "odd", 7),
    "unknown event": event("EXPLODED", "a", 7),
    "wrong type": b'{"type":"ADDED","object":{"metadata":{"name":3}}}',
    "no JSON": b"\xff",
    "list in place of object": b"[]",
    "nested without end": b'{"type":"ADDED","object":{"metadata":{"x":' + b"[" * 100_000,
    "nested and closed": event("ADDED", "a", 7)[:-2] + b',"x":' + b"[" * 5000 + b"]" * 5000 + b"}}",
}


@pytest.mark.parametrize("line", ODD.values(), ids=ODD)
async def test_an_odd_line_is_loud_and_repeated_and_then_leads_to_a_list(line: bytes) -> None:
    story = Story([listing(5), listing(9, obj("a", 8))], [[line]] * MOST_EMPTY + [[]])
    await story.steps(MOST_EMPTY + 1)
    assert len(story.errors) == MOST_EMPTY
    assert all(isinstance(e, PeerProtocolError) for e in story.errors)
    assert story.names == ["list", "list+a"]


@pytest.mark.parametrize(
    "answer",
    [listing(5, obj("a", 1), obj("odd", 2)), b'{"metadata":{},"items":[' + b"[" * 100_000],
    ids=["an object that cannot be decoded", "nested without end"],
)
async def test_a_list_with_an_odd_object_is_no_list(answer: bytes) -> None:
    story = Story([answer], [])
    await story.steps(1)
    assert story.told == []
    assert story.reflector.age_s == float("inf")


async def test_an_error_event_other_than_gone_keeps_the_version_where_the_watch_has_spoken() -> (
    None
):
    story = Story([listing(5), listing(7)], [[bookmark(6), error_line(500)], [error_line(500)], []])
    await story.steps(3)
    assert story.server.watched == ["5", "6", "7"]
    assert type(story.errors[0]) is PeerUnavailable


async def test_objects_of_no_interest_are_left_out_but_move_the_version() -> None:
    story = Story(
        [listing(5, obj("dull", 1), obj("a", 2))], [[event("MODIFIED", "dull", 6)], [bookmark(7)]]
    )
    await story.steps(2)
    assert story.names == ["list+a"]
    assert story.server.watched == ["5", "6"]


async def test_a_consumer_that_fails_gets_the_change_again() -> None:
    story = Story([listing(5)], [[event("ADDED", "a", 6)], [event("ADDED", "a", 6)]])

    async def fail(change: Change[Thing]) -> None:
        match change:
            case Added():
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await story.reflector.step(fail)
    await story.steps(1)
    assert story.names == ["added a"]
    assert story.server.watched == ["5", "5"]


async def test_a_consumer_that_fails_on_the_list_gets_a_list_again() -> None:
    story = Story([listing(5), listing(6)], [[]])

    async def fail(_: Change[Thing]) -> None:
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        await story.reflector.step(fail)
    await story.steps(1)
    assert story.names == ["list"]


async def test_the_wait_that_the_server_asks_for_is_obeyed() -> None:
    story = Story([PeerUnavailable(PEER, "GET", "overloaded", 12.0)], [])
    assert await story.steps(1) == [12.0]


async def test_refusals_are_told_and_asked_ever_less_often() -> None:
    refusal = PeerRejected(PEER, "GET", "no right", "forbidden")
    story = Story([refusal] * 4, [])
    assert await story.steps(4) == [0.1, 0.2, 0.4, 0.8]
    assert story.errors == [refusal] * 4
    assert story.reflector.failures == 4


async def test_the_age_is_the_time_since_the_server_last_spoke() -> None:
    story = Story([listing(5)], [[], [bookmark(6)], []])
    assert story.reflector.age_s == float("inf")
    await story.steps(1)
    await story.clock.advance(40)
    assert story.reflector.age_s == 40
    await story.steps(1)
    assert story.reflector.age_s == 0
    await story.clock.advance(7)
    await story.steps(1)  # a watch that ends without a word is no sign of life
    assert story.reflector.age_s == 7


async def test_no_change_is_lost_whatever_fails_and_whenever() -> None:
    """Cut one history of changes at every place, in every way: the consumer ends up the same."""
    history = [("ADDED", "a", 6), ("ADDED", "b", 7), ("DELETED", "a", 8), ("MODIFIED", "b", 9)]
    failures: list[Callable[[], PeerError]] = [
        lambda: DOWN,
        lambda: GONE,
        lambda: SILENT,
        lambda: PeerProtocolError(PEER, "WATCH", "torn"),
    ]
    for cut in range(len(history) + 1):
        for failure in failures:
            server = LiveServer(history, cut, failure())
            story = Story([], [])
            story.reflector._source = server
            known: dict[str, str] = {}

            async def take(change: Change[Thing], known: dict[str, str] = known) -> None:
                match change:
                    case Listed(items):
                        known.clear()
                        known.update((i.name, i.resource_version) for i in items)
                    case Deleted(item):
                        known.pop(item.name, None)
                    case Added(item) | Modified(item):
                        known[item.name] = item.resource_version

            for _ in range(3):
                await story.reflector.step(take)
            assert known == {"b": "9"}, (cut, failure())


class LiveServer:
    """Has a history; its first watch fails after `cut` events. Lists are as of their moment."""

    def __init__(self, history: list[tuple[str, str, int]], cut: int, failure: Exception) -> None:
        self._history = history
        self._cut = cut
        self._failure: Exception | None = failure
        self._now = 5

    async def request(self, *_: object, **__: object) -> bytes:
        state: dict[str, int] = {}
        for kind, name, version in self._history:
            if version <= self._now:
                state.pop(name, None)
                if kind != "DELETED":
                    state[name] = version
        return listing(self._now, *(obj(n, v) for n, v in state.items()))

    async def stream(
        self, _: str, params: Mapping[str, str], **__: object
    ) -> AsyncGenerator[bytes, None]:
        since = int(params["resourceVersion"])
        for count, (kind, name, version) in enumerate(self._history):
            if self._failure is not None and count >= self._cut:
                failure, self._failure, self._now = self._failure, None, 9
                raise failure
            if version > since:
                self._now = max(self._now, version)
                yield event(kind, name, version)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
