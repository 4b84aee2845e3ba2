"""How old a view is, and of which leadership: pure, and without comparing two hosts' clocks.

A message says how old its view was when it was sent. Between sending and reading it may have lain
for long (slow network, a process that was stopped, a virtual machine that was moved), and a view
must not look younger for that. So each message also says when it was sent, in seconds since the
server got the Watch request. Reading time minus sending time is constant up to the delay, and its
floor is known: the request cannot have arrived before it was sent. What exceeds the floor counts as
age.
"""

from __future__ import annotations

import re
from typing import Final

DRIFT: Final = 1e-3
"""Fastest that two monotonic clocks drift apart: each may be slewed by 500 ppm (adjtimex(2)). The
floor rises that fast at most, so that drift over days does not look like delay."""
RETIRED_S: Final = 60.0
"""How long an older term is refused after the newest was last heard of, and one without an order
after it was left: four times the duration of the Lease, within which a leader that lost it must
have noticed."""
RETIRED_TERMS: Final = 64
"""Terms without an order that are remembered as over."""

_ORDERED_RE: Final = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19}){0,3})/")


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


def make_term(lease_created: int, transitions: int, count: int, holder: str) -> str:
    """The name of one leadership, ordered in time without comparing the bridges' clocks.

    Args:
        lease_created: creation time of the Lease object, Unix seconds as the API server gave it:
            someone may delete the Lease, and its transitions begin anew.
        transitions: `leaseTransitions` of the Lease as we acquired it.
        count: how many times this process has become leader: acquiring a Lease that nobody held in
            between does not raise its transitions.
        holder: identity in the Lease; unique for each process.

    """
    return f"{lease_created}.{transitions}.{count}/{holder}"


def order_of(term: str) -> tuple[int, ...] | None:
    """What orders a term among others, or None when it is not of the form of `make_term`."""
    match = _ORDERED_RE.match(term)
    return None if match is None else tuple(int(number) for number in match[1].split("."))


class TermGuard:
    """Which leadership may be believed: the newest seen, and no older one while that is heard of.

    Terms of `make_term` are compared. Once nothing was heard of the newest for `RETIRED_S`, an
    older one is believed: an API server that was set back to an older state counts its terms from
    there, and its leaders would else never be believed again. Of other terms a reader knows only
    which it saw first; one that was left is refused for `RETIRED_S`, not for ever: had a bridge
    that woke up after a long sleep, with a term that this reader never saw, been believed for a
    moment, the true leader would else be locked out.
    """

    def __init__(self) -> None:
        self.current = ""
        self._highest: tuple[int, ...] = ()
        self._heard = float("-inf")
        self._retired: dict[str, float] = {}

    def admits(self, term: str, now: float) -> bool:
        """Whether a message of this term may be believed; a newer term retires the current one.

        Args:
            term: of the message.
            now: our monotonic seconds.

        """
        if not term:
            return False
        order = order_of(term)
        if term == self.current:
            self._heard = now
            return True
        if order is not None:
            if order <= self._highest and now - self._heard < RETIRED_S:
                return False
            self._highest, self._heard = order, now
        elif now - self._retired.get(term, -RETIRED_S) < RETIRED_S:
            return False
        self.retire(self.current, now)
        self.current = term
        return True

    def retire(self, term: str, now: float) -> None:
        """Do not believe this term again."""
        if term and term == self.current:
            self.current, self._heard = "", now
        if term and order_of(term) is None:
            self._retired.pop(term, None)
            self._retired[term] = now
            if len(self._retired) > RETIRED_TERMS:
                del self._retired[next(iter(self._retired))]
