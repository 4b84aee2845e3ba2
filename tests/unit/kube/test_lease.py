"""Who leads: several replicas before one store of leases, with clocks that a test moves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random  # noqa: TID251 - seeded by the test
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import pytest

from slurmbridge.kube.lease import (
    HOLD,
    LeaderLease,
    LeadershipLost,
    Record,
    Sighting,
    Spec,
    free_in,
    see,
)
from slurmbridge.kube.session import MERGE_PATCH
from slurmbridge.kube.status import PEER, Answer
from slurmbridge.pool.errors import InvariantError, PeerRejected, PeerTimeout, PeerUnavailable
from tests.support.clock import HandClock, settle

PATH = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"


class Store:
    """One Lease with compare-and-set, as the API server keeps it."""

    def __init__(self, lease: dict[str, Any] | None = None) -> None:
        self._version = 100
        self.lease: dict[str, Any] | None = None
        if lease is not None:
            self.put(lease)
        self.writes = 0

    def put(self, spec: dict[str, Any]) -> None:
        """Someone else writes the spec."""
        self._version += 1
        self.lease = {
            "metadata": {"name": "l", "uid": "u", "resourceVersion": str(self._version)},
            "spec": spec,
        }

    @property
    def holder(self) -> str | None:
        return (self.lease or {}).get("spec", {}).get("holderIdentity")

    def exchange(self, method: str, path: str, body: Any) -> Answer:
        if method == "POST":
            assert path == PATH
            if self.lease is not None:
                return _status(409, "AlreadyExists")
            self.writes += 1
            self.put({k: v for k, v in body["spec"].items() if v is not None})
        else:
            assert path == PATH + "/l"
            if self.lease is None:
                return _status(404, "NotFound")
            if method == "PATCH":
                if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
                    return _status(409, "Conflict")
                self.writes += 1
                merged = {**self.lease["spec"], **body["spec"]}
                self.put({k: v for k, v in merged.items() if v is not None})
        return Answer(200, json.dumps(self.lease).encode())


def _status(code: int, reason: str) -> Answer:
    body = {"kind": "Status", "code": code, "reason": reason, "details": {"name": "l"}}
    return Answer(code, json.dumps(body).encode())


class Line:
    """One replica's connection to the store; it can be cut, or lose answers."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_cut = False
        self.loses_answers = False
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
        assert params is None
        assert content_type == (MERGE_PATCH if method == "PATCH" else "application/json")
        await asyncio.sleep(0)
        if self.refusal is not None:
            return self.refusal
        if self.is_cut:
            raise PeerUnavailable(PEER, f"{method} {path}", "cut")
        plain = None if body is None else msgspec.json.decode(msgspec.json.encode(body))
        answer = self._store.exchange(method, path, plain)
        if self.loses_answers and method != "GET":
            raise PeerTimeout(PEER, f"{method} {path}", "lost")
        return answer


class Replica:
    """A process that wants to lead; its work notes its terms and runs until it is cancelled."""

    def __init__(self, store: Store, clock: HandClock, name: str, duration_s: int = 15) -> None:
        self.line = Line(store)
        self.lease = LeaderLease(
            self.line,
            "ns",
            "l",
            name,
            clock=clock,
            uniform=lambda: 0.5,
            duration_s=duration_s,
            renew_s=2.0,
        )
        self.name = name
        self.terms: list[int] = []
        self.working = False
        self.fail: asyncio.Event = asyncio.Event()
        self.finish: asyncio.Event = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def work(self, term: int) -> None:
        self.terms.append(term)
        self.working = True
        try:
            waits = {asyncio.ensure_future(e.wait()) for e in (self.fail, self.finish)}
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if self.fail.is_set():
                raise RuntimeError("the work died")
        finally:
            self.working = False

    def start(self) -> None:
        self.task = asyncio.create_task(self.lease.lead(self.work))


async def end_of(task: asyncio.Task[None] | None) -> None:
    """The outcome of a task that is about to end."""
    assert task is not None
    async with asyncio.timeout(20):
        await asyncio.shield(task)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
async def crew(clock: HandClock) -> AsyncIterator[Any]:
    """Makes replicas, and ends them after the test."""
    made: list[Replica] = []

    def make(store: Store, name: str, duration_s: int = 15, at: HandClock = clock) -> Replica:
        replica = Replica(store, at, name, duration_s)
        made.append(replica)
        replica.start()
        return replica

    yield make
    for replica in made:
        if replica.task is not None and not replica.task.done():
            replica.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await replica.task


async def test_an_empty_lease_is_taken_at_once(crew: Any) -> None:
    store = Store({})
    a = crew(store, "a")
    await settle()
    assert (a.terms, a.lease.is_leader, store.holder) == ([1], True, "a")


async def test_only_one_of_two_leads(crew: Any, clock: HandClock) -> None:
    store = Store({})
    a, b = crew(store, "a"), crew(store, "b")
    await clock.advance(60)
    assert [a.lease.is_leader, b.lease.is_leader] == [True, False]
    assert b.lease.holder == "a"


async def test_a_lease_that_is_given_back_is_taken_within_one_look(
    crew: Any, clock: HandClock
) -> None:
    store = Store({})
    a, b = crew(store, "a"), crew(store, "b")
    await clock.advance(10)
    a.task.cancel()
    await settle()
    assert (store.holder, a.working) == (None, False)
    await clock.advance(2.5)
    assert (b.terms, b.lease.is_leader) == ([2], True)


async def test_the_lease_is_given_back_only_after_the_work_has_ended(
    crew: Any, clock: HandClock
) -> None:
    store = Store({})
    a = crew(store, "a")
    ending, ended = asyncio.Event(), asyncio.Event()

    async def slow(_: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await ended.wait()

    a.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await end_of(a.task)
    task = asyncio.create_task(a.lease.lead(slow))
    await clock.advance(3)
    task.cancel()
    await ending.wait()
    assert store.holder == "a"
    ended.set()
    with contextlib.suppress(asyncio.CancelledError):
        await end_of(task)
    assert store.holder is None


async def test_a_dead_leader_blocks_the_others_for_its_lease_and_no_longer(
    crew: Any, clock: HandClock
) -> None:
    store = Store({})
    a, b = crew(store, "a"), crew(store, "b")
    await clock.advance(10)
    a.line.is_cut = True
    await clock.advance(12)
    assert not b.lease.is_leader
    await clock.advance(6)
    assert b.lease.is_leader


async def test_a_leader_that_is_cut_off_stops_before_another_begins(
    crew: Any, clock: HandClock
) -> None:
    store = Store({})
    a, b = crew(store, "a"), crew(store, "b")
    await clock.advance(10)
    a.line.is_cut = True
    stopped = took = None
    for tenth in range(300):
        await clock.advance(0.1)
        if stopped is None and not a.lease.is_leader:
            stopped = tenth / 10
            assert not a.working
        if took is None and b.lease.is_leader:
            took = tenth / 10
        assert not (a.lease.is_leader and b.lease.is_leader)
    assert stopped is not None
    assert took is not None
    assert took - stopped >= 15 * (1 - HOLD) - 0.2
    with pytest.raises(LeadershipLost, match="renewed in time"):
        await end_of(a.task)


@pytest.mark.parametrize("step", [3600.0, -3600.0])
async def test_a_step_of_the_wall_clock_changes_nothing(crew: Any, step: float) -> None:
    store = Store({})
    own, other = HandClock(), HandClock()
    a, b = crew(store, "a", at=own), crew(store, "b", at=other)

    async def pass_time(seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            await own.advance(0.25)
            await other.advance(0.25)
            assert not b.lease.is_leader
            assert a.lease.is_leader

    await settle()
    await pass_time(5)
    own.step_wall(step)  # the leader's host
    await pass_time(30)
    other.step_wall(step)  # the follower's host
    await pass_time(30)
    assert a.terms == [1]


async def test_the_duration_that_the_holder_wrote_counts_and_not_our_own(
    crew: Any, clock: HandClock
) -> None:
    store = Store({})
    a = crew(store, "a", duration_s=30)
    await clock.advance(1)
    b = crew(store, "b", duration_s=10)
    await clock.advance(5)
    a.line.is_cut = True
    await clock.advance(24)
    assert not b.lease.is_leader
    await clock.advance(9)
    assert b.lease.is_leader


async def test_work_that_dies_gives_the_lease_back_and_the_failure_up(
    crew: Any, clock: HandClock
) -> None:
    store = Store({})
    a, b = crew(store, "a"), crew(store, "b")
    await clock.advance(5)
    a.fail.set()
    await settle()
    assert not a.lease.is_leader
    assert store.holder is None
    with pytest.raises(RuntimeError, match="the work died"):
        await end_of(a.task)
    await clock.advance(3)
    assert b.lease.is_leader


async def test_work_that_is_done_gives_the_lease_back(crew: Any, clock: HandClock) -> None:
    store = Store({})
    a = crew(store, "a")
    await clock.advance(5)
    a.finish.set()
    await end_of(a.task)
    assert store.holder is None


async def test_work_that_does_not_end_keeps_the_lease_and_stops_this_process(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmbridge.kube.lease.STOP_S", 0.05)
    store = Store({})
    a = Replica(store, clock, "a")
    free = asyncio.Event()

    async def stubborn(_: int) -> None:
        while not free.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await free.wait()

    task = asyncio.create_task(a.lease.lead(stubborn))
    await clock.advance(3)
    a.line.is_cut = True
    await clock.advance(12)
    try:
        with pytest.raises(LeadershipLost):
            await end_of(task)
        assert store.holder == "a"  # runs out by itself
        with pytest.raises(InvariantError):
            await a.lease.lead(stubborn)
    finally:
        free.set()
    await settle()


async def test_answers_that_get_lost_do_not_lose_the_lease(crew: Any, clock: HandClock) -> None:
    store = Store({})
    a, b = crew(store, "a"), crew(store, "b")
    await clock.advance(5)
    for _ in range(6):
        a.line.loses_answers = True
        await clock.advance(4)
        a.line.loses_answers = False
        await clock.advance(4)
    assert (a.terms, b.terms, a.lease.is_leader) == ([1], [], True)


async def test_a_write_of_someone_else_to_the_lease_does_no_harm(
    crew: Any, clock: HandClock
) -> None:
    store = Store({})
    a, b = crew(store, "a"), crew(store, "b")
    await clock.advance(5)
    assert store.lease is not None
    store.put(store.lease["spec"])  # kubectl annotate: a new version, the same spec
    await clock.advance(30)
    assert (a.terms, b.terms) == ([1], [])


async def test_a_lease_that_another_took_is_lost_at_the_next_look(
    crew: Any, clock: HandClock
) -> None:
    store = Store({})
    a = crew(store, "a")
    await clock.advance(5)
    store.put({"holderIdentity": "z", "leaseDurationSeconds": 15, "leaseTransitions": 2})
    await clock.advance(2.5)
    with pytest.raises(LeadershipLost, match="held by 'z'"):
        await end_of(a.task)
    assert store.holder == "z"  # not given back by us: it is not ours
    assert not a.working


async def test_a_lease_that_was_deleted_is_lost_and_nobody_leads_too_early(
    crew: Any, clock: HandClock
) -> None:
    store = Store({})
    a, b = crew(store, "a"), crew(store, "b")
    await clock.advance(5)
    a.line.is_cut = True  # it does not even hear that its lease is gone
    store.lease = None
    for _ in range(200):
        await clock.advance(0.1)
        assert not (a.lease.is_leader and b.lease.is_leader)
    assert b.lease.is_leader


async def test_whoever_finds_no_lease_makes_one_and_others_wait_for_it(
    crew: Any, clock: HandClock
) -> None:
    store = Store()
    a = crew(store, "a")
    await clock.advance(1)
    b = crew(store, "b")
    await clock.advance(8)
    assert not (a.lease.is_leader or b.lease.is_leader)
    await clock.advance(3)
    assert (a.terms, b.terms) == ([1], [])


async def test_a_restart_while_waiting_for_an_older_leader_waits_anew(
    crew: Any, clock: HandClock
) -> None:
    store = Store()
    a = crew(store, "a")
    await clock.advance(9)
    a.task.cancel()
    again = crew(store, "a")
    await clock.advance(14)
    assert not again.lease.is_leader
    await clock.advance(2)
    assert again.lease.is_leader


async def test_a_container_restarted_in_its_pod_goes_on_at_once_in_a_new_term(
    crew: Any, clock: HandClock
) -> None:
    store = Store({})
    a = crew(store, "a")
    await clock.advance(5)
    a.line.is_cut = True  # killed: it could not give the lease back
    a.task.cancel()
    again = crew(store, "a")
    await settle()
    assert (again.terms, again.lease.is_leader) == ([2], True)


async def test_a_lease_without_a_duration_is_respected_for_ours(
    crew: Any, clock: HandClock
) -> None:
    store = Store({"holderIdentity": "z"})
    a = crew(store, "a")
    await clock.advance(14)
    assert not a.lease.is_leader
    await clock.advance(3)
    assert a.lease.is_leader


async def test_missing_rights_are_told_at_once(clock: HandClock) -> None:
    a = Replica(Store({}), clock, "a")
    a.line.refusal = _status(403, "Forbidden")
    with pytest.raises(PeerRejected):
        await a.lease.lead(a.work)


async def test_an_api_server_that_is_down_is_waited_for(crew: Any, clock: HandClock) -> None:
    store = Store({})
    a = crew(store, "a")
    a.line.is_cut = True
    await clock.advance(60)
    assert a.lease.last_error is not None
    a.line.is_cut = False
    await clock.advance(3)
    assert a.lease.is_leader


def test_only_a_changed_record_is_young_again() -> None:
    first = Record(spec=Spec("a", 15, None, "t1", 1))
    seen = see(None, first, 10.0)
    assert see(seen, first, 20.0).since == 10.0
    assert see(seen, Record(spec=Spec("a", 15, None, "t2", 1)), 20.0).since == 20.0


FREE = {
    "nobody": (Spec(None), 0.0),
    "nobody, as an empty name": (Spec(""), 0.0),
    "held, fresh": (Spec("z", 15), 12.0),
    "held, no duration": (Spec("z"), 7.0),
    "held, senseless duration": (Spec("z", -3), 7.0),
    "ours, led": (Spec("a", 15, lease_transitions=3), 0.0),
    "ours, made but not led": (Spec("a", 15, lease_transitions=0), 12.0),
    "run out": (Spec("z", 2), 0.0),
}


@pytest.mark.parametrize(("spec", "expected"), FREE.values(), ids=FREE)
def test_when_a_lease_may_be_taken(spec: Spec, expected: float) -> None:
    sighting = Sighting(Record(spec=spec), since=100.0)
    assert free_in(sighting, "a", 103.0, 10.0) == expected


@pytest.mark.parametrize("seed", range(6))
async def test_never_two_leaders_whatever_happens(seed: int) -> None:
    """Random cuts, lost answers, steps of clocks, restarts, deletions; clocks 5 % apart."""
    rng = random.Random(seed)
    store = Store({})
    clocks = [HandClock() for _ in range(3)]
    speeds = [1.0, 1.05, 0.95]
    crew = [Replica(store, clocks[i], f"r{i}") for i in range(3)]
    for replica in crew:
        replica.start()
    led: set[str] = set()
    for _ in range(300):
        for clock, speed in zip(clocks, speeds, strict=True):
            await clock.advance(0.5 * speed)
        leaders = [r.name for r in crew if r.lease.is_leader]
        assert len(leaders) <= 1, leaders
        assert all(not r.working or r.lease.is_leader for r in crew)
        led.update(leaders)
        chosen = rng.choice(crew)
        match rng.randrange(12):
            case 0:
                chosen.line.is_cut = True
            case 1 | 2:
                chosen.line.is_cut = chosen.line.loses_answers = False
            case 3:
                chosen.line.loses_answers = True
            case 4:
                rng.choice(clocks).step_wall(rng.uniform(-7200, 7200))
            case 5 if rng.random() < 0.2:
                store.lease = None
            case 6 if rng.random() < 0.3 and chosen.task is not None:
                chosen.task.cancel()
        for replica in crew:
            if replica.task is not None and replica.task.done():
                with contextlib.suppress(asyncio.CancelledError, LeadershipLost):
                    replica.task.result()
                replica.start()
    for replica in crew:
        if replica.task is not None:
            replica.task.cancel()
            with contextlib.suppress(asyncio.CancelledError, LeadershipLost):
                await replica.task
    assert len(led) > 1
