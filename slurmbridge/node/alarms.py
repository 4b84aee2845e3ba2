"""Alarms of the hooks: findings until nothing is left of what they were raised for. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from slurmbridge.node.book import BookEntry
from slurmbridge.pool.noderecord import NodeFinding

LEAST_S: Final = 120.0
"""An alarm stands so long whatever becomes of its cause: no two scrapes shall miss it."""
MOST_S: Final = 24 * 3600.0
"""And no longer than this where its cause is not known: the drained node says the rest."""
MOST: Final = 64
"""Alarms at a time; the oldest goes."""


@dataclass(frozen=True, slots=True)
class _Alarm:
    finding: NodeFinding
    raised: float
    pods: frozenset[str]


class Alarms:
    """Alarms that stand."""

    def __init__(self) -> None:
        self._alarms: dict[str, _Alarm] = {}

    @property
    def findings(self) -> tuple[NodeFinding, ...]:
        """The alarms, oldest first."""
        return tuple(alarm.finding for alarm in self._alarms.values())

    def raise_for(
        self,
        job_id: int,
        gpus: Collection[int],
        text: str,
        book: Collection[BookEntry],
        now: float,
        since: float,
    ) -> NodeFinding:
        """Note an alarm about a job; the pods that it is about are those of its claim or GPUs.

        Args:
            job_id: a claim that is held, or a native job that was not let in.
            gpus: of the job.
            text: for people.
            book: who was given what.
            now: monotonic seconds. since: the same moment for people, Unix seconds.

        """
        own = {e.uid for e in book if e.job_id == job_id}
        pods = own or {e.uid for e in book if e.gpus & set(gpus)}
        subject = f"job {job_id}"
        finding = NodeFinding("alarm", subject, text, since=since)
        self._alarms.pop(subject, None)
        self._alarms[subject] = _Alarm(finding, now, frozenset(pods))
        while len(self._alarms) > MOST:
            del self._alarms[next(iter(self._alarms))]
        return finding

    def prune(self, book: Collection[str], now: float) -> None:
        """Drop those that were seen long enough and whose pods are gone from the book (UIDs)."""
        for subject, alarm in list(self._alarms.items()):
            age = now - alarm.raised
            is_over = not alarm.pods & set(book) if alarm.pods else age > MOST_S
            if is_over and age > LEAST_S:
                del self._alarms[subject]
