"""The copy of the view that a client holds, message by message: no sockets in here.

What is held is the view of the newest leadership seen. When a stream ends it goes on aging until
another stream has brought a whole view; when a newer leadership is seen it is dropped at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from slurmbridge.clock import Clock
from slurmbridge.link import codec
from slurmbridge.link._gen import pool_pb2 as pb
from slurmbridge.link.freshness import AgeMeter, TermGuard
from slurmbridge.link.message import VERSION
from slurmbridge.log import get_logger
from slurmbridge.pool.errors import PeerProtocolError, PeerUnavailable
from slurmbridge.pool.policy import Policy
from slurmbridge.pool.view import View, apply_delta

_log = get_logger(__name__)

LAG_S: Final = 1.0
LAG_FOR_S: Final = 5.0
"""A stream whose messages come more than LAG_S late for this long is opened anew: either the way is
that slow, or one of the two clocks has stood still (a paused virtual machine)."""

OnChange = Callable[[View | None, Policy | None], None]


class LinkStats(msgspec.Struct):
    """What happened since the start, for metrics."""

    streams: int = 0
    wholes: int = 0
    deltas: int = 0
    protocol_errors: int = 0
    silences: int = 0


class Stream:
    """What is known of one stream. asked: our monotonic time when it was asked for."""

    def __init__(self, asked: float) -> None:
        self.meter = AgeMeter(asked)
        self.has_whole = False
        self.late_since: float | None = None


class Replica:
    """The view, the policy that came with it, and how old they are.

    Args:
        clock: injected clock.
        on_change: told of each change in content; must not block. What it raises is logged.

    """

    def __init__(self, clock: Clock, on_change: OnChange | None) -> None:
        self._clock = clock
        self._on_change = on_change
        self._terms = TermGuard()
        self._meter: AgeMeter | None = None
        self.view: View | None = None
        self.policy: Policy | None = None
        self.stats = LinkStats()

    @property
    def term(self) -> str:
        """The newest leadership seen; "" before the first."""
        return self._terms.current

    def age_s(self) -> float | None:
        """Seconds since the reading behind the view began, at most; None: no view."""
        if self.view is None or self._meter is None:
            return None
        return self._meter.age_s(self._clock.monotonic())

    def take(self, stream: Stream, message: pb.ViewMessage) -> None:
        """Take in one message of a stream.

        Raises:
            PeerProtocolError: it does not fit what came before; the stream is to be opened anew.
            PeerUnavailable: it is of a leadership that is over, or the stream lags.

        """
        was, policy_was = self.view, self.policy
        try:
            self._take(stream, message)
        finally:
            # Also when the message was faulty: it may have cost us the view.
            if self.policy is not policy_was or not _same_content(was, self.view):
                self._tell()

    def _take(self, stream: Stream, message: pb.ViewMessage) -> None:
        if message.version != VERSION:
            text = f"version {message.version} of the link; we read {VERSION}"
            raise PeerProtocolError("bridge", "Watch", text)
        now = self._clock.monotonic()
        if message.term:
            if not self._terms.admits(message.term, now):
                raise PeerUnavailable("bridge", "Watch", f"leadership {message.term} is over")
            if self.view is not None and self.view.term != message.term:
                self.view = None
        view = self._changed(stream, message)
        if message.HasField("policy"):
            policy = codec.decode_policy(message.policy)
            self.policy = self.policy if policy == self.policy else policy
        age_s = message.age_s if message.HasField("age_s") else None
        stream.meter.hear(message.sent_s, age_s, now)
        if view is not None:
            # Only now: until its whole view is here, the old one goes on aging by its own stream.
            self.view, self._meter, stream.has_whole = view, stream.meter, True
        self._check_lag(stream, now)

    def _changed(self, stream: Stream, message: pb.ViewMessage) -> View | None:
        """The view after the message; None: as before."""
        body = message.WhichOneof("body")
        if body == "whole":
            view = codec.decode_view(message.whole)
            if (view.term, view.generation) != (message.term, message.generation):
                raise PeerProtocolError("bridge", "Watch", "whole view is not what was announced")
            self.stats.wholes += 1
            return view
        if not stream.has_whole or self.view is None:
            if body == "delta":
                raise PeerProtocolError("bridge", "Watch", "delta before the whole view")
            return None
        if body == "delta":
            changed = apply_delta(self.view, codec.decode_delta(message.delta))
            if changed is None or changed.generation != message.generation:
                raise PeerProtocolError("bridge", "Watch", "delta does not fit the view")
            self.stats.deltas += 1
            return changed
        if message.generation != self.view.generation:
            raise PeerProtocolError("bridge", "Watch", "a generation was left out")
        return None

    def _check_lag(self, stream: Stream, now: float) -> None:
        if stream.meter.delay_s <= LAG_S:
            stream.late_since = None
        elif stream.late_since is None:
            stream.late_since = now
        elif now - stream.late_since > LAG_FOR_S:
            text = f"messages come {stream.meter.delay_s:.1f} s late"
            raise PeerUnavailable("bridge", "Watch", text)

    def _tell(self) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(self.view, self.policy)
        except Exception:  # noqa: BLE001 - a faulty reader must not cost us the stream
            _log.exception("reader of the view failed")


def _same_content(one: View | None, other: View | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.term, one.generation) == (other.term, other.generation)
