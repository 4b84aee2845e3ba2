"""Watch over real sockets: views, deltas, ages, leaders that come and go."""

import asyncio
import gc
import signal
import time

import grpc
import grpc.aio
import pytest

from slurmbridge.clock import SystemClock
from slurmbridge.link import codec
from slurmbridge.link._gen import pool_pb2 as pb
from slurmbridge.link.client import LinkClient
from slurmbridge.link.delta import difference
from slurmbridge.link.fault import read_fault
from slurmbridge.link.server import SERVICE, Limits
from slurmbridge.pool.errors import ConfigError, InvariantError
from slurmbridge.pool.policy import Policy
from tests.support.link import (
    CLOCK,
    POLICY,
    Bridge,
    BridgeProcess,
    bridges,
    client_of,
    until,
)
from tests.support.pool_view import make_node, make_view


def raw_watch(channel, **request):
    """A Watch without our client."""
    return channel.unary_stream(
        f"/{SERVICE}/Watch", pb.WatchRequest.SerializeToString, pb.ViewMessage.FromString
    )(pb.WatchRequest(**{"version": 1} | request))


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value


async def test_a_client_has_the_whole_view_and_then_every_change():
    seen = []
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address, on_change=lambda v, p: seen.append((v, p))) as client:
            await until(lambda: client.view)
            assert (client.view, client.policy) == (bridge.view, POLICY)
            assert (client.generation, client.term, client.leader) == (1, "t1", bridge.address)
            bridge.publish(
                make_node("a", free=1), make_node("b"), make_node("c"), held=[("u", "a", 7)]
            )
            await until(lambda: client.generation == 2)
            assert client.view == bridge.view
            rest = [make_node(name) for name in "defg"]
            bridge.publish(make_node("b"), make_node("c"), *rest)
            await until(lambda: client.generation == 3)
            assert client.view == bridge.view
            bridge.publish(make_node("c"), *rest, make_node("h", free=0))
            await until(lambda: client.generation == 4)
            assert client.view == bridge.view
            assert (client.stats.wholes, client.stats.deltas, client.stats.streams) == (2, 2, 1)
    assert [view.generation for view, _ in seen] == [1, 2, 3, 4]
    assert client.leader == ""


async def test_a_change_of_policy_travels_with_the_view_and_alone():
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await until(lambda: client.view)
            other = Policy(cluster="prod", candidates=3)
            bridge.publish(*bridge.view.nodes.values(), generation=1, policy=other)
            await until(lambda: client.policy == other)
            assert client.generation == 1


async def test_reading_again_makes_the_view_younger_and_disturbs_nobody():
    seen = []
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address, on_change=lambda *_: seen.append(1)) as client:
            await until(lambda: client.view)
            old = bridge.publish(*bridge.view.nodes.values(), as_of=CLOCK.wall() - 40, generation=2)
            await until(lambda: client.generation == 2)
            assert client.age_s() > 39.5
            bridge.publish(*old.nodes.values(), generation=2)
            await until(lambda: client.age_s() < 20)
            assert client.view == bridge.view
    assert len(seen) == 2


async def test_without_news_the_view_ages_and_heartbeats_keep_the_stream():
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await until(lambda: client.view)
            began = time.monotonic()
            await until(lambda: bridge.server.counts.heartbeats >= 3, 30)
            lasted_s = time.monotonic() - began
            assert client.age_s() > lasted_s - 0.5
            assert client.stats.streams == 1


async def test_setting_the_bridge_wall_clock_back_makes_no_reading_younger():
    class Stepped(SystemClock):
        step = 0.0

        def wall(self):
            return super().wall() + self.step

    clock = Stepped()
    async with bridges(clock=clock) as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await until(lambda: client.view)
            reading = CLOCK.wall() - 30
            bridge.publish(make_node("a"), as_of=reading)
            await until(lambda: client.generation == 2)
            clock.step = -3600.0
            bridge.publish(make_node("a", free=2), as_of=reading)
            await until(lambda: client.generation == 3)
            # Nor older by the hour.
            assert 29.5 < client.age_s() < 600


async def test_a_leader_without_a_view_yet_is_connected_but_has_no_age():
    async with bridges() as (bridge,):
        bridge.server.set_leader(True, "", term="t1")
        async with client_of(bridge.address) as client:
            await until(lambda: client.leader)
            assert (client.view, client.age_s(), client.generation, client.term) == (
                None,
                None,
                None,
                "t1",
            )
            bridge.term = "t1"
            bridge.publish(make_node("a"))
            await until(lambda: client.view)


async def test_a_follower_refuses_and_says_who_leads():
    async with bridges() as (bridge,), grpc.aio.insecure_channel(bridge.address) as channel:
        bridge.server.set_leader(False, "10.1.2.3:7443")
        error = await refused(raw_watch(channel))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert read_fault(error).leader == "10.1.2.3:7443"
        claim = channel.unary_unary(f"/{SERVICE}/Claim")
        request = pb.ClaimRequest(uid="u", namespace="n", name="p", kube_node="a")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await claim(request.SerializeToString())
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert read_fault(caught.value).leader == "10.1.2.3:7443"
        assert bridge.claims == []


async def test_a_client_that_knows_only_a_follower_finds_the_leader_by_its_hint():
    async with bridges(2) as (follower, leader):
        follower.server.set_leader(False, leader.address)
        leader.lead()
        async with client_of(follower.address) as client:
            await until(lambda: client.view)
            assert client.leader == leader.address


async def test_a_client_tries_all_addresses_until_one_leads():
    async with bridges(3) as three:
        three[2].lead()
        dead = "127.0.0.1:1"
        async with client_of(dead, *(b.address for b in three)) as client:
            await until(lambda: client.view)
            assert client.leader == three[2].address


async def test_a_name_stands_for_all_its_addresses():
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address.replace("127.0.0.1", "localhost")) as client:
            await until(lambda: client.view)


async def test_two_followers_that_name_each_other_are_left_after_a_few_hops():
    async with bridges(3) as (one, other, leader):
        one.server.set_leader(False, other.address)
        other.server.set_leader(False, one.address)
        leader.lead()
        async with client_of(one.address, leader.address) as client:
            await until(lambda: client.view)


async def test_when_leadership_moves_the_streams_close_and_the_old_view_is_gone():
    async with bridges(2) as (one, other):
        one.lead("t1")
        async with client_of(one.address, other.address) as client:
            await until(lambda: client.term == "t1")
            other.server.set_leader(True, other.address, term="t2")
            one.server.set_leader(False, other.address)
            await until(lambda: one.server.watchers == 0)
            await until(lambda: client.term == "t2")
            # The new leader has said its term but no view: nothing is served.
            assert (client.view, client.age_s()) == (None, None)
            other.lead("t2")
            await until(lambda: client.view)
            assert client.view.term == "t2"


async def test_leadership_that_goes_and_comes_back_never_brings_back_the_old_view():
    """Kubernetes' HAMi scheduler served a cache of the first term here (HAMi issue 2911)."""
    seen = []
    async with bridges(2) as (one, other):
        one.lead("t1")
        stale = one.view
        async with client_of(
            one.address, other.address, on_change=lambda v, _: seen.append(v)
        ) as client:
            await until(lambda: client.view)
            one.server.set_leader(False, other.address)
            other.lead("t2")
            await until(lambda: client.view and client.view.term == "t2")
            other.server.set_leader(False, one.address)
            one.server.set_leader(True, one.address, term="t3")
            # A reading that was under way since the first term ends now.
            one.server.publish(stale, POLICY)
            await until(lambda: client.term == "t3")
            await asyncio.sleep(0.2)
            assert client.view is None
            one.lead("t3")
            await until(lambda: client.view and client.view.term == "t3")
    terms = [view.term for view in seen if view is not None]
    assert terms == ["t1", "t2", "t3"]


async def test_without_named_terms_a_view_of_before_the_loss_is_refused_too():
    async with bridges() as (bridge,):
        bridge.lead("t1")
        stale = bridge.view
        bridge.server.set_leader(False)
        bridge.server.set_leader(True)
        async with client_of(bridge.address) as client:
            bridge.server.publish(stale, POLICY)
            await until(lambda: client.leader)
            assert client.view is None
            bridge.term = "t2"
            bridge.publish(make_node("a"))
            await until(lambda: client.view)


async def test_a_bridge_that_wakes_up_and_still_believes_in_its_old_term_is_not_believed():
    async with bridges(2) as (old, new):
        old.lead("t1")
        async with client_of(old.address, new.address) as client:
            await until(lambda: client.term == "t1")
            new.lead("t2")
            await old.server.stop()
            await until(lambda: client.view.term == "t2")
            again = Bridge(old.address)
            await again.server.start()
            again.lead("t1")
            await new.server.stop()
            for _ in range(40):
                await asyncio.sleep(0.02)
                assert client.view.term == "t2"
            assert client.leader == ""
            await again.server.stop()


async def test_a_client_comes_back_after_its_server_was_killed_and_started_again():
    first = BridgeProcess()
    try:
        async with client_of(first.address) as client:
            await until(lambda: client.generation and client.generation > 2)
            first.stop()
            await until(lambda: client.leader == "")
            age, held = client.age_s(), client.view
            await asyncio.sleep(0.3)
            assert client.view == held
            assert client.age_s() >= age + 0.25
            second = BridgeProcess(first.address, term="t2")
            try:
                await until(lambda: client.view.term == "t2", 30)
                # It reads ten times a second.
                await until(lambda: client.age_s() < 1, 30)
            finally:
                second.stop()
    finally:
        first.stop()


async def test_a_server_that_falls_silent_is_given_up_for_one_that_speaks():
    frozen = BridgeProcess()
    try:
        async with bridges() as (other,), client_of(frozen.address, other.address) as client:
            await until(lambda: client.view)
            other.lead("t2")
            frozen.signal(signal.SIGSTOP)
            await until(lambda: client.view.term == "t2", 30)
            assert client.stats.silences >= 1
            # It wakes up, and the client has moved on.
            frozen.signal(signal.SIGCONT)
            await asyncio.sleep(0.3)
            assert client.view.term == "t2"
    finally:
        frozen.stop()


async def test_a_client_that_does_not_read_is_kept_within_bounds_and_then_gets_the_newest_whole():
    names = [f"gpu-{number:05d}" for number in range(4000)]
    nodes = {name: make_node(name) for name in names}
    async with (
        bridges(limits=Limits(queue=4)) as (bridge,),
        grpc.aio.insecure_channel(
            bridge.address, options=[("grpc.max_receive_message_length", -1)]
        ) as channel,
        client_of(bridge.address) as reader,
    ):
        bridge.lead("t1", *nodes.values())
        call = raw_watch(channel)
        first = await call.read()
        assert first.WhichOneof("body") == "whole"
        await until(lambda: reader.view)
        for step in range(60):
            nodes |= {name: make_node(name, free=step % 8) for name in names[:1500]}
            bridge.publish(*nodes.values())
            await asyncio.sleep(0)
            assert all(len(w.queue) <= 4 for w in bridge.server._feed.watchers)
            if step % 4 == 0:
                await asyncio.sleep(0.01)
        await until(lambda: bridge.server.counts.collapsed > 0)
        # The one that reads has not suffered: it is up to date.
        await until(lambda: reader.generation == bridge.view.generation)
        assert reader.view == bridge.view
        wholes, generation = 0, first.generation
        while generation != bridge.view.generation:
            message = await asyncio.wait_for(call.read(), 20)
            wholes += message.WhichOneof("body") == "whole"
            generation = message.generation
        assert wholes >= 1
        assert codec.decode_view(message.whole) == bridge.view
        call.cancel()


async def test_a_client_that_takes_nothing_at_all_is_cut_off(monkeypatch):
    monkeypatch.setattr("slurmbridge.link.server.WRITE_S", 0.3)
    names = [f"gpu-{number:05d}" for number in range(4000)]
    async with (
        bridges() as (bridge,),
        grpc.aio.insecure_channel(
            bridge.address, options=[("grpc.max_receive_message_length", -1)]
        ) as channel,
    ):
        bridge.lead("t1", *(make_node(name) for name in names))
        call = raw_watch(channel)
        await until(lambda: bridge.server.watchers == 1)
        for step in range(200):
            bridge.publish(*(make_node(name, free=step % 8) for name in names))
            await asyncio.sleep(0.01)
            if bridge.server.watchers == 0:
                break
        await until(lambda: bridge.server.watchers == 0)
        call.cancel()


async def test_one_watcher_too_many_is_told_so():
    async with bridges(limits=Limits(watchers=1)) as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await until(lambda: client.view)
            async with grpc.aio.insecure_channel(bridge.address) as channel:
                error = await refused(raw_watch(channel))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert bridge.server.watchers == 1


async def test_a_client_of_an_older_version_is_told_so():
    async with bridges() as (bridge,), grpc.aio.insecure_channel(bridge.address) as channel:
        bridge.lead()
        error = await refused(raw_watch(channel, version=0))
        assert (error.code(), read_fault(error).reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "version",
        )


V1 = make_view(make_node("a"), make_node("b"), make_node("c"))
V2 = make_view(make_node("a", free=1), make_node("b"), make_node("c"), generation=2)
V3 = make_view(make_node("a", free=2), make_node("b"), make_node("c"), generation=3)
WHOLE = {
    "version": 1,
    "term": "t1",
    "age_s": 0.1,
    "generation": 1,
    "whole": codec.encode(V1),
    "policy": codec.encode(POLICY),
}
DELTA_2 = {
    "version": 1,
    "term": "t1",
    "age_s": 0.1,
    "generation": 2,
    "delta": codec.encode(difference(V1, V2)),
}
DELTA_3 = {
    "version": 1,
    "term": "t1",
    "age_s": 0.1,
    "generation": 3,
    "delta": codec.encode(difference(V2, V3)),
}

FAULTY = {
    "a delta before the whole view": [DELTA_2],
    "a delta that was left out": [WHOLE, DELTA_3],
    "a delta that comes twice": [WHOLE, DELTA_2, DELTA_2],
    "a delta with another generation than announced": [WHOLE, DELTA_2 | {"generation": 7}],
    "a heartbeat of a generation that never came": [WHOLE, {"version": 1, "term": "t1", "age_s": 0.1, "generation": 2}],
    "a whole view of another term than announced": [WHOLE | {"term": "t0"}],
    "bytes that are no view": [WHOLE | {"whole": b"\xc1"}],
    "bytes that are no policy": [WHOLE | {"policy": b"\xc1"}],
    "a version that is not known yet": [WHOLE | {"version": 2}],
}  # fmt: skip


class Speaker:
    """A server that says what it is told on its first stream, then the right thing."""

    def __init__(self, first):
        self.streams = 0
        self._first = first

    async def watch(self, request, context):
        self.streams += 1
        if self.streams == 1:
            for fields in self._first:
                yield pb.ViewMessage(**fields)
        else:
            yield pb.ViewMessage(**WHOLE)
            yield pb.ViewMessage(**DELTA_2)
        await asyncio.sleep(30)

    @classmethod
    async def start(cls, first):
        speaker = cls(first)
        server = grpc.aio.server()
        handler = grpc.unary_stream_rpc_method_handler(
            speaker.watch, pb.WatchRequest.FromString, pb.ViewMessage.SerializeToString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Watch": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return speaker, server, f"127.0.0.1:{port}"


@pytest.mark.parametrize("messages", FAULTY.values(), ids=FAULTY.keys())
async def test_after_a_fault_in_the_stream_the_client_starts_anew(messages):
    speaker, server, address = await Speaker.start(messages)
    async with client_of(address) as client:
        await until(lambda: client.generation == 2 and speaker.streams == 2)
        assert client.view == V2
        assert client.stats.protocol_errors == 1
    await server.stop(None)


async def test_a_stream_that_lags_for_long_is_opened_anew(monkeypatch):
    monkeypatch.setattr("slurmbridge.link.replica.LAG_FOR_S", 0.2)
    beat = {"version": 1, "term": "t1", "age_s": 0.1, "generation": 1}

    class Lagging(Speaker):
        async def watch(self, request, context):
            self.streams += 1
            yield pb.ViewMessage(**WHOLE)
            sent_s = 0.0
            while True:
                await asyncio.sleep(0.05)
                # The server's host was paused for a minute: its clock has stood still.
                sent_s += 0.05
                yield pb.ViewMessage(**beat, sent_s=sent_s - 60 if self.streams == 1 else sent_s)

    speaker, server, address = await Lagging.start([])
    async with client_of(address) as client:
        await until(lambda: client.view)
        await until(lambda: client.age_s() > 30)
        await until(lambda: speaker.streams == 2)
        await until(lambda: client.age_s() < 1)
    await server.stop(None)


async def test_a_reader_that_raises_costs_nothing():
    def broken(view, policy):
        raise RuntimeError("bug of a reader")

    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address, on_change=broken) as client:
            await until(lambda: client.view)
            bridge.publish(make_node("a"))
            await until(lambda: client.generation == 2)
            assert client.stats.streams == 1


async def test_publishing_out_of_order_is_a_bug_and_changes_nothing():
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await until(lambda: client.view)
            good = bridge.view
            with pytest.raises(InvariantError):
                bridge.publish(make_node("a", free=0), generation=1)
            bridge.view = good
            bridge.publish(make_node("z"))
            await until(lambda: client.generation == 2)
            assert client.view == bridge.view


async def test_a_follower_publishes_to_nobody():
    async with bridges() as (bridge,):
        bridge.term = "t1"
        bridge.publish(make_node("a"))
        bridge.server.set_leader(True, term="t2")
        bridge.publish(make_node("a"))
        async with client_of(bridge.address) as client:
            await until(lambda: client.leader)
            assert client.view is None


async def test_a_taken_port_is_a_configuration_error():
    async with bridges() as (bridge,):
        other = Bridge(bridge.address)
        with pytest.raises(ConfigError, match="cannot listen"):
            await other.server.start()


async def test_plain_text_over_the_network_is_refused_on_both_sides():
    with pytest.raises(ConfigError, match="insecure"):
        Bridge("0.0.0.0:0")
    with pytest.raises(ConfigError) as caught:
        LinkClient(["10.0.0.1:1", "nonsense", "127.0.0.1:1"], clock=CLOCK, rng=lambda: 0.5)
    assert [problem.path for problem in caught.value.problems] == [
        "$.link.addresses[0]",
        "$.link.addresses[1]",
    ]
    with pytest.raises(ConfigError, match="at least one"):
        LinkClient([], clock=CLOCK, rng=lambda: 0.5)
    Bridge("0.0.0.0:0", insecure=True)


async def test_a_hint_out_of_this_host_is_not_followed_in_plain_text():
    async with bridges(2) as (follower, leader):
        follower.server.set_leader(False, "192.0.2.1:7443")
        leader.lead()
        async with client_of(follower.address, leader.address) as client:
            await until(lambda: client.view)
            # One stream to the follower, one to the leader, and none to where the follower points.
            assert client.stats.streams == 2


async def test_a_unix_socket_serves_and_is_for_its_owner_only(tmp_path):
    path = tmp_path / "link.sock"
    async with bridges(address=f"unix:{path}") as (bridge,):
        bridge.lead()
        assert path.stat().st_mode & 0o777 == 0o600
        async with client_of(f"unix:{path}") as client:
            await until(lambda: client.view)


async def test_closing_leaves_no_task_behind():
    before = asyncio.all_tasks()
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await until(lambda: client.view)
        await until(lambda: bridge.server.watchers == 0)
    gc.collect()
    await until(lambda: asyncio.all_tasks() <= before)


async def test_a_change_that_comes_as_a_heartbeat_is_due_is_not_left_out(monkeypatch):
    """Both at the same turn of the loop: the heartbeat must not tell of what was not sent yet."""
    monkeypatch.setattr("slurmbridge.link.server.HEARTBEAT_S", 0.001)
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await until(lambda: client.view)
            for free in range(600):
                bridge.publish(make_node("a", free=free % 8), make_node("b"), make_node("c"))
                await asyncio.sleep(0.001)
            await until(lambda: client.view.generation == bridge.view.generation)
            assert client.stats.streams == 1
