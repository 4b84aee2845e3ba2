"""How old a view is, and of which leadership: pure, and without comparing two hosts' clocks.

A message says how old its view was when it was sent. Between sending and reading it may have lain
for long (slow network, a process that was stopped, a virtual machine that was moved), and a view
must not look younger for that. So each message also says when it was sent, in seconds since the
server got the Watch request. Reading time minus sending time is constant up to the delay, and its
floor is known: the request cannot have arrived before it was sent. What exceeds the floor counts as
age.
"""

from __future__ import annotations

from typing import Final

DRIFT: Final = 1e-3
"""Fastest that two monotonic clocks drift apart: each may be slewed by 500 ppm (adjtimex(2)). The
floor rises that fast at most, so that drift over days does not look like delay."""
RETIRED_TERMS: Final = 256
"""Terms remembered as over; a change of leader each minute fills it in four hours."""


class AgeMeter:
    """Ages of the views of one stream.

    Args:
        asked: when the Watch request was sent (our monotonic seconds), on a connection that stood.

    """

    def __init__(self, asked: float) -> None:
        self._floor = asked
        self._heard = asked
        self._born: float | None = None
        self.delay_s = 0.0
        """How long the last message was under way, at most."""

    def hear(self, sent_s: float, age_s: float | None, now: float) -> None:
        """A message was read.

        Args:
            sent_s: server's seconds from the arrival of the request to the sending.
            age_s: age of its view at sending; None: the server has no view.
            now: our monotonic seconds.

        """
        offset = now - sent_s
        # Below the floor: the clocks drift the other way; there is no negative delay.
        self._floor = min(self._floor + DRIFT * (now - self._heard), offset)
        self._heard = now
        self.delay_s = offset - self._floor
        self._born = None if age_s is None else now - self.delay_s - max(age_s, 0.0)

    def age_s(self, now: float) -> float | None:
        """Age of the last view heard of, as of `now`; None: there is none."""
        return None if self._born is None else max(now - self._born, 0.0)


class TermGuard:
    """Which leadership may be believed: the newest seen; one that was left is never taken up again.

    Terms are opaque and unique for each time that someone becomes leader, so "older" is "seen
    before another": a numbering by the Lease's transitions would lock every client out for ever
    after somebody deletes the Lease.
    """

    def __init__(self) -> None:
        self.current = ""
        self._retired: dict[str, None] = {}

    def admits(self, term: str) -> bool:
        """Whether a message of this term may be believed; a new term retires the current one."""
        if term == self.current:
            return True
        if not term or term in self._retired:
            return False
        self.retire(self.current)
        self.current = term
        return True

    def retire(self, term: str) -> None:
        """Never believe this term again."""
        if not term:
            return
        if term == self.current:
            self.current = ""
        self._retired[term] = None
        if len(self._retired) > RETIRED_TERMS:
            del self._retired[next(iter(self._retired))]
