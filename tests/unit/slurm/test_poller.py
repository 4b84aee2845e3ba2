import asyncio

import pytest

from slurmbridge.pool.errors import PeerTimeout, PeerUnavailable
from slurmbridge.pool.record import SlurmConfig, SlurmSnapshot
from slurmbridge.slurm.poller import Pace, Poller, backoff, next_interval
from tests.support.clock import HandClock, settle

PACE = Pace(budget=0.05, min_s=1.0, max_s=30.0)
COSTS = {
    "a fast slurmctld is read at the shortest interval": (0.001, 1.0),
    "a share of 5 % of 0.2 s": (0.2, 4.0),
    "a slow slurmctld is read at the longest": (16.0, 30.0),
    "nothing measured": (0.0, 1.0),
}


@pytest.mark.parametrize(("cost_s", "interval"), COSTS.values(), ids=COSTS)
def test_the_interval_keeps_to_the_budget_within_bounds(cost_s, interval):
    assert next_interval(PACE, cost_s) == pytest.approx(interval)
    assert interval <= next_interval(PACE, cost_s, 0.99) <= 1.1 * interval


def test_failures_are_answered_with_growing_pauses():
    assert [backoff(PACE, n) for n in range(1, 7)] == [0.25, 0.5, 1, 2, 4, 4]
    assert backoff(PACE, 10_000) == 4
    assert backoff(PACE, 4, jitter=1.0) == 1


class World:
    """A slurmctld whose readings take `takes` and cost `cost`; `fails` makes them fail."""

    def __init__(self, clock):
        self.clock, self.takes, self.cost, self.fails = clock, 0.0, 0.0, False
        self.begun, self.now, self.most = [], 0, 0
        self.told = []

    async def read(self):
        self.begun.append(self.clock.monotonic())
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.clock.sleep(self.takes)
            if self.fails:
                raise PeerTimeout("slurmctld", "squeue", "no answer")
        finally:
            self.now -= 1
        return SlurmSnapshot(0, 0, SlurmConfig("", "", 0), {}, {}, cost_s=self.cost)


@pytest.fixture
async def world():
    made = World(HandClock())
    made.poller = Poller(
        made.read,
        lambda snapshot, _interval: made.told.append(snapshot),
        made.told.append,
        pace=PACE,
        clock=made.clock,
        jitter=lambda: 0.0,
    )
    task = asyncio.create_task(made.poller.run())
    yield made
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_readings_follow_each_other_at_the_interval(world):
    await world.clock.advance(3.5)
    assert world.begun == [0, 1, 2, 3]
    assert len(world.told) == 4


async def test_a_slow_reading_is_never_overtaken_and_slows_the_pace(world):
    world.takes, world.cost = 16.0, 16.0
    await world.clock.advance(160)
    assert world.most == 1
    # Two dear readings after a cheap one may be a busy host of ours; three are a slow slurmctld.
    assert world.begun == [0, 1, 18, 35, 81, 127]


async def test_a_failure_is_told_and_waited_out_longer_each_time(world):
    await settle()
    world.fails = True
    await world.clock.advance(13)
    assert world.begun == [0, 1, 1.25, 1.75, 2.75, 4.75, 8.75, 12.75]
    assert all(isinstance(told, PeerUnavailable) for told in world.told[1:])
    world.fails = False
    await world.clock.advance(6)
    assert world.begun[8:] == [16.75, 17.75, 18.75]


async def test_a_poke_hurries_the_next_reading_but_not_below_the_shortest_interval(world):
    world.cost = 0.5
    await world.clock.advance(5)
    assert world.begun == [0, 1, 2, 3]
    world.poller.poke()
    await world.clock.advance(0.1)
    assert world.begun == [0, 1, 2, 3, 5]
    world.poller.poke()
    await world.clock.advance(0.8)
    assert world.begun == [0, 1, 2, 3, 5]
    await world.clock.advance(0.2)
    assert world.begun == [0, 1, 2, 3, 5, 6]
    await world.clock.advance(9.8)
    assert world.begun == [0, 1, 2, 3, 5, 6]


async def test_a_poke_does_not_hurry_a_slurmctld_in_trouble(world):
    world.fails = True
    await world.clock.advance(9)
    begun = list(world.begun)
    world.poller.poke()
    await world.clock.advance(0.1)
    assert world.begun == begun
