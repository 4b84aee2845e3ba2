"""Whose turn it is among gangs: hundreds may wait, and each look at a large pool costs.

Whenever the pool grows all gangs that wait are to be laid again, oldest first. That is done within
a budget for each tick. Those for which nothing is left come first in the next one, and those that
were laid last come after all others: so each is reached, however often the pool grows.
"""

from __future__ import annotations

from slurmbridge.core.state import State
from slurmbridge.core.waiting import LOOKS_A_TICK, GangState

LOOKS_EACH = 500
"""What a look costs besides its nodes."""


def all_again(state: State) -> None:
    """The pool has grown."""
    waiting = state.waiting
    waiting.gangs_due |= waiting.gangs.keys()
    if not waiting.gangs_later:
        waiting.round += 1


def next_ones(state: State) -> list[GangState]:
    """Those that something has happened to, in their order."""
    waiting = state.waiting
    due, waiting.gangs_due = waiting.gangs_due, set()
    found = [gang for key in due if (gang := waiting.gangs.get(key)) is not None]
    return sorted(found, key=lambda gang: (gang.round == waiting.round, gang.since, gang.key))


def may_look(state: State, gang: GangState) -> bool:
    """Whether a gang may be laid now; if not, it comes in the next tick."""
    waiting = state.waiting
    if waiting.looks_left <= 0:
        waiting.gangs_later.add(gang.key)
        return False
    waiting.looks_left -= len(state.views) + LOOKS_EACH
    gang.round = waiting.round
    return True


def tick(state: State) -> None:
    """A new budget, and those that were left over."""
    waiting = state.waiting
    waiting.looks_left = LOOKS_A_TICK
    waiting.gangs_due |= waiting.gangs_later
    waiting.gangs_later = set()
    due = [gang for key in waiting.gangs_due if (gang := waiting.gangs.get(key)) is not None]
    if all(gang.round == waiting.round for gang in due):
        waiting.round += 1
