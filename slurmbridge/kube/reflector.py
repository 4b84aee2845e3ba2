"""What is there: list, then watch, and again, so that a consumer always converges on the truth.

One `step` is finite: a full list where no version is known, then one watch until it ends or fails.
`run` is the endless loop around it. Guarantees to the consumer:

- `Listed` is everything; what it lacks is gone. Deletions that nobody saw are found that way.
- A change may come twice (after a failure), never not at all: the version moves on only when the
  consumer has taken the change.
- The consumer is the only queue: while it works nothing is read, and the server ends watches that
  lag too far.
- An object that cannot be decoded is an error of the whole, loud and repeated, never a hole in a
  list: a pod that is missing would be taken for a pod that is gone.

Failures, each seen elsewhere: 410 as HTTP status or as ERROR event in a 200 stream (relist); a
server that closes each watch at once (growing delays, relist after some); silence without a reset
(idle limit, relist); a torn line (resume); a server that was away (relist).

A server that was away may have been set back: its etcd was restored from a backup. Our version
then lies in its future. It takes the watch all the same, and leaves out what happens until it has
counted so far once more (kubernetes/kubernetes#107457): where that is soon, no silence would ever
tell. Nobody restores an etcd so fast that no try in between fails.

Source: Kubernetes API concepts, "Efficient detection of changes"; bookmarks come once a minute
(measured on 1.37).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import msgspec

from slurmbridge.kube.backoff import Backoff
from slurmbridge.kube.status import PEER, Answer, error_of, read_status
from slurmbridge.pool.errors import (
    UNREADABLE,
    AnswerTooLong,
    PeerBusy,
    PeerError,
    PeerProtocolError,
    PeerRejected,
    PeerUnavailable,
    SlurmBridgeError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from slurmbridge.clock import Clock

PAGE: Final = 500
"""Objects per answer of a list: 5 MB of nodes; the same as client-go and kubectl. Fewer where they
are so fat that an answer is too long."""
WATCH_S: Final = 300
"""Shortest life of one watch that we ask for; half as much again is added by chance, so that the
watches of a fleet do not all end together."""
IDLE_S: Final = 90.0
"""Longest silence of a watch: one and a half times the distance of bookmarks."""
MOST_EMPTY: Final = 3
"""After so many watches in a row that brought nothing, the version itself is doubted."""
SPACE_S: Final = 0.2
"""Shortest distance between the beginnings of two watches, however well they go."""
LIST_S: Final = 60.0
"""Deadline of one page of a list."""


class Versioned(Protocol):
    """A record of an object that knows the version it was read at."""

    @property
    def resource_version(self) -> str:
        """metadata.resourceVersion."""


_T = TypeVar("_T", bound=Versioned)


class Listed(msgspec.Struct, Generic[_T], frozen=True):
    """All objects that exist; what is not in it does not exist."""

    items: tuple[_T, ...]


class Added(msgspec.Struct, Generic[_T], frozen=True):
    """A new object, or one that has come into the selection."""

    item: _T


class Modified(msgspec.Struct, Generic[_T], frozen=True):
    """A changed object."""

    item: _T


class Deleted(msgspec.Struct, Generic[_T], frozen=True):
    """An object that is gone (or has left the selection), as it was at last."""

    item: _T


Change = Listed[_T] | Added[_T] | Modified[_T] | Deleted[_T]


class Asked(Protocol):
    """The part of `KubeSession` that answers once."""

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        params: Mapping[str, str] | None = None,
        deadline_s: float = 10.0,
    ) -> bytes:
        """See `KubeSession.request`."""


class Source(Asked, Protocol):
    """The part of `KubeSession` that is needed here."""

    def stream(
        self, path: str, params: Mapping[str, str], *, idle_s: float, total_s: float
    ) -> AsyncGenerator[bytes, None]:
        """See `KubeSession.stream`."""


class Reflector(Generic[_T]):
    """Keeps a consumer informed about one collection.

    Args:
        source: the session.
        path: of the collection: `/api/v1/pods`.
        decode: JSON bytes of one object -> record; None: of no interest now or ever (never for an
            object that may become interesting). Raises ParseError or msgspec's errors.
        clock: for ages and delays.
        uniform: returns a float in [0, 1).
        selection: `labelSelector`, `fieldSelector`.
        report: called with each failure before the delay that it leads to.
        check: awaited after each list; raises PeerError where that may not be believed.

    Attributes:
        lists, watches, failures: how many there were.

    """

    def __init__(
        self,
        source: Source,
        path: str,
        decode: Callable[[bytes], _T | None],
        *,
        clock: Clock,
        uniform: Callable[[], float],
        selection: Mapping[str, str] | None = None,
        report: Callable[[SlurmBridgeError], None] = lambda _: None,
        check: Callable[[], Awaitable[None]] | None = None,
        page: int = PAGE,
        watch_s: int = WATCH_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._source = source
        self._path = path
        self._decode = decode
        self._clock = clock
        self._uniform = uniform
        self._selection = dict(selection or {})
        self._report = report
        self._check = check
        self._page = page
        self._watch_s = watch_s
        self._idle_s = idle_s
        self._backoff = Backoff(uniform)
        self._version = ""
        self._heard_at = float("-inf")
        self._heard_in_watch = False
        self._empty = 0
        self.lists = 0
        self.watches = 0
        self.failures = 0

    @property
    def age_s(self) -> float:
        """Seconds since the server last spoke; infinite before the first list.

        Up to a minute is usual where nothing changes: bookmarks come once a minute.
        """
        return self._clock.monotonic() - self._heard_at

    async def run(self, take: Callable[[Change[_T]], Awaitable[None]]) -> None:
        """Inform the consumer for ever; ends only by cancellation, or by an error of `take`."""
        while True:
            await self._clock.sleep(await self.step(take))

    async def step(self, take: Callable[[Change[_T]], Awaitable[None]]) -> float:
        """One list (where needed) and one watch; failures become delays.

        Returns:
            Seconds to wait before the next step; short when the watch had anything to say.

        """
        asked: float | None = None
        began = self._clock.monotonic()
        self._heard_in_watch = False
        try:
            async with contextlib.aclosing(self.list_then_watch()) as changes:
                async for change in changes:
                    await take(change)
        except PeerError as error:
            self.failures += 1
            asked = getattr(error, "retry_after_s", None)
            self._doubt(self._weight(error))
            self._report(error)
        else:
            if self._heard_in_watch:
                return max(0.0, began + SPACE_S - self._clock.monotonic())
            self._doubt(1)
        return self._backoff.delay(asked)

    async def list_then_watch(self) -> AsyncGenerator[Change[_T], None]:
        """List where no version is known, then watch once, until the server ends the watch.

        Raises:
            PeerRejected: with reason `gone`: the version is too old, list again.
            PeerError: anything else that went wrong; the version is kept.

        """
        if not self._version:
            began = self._clock.monotonic()
            items, version = await self._list(self._page)
            if self._check is not None:
                await self._check()
            self._heard_at = began
            self.lists += 1
            yield Listed(items)
            self._version = version
        self.watches += 1
        life_s = self._watch_s + int(self._uniform() * self._watch_s / 2)
        params = {
            **self._selection,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(life_s),
        }
        lines = self._source.stream(
            self._path, params, idle_s=self._idle_s, total_s=life_s + self._idle_s
        )
        # A generator that is left early must give its connection back at once.
        async with contextlib.aclosing(lines) as events:
            async for line in events:
                change, version = self._read(line)
                self._heard()
                if change is not None:
                    yield change
                self._version = version

    async def _list(self, page: int) -> tuple[tuple[_T, ...], str]:
        """All objects, and the version they were read at."""
        items: list[_T] = []
        token = ""
        while True:
            params = dict(self._selection)
            if page:
                params["limit"] = str(page)
            if token:
                params["continue"] = token
            try:
                body = await self._source.request(
                    "GET", self._path, params=params, deadline_s=LIST_S
                )
            except PeerRejected as error:
                if error.reason == "gone" and token:
                    # Took longer than the server keeps versions: once more, in one piece.
                    return await self._list(0)
                raise
            except AnswerTooLong:
                if page <= 1:
                    raise
                # Any user can make fat pods, and none may keep us from seeing all others.
                page = page // 4 or 1
                continue
            answer = self._typed(body, _LIST)
            for raw in answer.items or ():
                item = self._typed_item(raw)
                if item is not None:
                    items.append(item)
            token = answer.metadata.continue_
            if not token:
                return tuple(items), answer.metadata.resource_version

    def _read(self, line: bytes) -> tuple[Change[_T] | None, str]:
        """A line of a watch as a change (None: nothing to tell) and the version after it."""
        event = self._typed(line, _EVENT)
        raw = bytes(event.object)
        if event.type == "ERROR":
            status = read_status(raw)
            raise error_of(f"WATCH {self._path}", Answer(status.code if status else 500, raw))
        if event.type == "BOOKMARK":
            return None, self._typed(raw, _OBJECT).metadata.resource_version
        item = self._typed_item(raw)
        if item is None:
            return None, self._typed(raw, _OBJECT).metadata.resource_version
        change: Change[_T]
        match event.type:
            case "ADDED":
                change = Added(item)
            case "MODIFIED":
                change = Modified(item)
            case "DELETED":
                change = Deleted(item)
            case _:
                text = f"unknown event {event.type!r}"
                raise PeerProtocolError(PEER, f"WATCH {self._path}", text)
        return change, item.resource_version

    def _typed(self, data: bytes, decoder: msgspec.json.Decoder[_D]) -> _D:
        try:
            return decoder.decode(data)
        except UNREADABLE as error:
            raise PeerProtocolError(PEER, self._path, str(error)) from error

    def _typed_item(self, raw: bytes) -> _T | None:
        try:
            return self._decode(raw)
        except (*UNREADABLE, SlurmBridgeError) as error:
            raise PeerProtocolError(PEER, self._path, f"an object is odd: {error}") from error

    def _heard(self) -> None:
        self._heard_at = self._clock.monotonic()
        self._heard_in_watch = True
        self._empty = 0
        self._backoff.reset()

    def _weight(self, error: PeerError) -> int:
        """How much an error speaks against the version that we watch from."""
        if isinstance(error, PeerRejected) and error.reason == "gone":
            return MOST_EMPTY
        if isinstance(error, PeerProtocolError):
            return 1
        if isinstance(error, PeerUnavailable) and not isinstance(error, PeerBusy):
            # Not even a bookmark: a server that is dead, was set back, or lies behind our version.
            return 0 if self._heard_in_watch else MOST_EMPTY
        return 0

    def _doubt(self, weight: int) -> None:
        """Count what speaks against the version, and forget it when that is enough."""
        self._empty += weight
        if self._empty >= MOST_EMPTY:
            self._empty = 0
            self._version = ""


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct, frozen=True):
    metadata: _Meta
    items: list[msgspec.Raw] | None


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Object(msgspec.Struct, frozen=True):
    metadata: _Meta


_D = TypeVar("_D")
_LIST: Final = msgspec.json.Decoder(_List)
_EVENT: Final = msgspec.json.Decoder(_Event)
_OBJECT: Final = msgspec.json.Decoder(_Object)
