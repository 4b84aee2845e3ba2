"""Events for people: what `kubectl describe` shows under a pod or node.

core/v1 Events, whose `count` and `lastTimestamp` make `kubectl describe` print "x12 over 5m" in all
its versions; the newer events.k8s.io writes to the same store, but its series are only folded by
newer kubectls.

Telling never blocks and never fails: the queue is a bounded table of (object, reason, message) with
a count each, so that a thousand repetitions are one line; a full table drops what is newest and
counts it. Each line is sent at once when new and then at most every `REPEAT_S`; per object a bucket
of tokens bounds what one noisy pod can cost. While the API server is away lines wait and are
counted on, and those that are older than `LATE_S` by then are dropped: nobody needs them any more.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import msgspec

from slurmbridge.kube.backoff import Backoff
from slurmbridge.kube.session import MERGE_PATCH, resource_path
from slurmbridge.kube.status import error_of
from slurmbridge.kube.write import Api, rfc3339
from slurmbridge.pool.errors import ParseError, PeerError, PeerRejected, PeerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurmbridge.clock import Clock

QUEUE_MAX: Final = 2048
"""Most different lines that wait or are remembered."""
REPEAT_S: Final = 10.0
"""Shortest time between two writes of the same line."""
FORGET_S: Final = 900.0
"""A line that comes again after this is a new Event; the API server keeps Events for an hour."""
BURST: Final = 10
"""Most new lines of one object at once."""
REFILL_S: Final = 30.0
"""Time after which an object may have one more new line."""
LATE_S: Final = 300.0
"""An event that could not be written for this long is dropped."""
MESSAGE_CHARS: Final = 1024
"""Longest message, Kubernetes' own limit."""
DEADLINE_S: Final = 5.0


class Subject(msgspec.Struct, frozen=True):
    """What an event is about. namespace "": a node, whose events live in `default`."""

    kind: str
    name: str
    uid: str
    namespace: str = ""


class _Line(msgspec.Struct):
    """One line of `kubectl describe`: (subject, type, reason, message)."""

    count: int = 0
    waiting: int = 0
    first: float = 0.0
    last: float = 0.0
    event: str = ""
    written_at: float = float("-inf")
    told_at: float = float("-inf")


_Key = tuple[Subject, bool, str, str]


class EventTeller:
    """Collects events and writes them. `tell` from the loop's thread only; `run` as a task.

    Args:
        api: the session.
        component: who speaks: the From column of `kubectl describe`.
        instance: this replica: the pod's name.
        clock: wall time for people, monotonic for limits.
        uniform: returns a float in [0, 1).

    Attributes:
        told, written, dropped: counts of events.

    """

    def __init__(
        self,
        api: Api,
        component: str,
        instance: str,
        *,
        clock: Clock,
        uniform: Callable[[], float],
    ) -> None:
        self._api = api
        self._component = component
        self._instance = instance
        self._clock = clock
        self._backoff = Backoff(uniform, base_s=0.5, cap_s=10.0)
        self._lines: OrderedDict[_Key, _Line] = OrderedDict()
        self._tokens: OrderedDict[Subject, tuple[float, float]] = OrderedDict()
        self._wake = asyncio.Event()
        self._looks_at = float("inf")
        self._serial = 0
        self.told = 0
        self.written = 0
        self.dropped = 0

    def tell(self, subject: Subject, reason: str, message: str, *, warning: bool = False) -> None:
        """Note an event; it is written soon, or counted on to an equal one.

        Args:
            subject: what it is about.
            reason: one CamelCase word.
            message: a text without counters and times, so that repetitions are equal.
            warning: type Warning in place of Normal.

        """
        self.told += 1
        key = (subject, warning, reason, message[:MESSAGE_CHARS])
        now = self._clock.monotonic()
        line = self._lines.get(key)
        if line is not None and now - line.told_at > FORGET_S and not line.waiting:
            del self._lines[key]
            line = None
        if line is None:
            if not self._make_room(now) or not self._may_speak(subject, now):
                self.dropped += 1
                return
            line = self._lines[key] = _Line(first=self._clock.wall())
        line.waiting += 1
        line.last = self._clock.wall()
        line.told_at = now
        if max(now, line.written_at + REPEAT_S) < self._looks_at:
            self._wake.set()

    async def run(self) -> None:
        """Write what has been told, for ever; ends only by cancellation."""
        while True:
            wait_s = await self.step()
            self._wake.clear()
            self._looks_at = self._clock.monotonic() + (float("inf") if wait_s is None else wait_s)
            # A new line is due at once, whatever the others wait for.
            waiters: set[asyncio.Future[Any]] = {asyncio.ensure_future(self._wake.wait())}
            if wait_s is not None:
                waiters.add(asyncio.ensure_future(self._clock.sleep(wait_s)))
            try:
                await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiter in waiters:
                    waiter.cancel()

    async def step(self) -> float | None:
        """Write all lines that are due.

        Returns:
            Seconds until the next line is due; None: nothing waits.

        """
        for key, line in list(self._lines.items()):
            now = self._clock.monotonic()
            if line.waiting and now - line.told_at > LATE_S:
                self._drop(line)
            elif line.waiting and line.written_at + REPEAT_S <= now:
                try:
                    await self._write(key, line)
                except PeerError as error:
                    asked = error.retry_after_s if isinstance(error, PeerUnavailable) else None
                    return self._backoff.delay(asked)
        waits = [line.written_at + REPEAT_S for line in self._lines.values() if line.waiting]
        return max(0.05, min(waits) - self._clock.monotonic()) if waits else None

    async def flush(self) -> None:
        """Write what waits, whether due or not, while the API server takes it: before the end."""
        for key, line in list(self._lines.items()):
            if line.waiting:
                await self._write(key, line)

    def _make_room(self, now: float) -> bool:
        """Forget the oldest line without anything to say; False: all have."""
        while self._lines:
            key, line = next(iter(self._lines.items()))
            old = now - line.told_at > FORGET_S
            if line.waiting or not (old or len(self._lines) >= QUEUE_MAX):
                break
            del self._lines[key]
        if len(self._lines) < QUEUE_MAX:
            return True
        for key, line in self._lines.items():
            if not line.waiting:
                del self._lines[key]
                return True
        return False

    def _may_speak(self, subject: Subject, now: float) -> bool:
        tokens, then = self._tokens.pop(subject, (float(BURST), now))
        tokens = min(float(BURST), tokens + (now - then) / REFILL_S)
        allowed = tokens >= 1.0
        self._tokens[subject] = (tokens - 1.0 if allowed else tokens, now)
        while len(self._tokens) > QUEUE_MAX:
            self._tokens.popitem(last=False)
        return allowed

    def _drop(self, line: _Line) -> None:
        self.dropped += line.waiting
        line.waiting = 0

    async def _write(self, key: _Key, line: _Line) -> None:
        """Write one line; what is told meanwhile waits for the next time.

        Raises:
            PeerUnavailable: not now.

        """
        sending = line.waiting
        try:
            await self._send(key, line, line.count + sending)
        except (PeerRejected, ParseError):
            # The namespace is going away, or we may not: no use in asking again.
            self._drop(line)
        else:
            self._backoff.reset()
            line.waiting -= sending
            line.count += sending
            self.written += sending
        line.written_at = self._clock.monotonic()

    async def _send(self, key: _Key, line: _Line, count: int) -> None:
        """Patch the Event if there is one, else make one."""
        subject, warning, reason, message = key
        events = ("api", "v1", "namespaces", subject.namespace or "default", "events")
        if line.event:
            path = resource_path(*events, line.event)
            body = {"count": count, "lastTimestamp": rfc3339(line.last)}
            answer = await self._api.exchange(
                "PATCH", path, body, content_type=MERGE_PATCH, deadline_s=DEADLINE_S
            )
            if answer.is_ok:
                return
            error = error_of(f"PATCH {path}", answer)
            if not (isinstance(error, PeerRejected) and error.reason == "notfound"):
                raise error
            line.event = ""  # it has expired in the API server
        self._serial += 1
        stem = subject.name[:200].rstrip("-.")
        name = f"{stem}.{int(line.last * 1e6):x}{self._serial % 4096:03x}"
        event: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": events[3]},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": subject.kind,
                "name": subject.name,
                "uid": subject.uid,
                **({"namespace": subject.namespace} if subject.namespace else {}),
            },
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message,
            "count": count,
            "firstTimestamp": rfc3339(line.first),
            "lastTimestamp": rfc3339(line.last),
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
        }
        path = resource_path(*events)
        answer = await self._api.exchange("POST", path, event, deadline_s=DEADLINE_S)
        if not answer.is_ok:
            raise error_of(f"POST {path}", answer)
        line.event = name
