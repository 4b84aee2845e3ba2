"""A long random story of two bridges and three clients: nobody ever sees what was never said."""

import asyncio

import numpy as np
import pytest

from slurmbridge.link.freshness import make_term, order_of
from slurmbridge.link.server import Limits
from tests.support.link import Bridge, client_of, until
from tests.support.pool_view import make_node

STEPS = 150


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_clients_see_only_published_views_and_never_go_back_to_an_old_leader(seed):
    dice = np.random.default_rng(seed)
    published, seen = {}, {name: [] for name in "abc"}
    names = [f"n{number}" for number in range(40)]
    nodes = {name: make_node(name) for name in names}
    term = 0

    async def started(address="127.0.0.1:0"):
        bridge = Bridge(address, limits=Limits(queue=2))
        await bridge.server.start()
        return bridge

    bridges = [await started(), await started()]
    leads = None

    def publish(bridge):
        view = bridge.publish(*nodes.values())
        published[view.term, view.generation] = view

    def move(to):
        nonlocal leads, term
        for index, bridge in enumerate(bridges):
            if index != to:
                bridge.server.set_leader(False, bridges[to].address if to is not None else "")
        leads = to
        if to is not None:
            term += 1
            bridges[to].term = make_term(1_800_000_000, term, 1, f"bridge-{to}")
            bridges[to].server.set_leader(True, bridges[to].address, term=bridges[to].term)
            publish(bridges[to])

    addresses = [bridge.address for bridge in bridges]
    watch = {name: lambda view, _policy, name=name: seen[name].append(view) for name in seen}
    async with (
        client_of(*addresses, on_change=watch["a"]) as one,
        client_of(*reversed(addresses), on_change=watch["b"]) as two,
        client_of(addresses[0], on_change=watch["c"]) as three,
    ):
        for _ in range(STEPS):
            what = dice.random()
            if what < 0.08:
                move(int(dice.integers(2)))
            elif what < 0.10:
                move(None)
            elif what < 0.13:
                index = int(dice.integers(2))
                await bridges[index].server.stop()
                if leads == index:
                    leads = None
                bridges[index] = await started(addresses[index])
                if leads is not None:
                    bridges[index].server.set_leader(False, addresses[leads])
            elif leads is not None:
                for name in dice.choice(names, int(dice.integers(0, 6)), replace=False):
                    nodes[str(name)] = make_node(str(name), free=int(dice.integers(9)))
                publish(bridges[leads])
            if dice.random() < 0.7:
                await asyncio.sleep(float(dice.random()) * 0.02)
        move(0)
        await until(lambda: all(c.view == bridges[0].view for c in (one, two, three)))
        assert all(0 <= c.age_s() < 60 for c in (one, two, three))
    for views in seen.values():
        last = ((), 0)
        for view in views:
            if view is None:
                continue
            assert view == published[view.term, view.generation]
            assert (order_of(view.term), view.generation) > last
            last = (order_of(view.term), view.generation)
    for bridge in bridges:
        await bridge.server.stop()
