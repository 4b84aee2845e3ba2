"""Feed and replica without sockets: any order of publishing, sending, lying about and losing.

Whatever happens, a replica holds only what was published, never goes back to an older leadership,
and never takes its view for younger than it is.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from slurmbridge.link.feed import Feed
from slurmbridge.link.freshness import make_term, order_of
from slurmbridge.link.replica import Replica, Stream
from slurmbridge.pool.errors import PeerProtocolError, PeerUnavailable
from slurmbridge.pool.policy import Policy
from tests.support.pool_view import make_node, make_view

POLICY = Policy(cluster="prod")
NAMES = [f"n{number}" for number in range(8)]
NEVER_YOUNGER_BY = 0.05
"""What the allowance for drift may hide in a story of a minute."""


class Hands:
    def __init__(self, start=0.0, wall=1.8e9):
        self.now, self.offset = start, wall - start

    def monotonic(self):
        return self.now

    def wall(self):
        return self.now + self.offset


OPS = st.one_of(
    st.tuples(st.just("publish"), st.sampled_from(NAMES), st.integers(0, 8)),
    st.tuples(st.just("read again")),
    st.tuples(st.just("send"), st.integers(1, 4)),
    st.tuples(st.just("deliver"), st.integers(1, 6)),
    st.tuples(st.just("wait"), st.floats(0.0, 5.0)),
    st.tuples(st.just("set wall clock"), st.floats(-3600, 3600)),
    st.tuples(st.just("connect"), st.integers(0, 1)),
    st.tuples(st.just("elect"), st.integers(0, 1)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(OPS, min_size=5, max_size=60))
def test_a_replica_never_holds_what_was_not_said_nor_takes_it_for_younger(ops):
    # The two hosts' monotonic clocks have nothing in common but their pace.
    here, there = Hands(start=50.0), Hands(start=9000.0)
    feeds = [Feed(there, bound=2), Feed(there, bound=2)]
    views, read_at, seen = {}, {}, []
    terms, leader, nodes, generation = 0, 0, {n: make_node(n) for n in NAMES}, 0

    def changed(view, _policy):
        if view is not None:
            assert view == views[view.term, view.generation]
            seen.append((order_of(view.term), view.generation))

    replica = Replica(here, changed)
    watcher, stream, arrived, in_flight = None, None, 0.0, []

    def elect(index):
        nonlocal terms, leader, generation
        terms, leader, generation = terms + 1, index, 0
        for other, feed in enumerate(feeds):
            name = make_term(1, terms, 1, "b")
            feed.set_leader(other == index, "", term=name if other == index else "")

    def publish():
        term = feeds[leader].term
        # The reading took place 0.3 s ago.
        view = make_view(
            *nodes.values(), generation=generation, term=term, as_of=there.wall() - 0.3
        )
        views[term, generation] = view
        read_at[view.as_of] = there.now - 0.3
        feeds[leader].publish(view, POLICY)

    def connect(index):
        nonlocal watcher, stream, arrived, in_flight
        watcher, stream, arrived, in_flight = None, None, there.now, []
        if feeds[index].leads:
            watcher, stream = (feeds[index], feeds[index].join()), Stream(here.now)

    elect(0)
    for op, *args in ops:
        if op == "publish":
            name, free = args
            nodes[name] = make_node(name, free=free)
            generation += 1
            publish()
        elif op == "read again" and generation:
            publish_as = nodes
            nodes = dict(publish_as)
            if (feeds[leader].term, generation) in views:
                publish()
        elif op == "wait":
            here.now += args[0]
            there.now += args[0]
        elif op == "set wall clock":
            there.offset += args[0]
        elif op == "elect":
            elect(*args)
        elif op == "connect":
            connect(*args)
        elif op == "send" and watcher is not None:
            feed, queue = watcher
            for _ in range(args[0]):
                if queue.over is None:
                    message = feed.next_for(queue) or feed.heartbeat()
                    message.sent_s = there.now - arrived
                    in_flight.append(message)
        elif op == "deliver" and stream is not None:
            for _ in range(args[0]):
                if in_flight:
                    try:
                        replica.take(stream, in_flight.pop(0))
                    except PeerUnavailable as error:
                        assert not isinstance(error, PeerProtocolError)
                        watcher, stream, in_flight = None, None, []
                        break
        if replica.view is not None:
            true_age = there.now - read_at[replica.view.as_of]
            assert replica.age_s() >= true_age - NEVER_YOUNGER_BY
    assert seen == sorted(set(seen))
