"""Whatever goes wrong in an action, the core hears that no answer will come."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from slurmbridge.carry import Carrier
from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.metrics import Metrics
from slurmbridge.pool.claim import ClaimId
from slurmbridge.pool.errors import PeerTimeout
from tests.support.clock import HandClock, settle


class Claims:
    """Ends claims, or fails as told."""

    def __init__(self, error=None):
        self.error, self.ended = error, []

    async def cancel_many(self, pairs, deadline_s):
        if self.error is not None:
            raise self.error
        self.ended += [job_id for _, job_id in pairs]


def carrier(claims, told, clock):
    metrics = Metrics(CollectorRegistry())
    return Carrier(claims, None, None, None, None, None, told.append, clock, metrics, dict, 5.0)


def ends(count):
    return [act.End(ClaimId("c", f"u{i}"), i, "its pod is gone") for i in range(1, count + 1)]


async def test_claims_that_end_together_are_ended_by_one_command():
    claims, told, clock = Claims(), [], HandClock()
    work = carrier(claims, told, clock)
    for action in ends(3):
        work.start(action)
    await clock.advance(1)
    assert claims.ended == [1, 2, 3]
    assert told == [ev.Ended(f"u{i}", i) for i in (1, 2, 3)]
    await work.stop()


@pytest.mark.parametrize(
    "error", [PeerTimeout("slurmctld", "scancel", "late"), RuntimeError("a bug of ours")], ids=repr
)
async def test_each_claim_that_could_not_be_ended_is_told_so(error):
    told, clock = [], HandClock()
    work = carrier(Claims(error), told, clock)
    for action in ends(2):
        work.start(action)
    await clock.advance(1)
    await settle()
    assert [(e.what, e.uid, e.job_id) for e in told] == [("End", "u1", 1), ("End", "u2", 2)]
    assert not asyncio.all_tasks() - {asyncio.current_task()}


async def test_where_a_gang_is_let_go_is_one_line_with_its_jobs_and_nodes():
    work = carrier(Claims(), [], HandClock())
    seats = (("default/g0", "n2", 8), ("default/g1", "n1", 7), ("default/g2", "n2", 9))
    with capture_logs() as lines:
        work.start(act.LogGang("own/default/g/", "rack", "r1", seats))
    (told,) = lines
    assert (told["event"], told["gang"], told["domain"]) == ("gang let go", "own/default/g/", "r1")
    assert (told["pods"], told["jobs"], told["nodes"]) == (3, [7, 8, 9], "n[1-2]")
