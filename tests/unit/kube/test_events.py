"""Events for people: one line for a thousand repetitions, and never a wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import pytest

from slurmbridge.kube.events import (
    BURST,
    FORGET_S,
    LATE_S,
    MESSAGE_CHARS,
    QUEUE_MAX,
    REFILL_S,
    REPEAT_S,
    EventTeller,
    Subject,
)
from slurmbridge.kube.status import PEER, Answer
from slurmbridge.pool.errors import PeerUnavailable
from tests.support.clock import HandClock, settle

POD = Subject("Pod", "train-0", "uid-1", "team-a")
NODE = Subject("Node", "gpu-1", "uid-2")


class Server:
    """Keeps events by path; may be down, or refuse."""

    def __init__(self) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.writes: list[str] = []
        self.is_down = False
        self.refusal: Answer | None = None

    async def exchange(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
        params: Mapping[str, str] | None = None,
        deadline_s: float = 10.0,
    ) -> Answer:
        await asyncio.sleep(0)
        if self.is_down:
            raise PeerUnavailable(PEER, method, "down")
        if self.refusal is not None:
            return self.refusal
        self.writes.append(method)
        plain = msgspec.json.decode(msgspec.json.encode(body))
        if method == "POST":
            self.events[f"{path}/{plain['metadata']['name']}"] = plain
        elif path in self.events:
            assert content_type == "application/merge-patch+json"
            self.events[path] |= plain
        else:
            details = {"name": "x"}
            status = {"kind": "Status", "reason": "NotFound", "code": 404, "details": details}
            return Answer(404, json.dumps(status).encode())
        return Answer(200, b"{}")

    @property
    def counts(self) -> list[int]:
        return [event["count"] for event in self.events.values()]


@pytest.fixture
def clock() -> HandClock:
    return HandClock(wall=1_796_050_800.0)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def teller(server: Server, clock: HandClock) -> AsyncIterator[EventTeller]:
    made = EventTeller(server, "slurmbridge", "pod-0", clock=clock, uniform=lambda: 0.0)
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def until_written(teller: EventTeller, count: int) -> None:
    async with asyncio.timeout(20):
        while teller.written < count:
            await settle()


async def test_an_event_is_written_at_once(teller: EventTeller, server: Server) -> None:
    teller.tell(POD, "ClaimGranted", "GPUs 0-3 of gpu-1", warning=True)
    await settle()
    ((path, event),) = server.events.items()
    name = event["metadata"].pop("name")
    assert path == f"/api/v1/namespaces/team-a/events/{name}"
    assert name.startswith("train-0.")
    assert event == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": "team-a"},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": "train-0",
            "uid": "uid-1",
            "namespace": "team-a",
        },
        "type": "Warning",
        "reason": "ClaimGranted",
        "message": "GPUs 0-3 of gpu-1",
        "count": 1,
        "firstTimestamp": "2026-11-30T15:00:00Z",
        "lastTimestamp": "2026-11-30T15:00:00Z",
        "source": {"component": "slurmbridge"},
        "reportingComponent": "slurmbridge",
        "reportingInstance": "pod-0",
    }


async def test_events_of_nodes_live_in_the_default_namespace(
    teller: EventTeller, server: Server
) -> None:
    teller.tell(NODE, "Drained", "x")
    await settle()
    ((path, event),) = server.events.items()
    assert path.startswith("/api/v1/namespaces/default/events/gpu-1.")
    assert "namespace" not in event["involvedObject"]


async def test_a_thousand_repetitions_are_one_line_with_a_count(
    teller: EventTeller, server: Server, clock: HandClock
) -> None:
    for _ in range(9):
        for _ in range(100):
            teller.tell(POD, "NoRoom", "no node has 8 free GPUs")
        await clock.advance(1)
    teller.tell(POD, "NoRoom", "no node has 8 free GPUs")
    await clock.advance(REPEAT_S)
    assert server.counts == [901]
    assert server.writes == ["POST", "PATCH"]
    assert (teller.told, teller.written, teller.dropped) == (901, 901, 0)


async def test_a_new_line_does_not_wait_for_the_repetition_of_another(
    teller: EventTeller, server: Server, clock: HandClock
) -> None:
    teller.tell(POD, "NoRoom", "x")
    await settle()
    teller.tell(POD, "NoRoom", "x")
    await clock.advance(1)
    teller.tell(POD, "ClaimGranted", "y")
    await settle()
    assert server.counts == [1, 1]


async def test_a_line_that_comes_again_much_later_is_a_new_event(
    teller: EventTeller, server: Server, clock: HandClock
) -> None:
    teller.tell(POD, "NoRoom", "x")
    await clock.advance(FORGET_S + 1)
    teller.tell(POD, "NoRoom", "x")
    await clock.advance(1)
    assert server.counts == [1, 1]


async def test_an_event_that_has_expired_in_the_api_server_is_made_anew(
    teller: EventTeller, server: Server, clock: HandClock
) -> None:
    teller.tell(POD, "NoRoom", "x")
    await settle()
    server.events.clear()
    await clock.advance(REPEAT_S)
    teller.tell(POD, "NoRoom", "x")
    await clock.advance(1)
    assert server.counts == [2]


async def test_one_noisy_object_cannot_flood_and_does_not_mute_others(
    teller: EventTeller, server: Server, clock: HandClock
) -> None:
    for number in range(50):
        teller.tell(POD, "Flip", f"message {number}")
    teller.tell(NODE, "Drained", "x")
    await until_written(teller, BURST + 1)
    assert len(server.events) == BURST + 1
    assert teller.dropped == 50 - BURST
    await clock.advance(REFILL_S)
    teller.tell(POD, "Flip", "one more")
    await until_written(teller, BURST + 2)


async def test_while_the_api_server_is_down_telling_neither_waits_nor_grows(
    teller: EventTeller, server: Server, clock: HandClock
) -> None:
    server.is_down = True
    for number in range(QUEUE_MAX + 500):
        teller.tell(Subject("Pod", f"p{number}", f"u{number}", "ns"), "NoRoom", "x")
    await clock.advance(60)
    assert len(teller._lines) == QUEUE_MAX
    assert teller.dropped == 500
    server.is_down = False
    await clock.advance(30)
    await until_written(teller, QUEUE_MAX)
    assert len(server.events) == QUEUE_MAX


async def test_what_could_not_be_told_in_time_is_dropped(
    teller: EventTeller, server: Server, clock: HandClock
) -> None:
    server.is_down = True
    teller.tell(POD, "NoRoom", "x")
    await clock.advance(LATE_S + 30)
    server.is_down = False
    await clock.advance(60)
    assert (server.counts, teller.dropped) == ([], 1)


async def test_what_is_refused_is_dropped_and_the_others_are_told(
    teller: EventTeller, server: Server, clock: HandClock
) -> None:
    body = {"kind": "Status", "reason": "Forbidden", "code": 403, "message": "namespace is ending"}
    server.refusal = Answer(403, json.dumps(body).encode())
    teller.tell(POD, "NoRoom", "x")
    await settle()
    server.refusal = None
    teller.tell(NODE, "Drained", "x")
    await settle()
    assert (server.counts, teller.dropped) == ([1], 1)


async def test_old_lines_make_room_for_new_ones(
    teller: EventTeller, server: Server, clock: HandClock
) -> None:
    for number in range(QUEUE_MAX):
        teller.tell(Subject("Pod", f"p{number}", f"u{number}", "ns"), "A", "x")
    await until_written(teller, QUEUE_MAX)
    teller.tell(POD, "B", "x")
    await settle()
    assert teller.dropped == 0
    assert len(teller._lines) == QUEUE_MAX


async def test_long_messages_and_names_are_cut_to_what_kubernetes_takes(
    teller: EventTeller, server: Server
) -> None:
    name = "a" * 199 + "-" + "b" * 50
    teller.tell(Subject("Pod", name, "u", "ns"), "A", "m" * 5000)
    await settle()
    ((_, event),) = server.events.items()
    assert len(event["message"]) == MESSAGE_CHARS
    assert event["metadata"]["name"].startswith("a" * 199 + ".")
    assert len(event["metadata"]["name"]) <= 253


async def test_at_the_end_what_waits_is_written(server: Server, clock: HandClock) -> None:
    teller = EventTeller(server, "slurmbridge", "pod-0", clock=clock, uniform=lambda: 0.0)
    teller.tell(POD, "A", "x")
    await teller.flush()
    teller.tell(POD, "A", "x")
    await teller.flush()
    assert server.counts == [2]
