"""Whose a reservation is: which of Slurm's windows keep a pod away, and which let it in.

What Slurm 22.05.8 does was tried on a real slurmctld (docs/adr/0012): a job must name its
reservation (an immediate one even a MAGNETIC one), and both its user and its account must be
allowed; the user of all claims is the bridge's own. One that is not FLEX must have begun, and ends
the jobs in it when it ends. FLEX ones may be used before and past that. A reservation of some cores
of a node leaves the other cores to everybody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np

from slurmbridge.pool.claim import Ask
from slurmbridge.pool.index import Bools, Ints, Longs, ViewIndex
from slurmbridge.pool.record import Reservation, SlurmNode
from slurmbridge.pool.view import NodeView, Terms, Window

_CPUS_RE: Final = re.compile(r"(?:^|,)cpu=(\d{1,9})(?:,|$)", re.ASCII)
MOST_NAMES: Final = 3
OTHERS, NAMED, DENIED, DRAWN = range(4)
"""What a reservation is to a pod: one of others; its own by name; named, and it may not use it;
MAGNETIC, and open to it without a name."""


def terms_of(reservation: Reservation, user: str, *, exact: bool) -> Terms:
    """Who may use a reservation, as far as the bridge's claims go.

    Args:
        reservation: as Slurm shows it.
        user: the Slurm user of all claims, "" when its name is not known.
        exact: whether accounts are compared by name alone: without associations in Slurm's
            database, where those below an account that is named may use it too.

    """
    return Terms(
        flex="FLEX" in reservation.flags,
        magnetic="MAGNETIC" in reservation.flags,
        maint="MAINT" in reservation.flags,
        user=_user_may(reservation, user),
        accounts=reservation.accounts,
        exact=exact,
    )


def _user_may(reservation: Reservation, user: str) -> bool | None:
    if reservation.groups:
        return None  # Slurm knows their users, and shows only the groups
    if not reservation.users:
        return True
    if not user:
        return None
    if any(name.startswith("-") for name in reservation.users):
        return f"-{user}" not in reservation.users
    return user in reservation.users


def allows(terms: Terms, account: str) -> bool | None:
    """Whether claims of an account may use a reservation; None: only Slurm can tell."""
    if terms.user is False:
        return False
    is_sure = terms.user is True
    if terms.accounts:
        barred = {name[1:] for name in terms.accounts if name.startswith("-")}
        named = {name for name in terms.accounts if not name.startswith("-")}
        if account and account in barred:
            return False
        is_listed = not named or account in named
        if account and terms.exact and not is_listed:
            return False
        is_sure = is_sure and bool(account) and is_listed and (terms.exact or not barred)
    return True if is_sure else None


def cpus_of(reservation: Reservation, nodes: Mapping[str, SlurmNode]) -> int:
    """CPUs that a reservation of some cores holds, 0 for one of whole nodes.

    On which of its nodes is not told: on each it may be as many.
    """
    found = _CPUS_RE.search(reservation.tres)
    if found is None or "gres/" in reservation.tres:
        return 0
    if any(name not in nodes for name in reservation.nodes):
        return 0
    total = sum(nodes[name].cpus_total for name in reservation.nodes)
    return int(found[1]) if int(found[1]) < total else 0


def role(terms: Terms, name: str, ask: Ask) -> int:
    """What a reservation is to a pod, whatever the time."""
    if ask.reservation:
        if name != ask.reservation:
            return OTHERS
        return DENIED if allows(terms, ask.account) is False else NAMED
    return DRAWN if terms.magnetic and allows(terms, ask.account) else OTHERS


def is_usable(ask: Ask, window: Window, now: float, end: float) -> bool:
    """Whether a pod may be claimed for inside a window now, if it is its own.

    Args:
        ask: what it asks for.
        window: the reserved time of a node.
        now: Unix seconds.
        end: when the pod is thought to end.

    """
    if window.end is not None and window.end <= now:
        return False
    if window.terms.flex:
        return True
    if window.start > now:
        return False
    # Slurm ends what runs in it with the reservation: a pod that is renewed has to want that.
    return window.end is None or window.end >= end or (ask.rolling and bool(ask.reservation))


def drawn_into(ask: Ask, node: NodeView, now: float, end: float) -> str:
    """The reservation that a claim on a node has to name: "" for none."""
    if ask.reservation:
        return ask.reservation
    for window in node.windows:
        if is_drawn(ask, window, now, end):
            return window.reservation
    return ""


def is_drawn(ask: Ask, window: Window, now: float, end: float) -> bool:
    """Whether a MAGNETIC reservation takes a pod in that names none."""
    mine = role(window.terms, window.reservation, ask) == DRAWN
    return mine and not window.cpus and is_usable(ask, window, now, end)


class Standing(NamedTuple):
    """What reservations are to a pod, by row of the view, N nodes.

    reserved: bool[N], for others before the pod would end. inside: bool[N], in the one that it has
    named, now. denied: bool[N], in the one that it has named and may not use. drawn: bool[N], in a
    MAGNETIC one that takes it in. cpus: int64[N], CPUs that are kept for others.
    """

    reserved: Bools
    inside: Bools
    denied: Bools
    drawn: Bools
    cpus: Longs


def standing(ask: Ask, index: ViewIndex, now: float, end: float) -> Standing:
    """Judge all windows of a view at once. O(W + reservations)."""
    windows = index.windows
    roles = np.array([role(terms, name, ask) for name, terms in index.reservations], np.int8)
    flexes = np.array([terms.flex for _, terms in index.reservations], np.bool_)
    if not len(roles):
        none = np.zeros(len(index), np.bool_)
        return Standing(none, none, none, none, np.zeros(len(index), np.int64))
    mine, flex = roles[windows.reservation], flexes[windows.reservation]
    is_left, is_whole = windows.end > now, windows.cpus == 0
    lasts = (windows.end >= end) | (ask.rolling and bool(ask.reservation))
    usable = is_left & (flex | ((windows.start <= now) & lasts))
    drawn = (mine == DRAWN) & usable & is_whole
    keeps = (windows.start < end) & is_left & (mine != NAMED) & ~drawn
    cpus = np.zeros(len(index), np.int64)
    np.add.at(cpus, windows.row[keeps & ~is_whole], windows.cpus[keeps & ~is_whole])
    return Standing(
        reserved=_at(index, windows.row[keeps & is_whole]),
        inside=_at(index, windows.row[usable & (mine == NAMED)]),
        denied=_at(index, windows.row[is_left & (mine == DENIED)]),
        drawn=_at(index, windows.row[drawn]),
        cpus=cpus,
    )


def _at(index: ViewIndex, rows: Ints) -> Bools:
    found = np.zeros(len(index), np.bool_)
    found[rows] = True
    return found


def keepers(ask: Ask, nodes: Iterable[NodeView], now: float, end: float) -> tuple[str, ...]:
    """Names of the reservations that keep a pod off some nodes, at most `MOST_NAMES`, sorted."""
    found = {
        window.reservation
        for node in nodes
        for window in node.windows
        if not window.cpus and is_kept(ask, window, now, end)
    }
    return tuple(sorted(found)[:MOST_NAMES])


def is_kept(ask: Ask, window: Window, now: float, end: float) -> bool:
    """Whether a window is kept for others before the pod would end."""
    if role(window.terms, window.reservation, ask) == NAMED or is_drawn(ask, window, now, end):
        return False
    return window.start < end and (window.end is None or window.end > now)
