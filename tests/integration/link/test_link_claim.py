"""Claims, releases and questions over real sockets: answers, refusals, deadlines, overload."""

import asyncio

import grpc
import grpc.aio
import pytest

from slurmbridge.link._gen import pool_pb2 as pb
from slurmbridge.link.client import LinkClient
from slurmbridge.link.fault import read_fault
from slurmbridge.link.message import ClaimAsk, ClaimGrant, ReleaseAsk
from slurmbridge.link.server import SERVICE, Limits
from slurmbridge.log import current_cause
from slurmbridge.pool.errors import (
    Conflict,
    InvariantError,
    ParseError,
    PeerProtocolError,
    PeerRejected,
    PeerTimeout,
    PeerUnavailable,
)
from tests.support.link import CLOCK, BridgeProcess, bridges, client_of, until

ASK = ClaimAsk(uid="uid-1", namespace="team", name="train-0", kube_node="a", cause="bind/1")


async def connected(client):
    await until(lambda: client.view)
    return client


async def test_a_claim_is_granted_with_its_cause_and_deadline_passed_on():
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await connected(client)
            causes = []

            async def grant(ask):
                causes.append(current_cause())
                return ClaimGrant(job_id=4_000_000_000, gpus="0-3,6", generation=2**40)

            bridge.on_claim = grant
            assert await client.claim(ASK, 40.0) == ClaimGrant(4_000_000_000, "0-3,6", 2**40)
            ((ask, deadline_s),) = bridge.claims
            assert ask == ASK
            # What the way has taken is off; it is not the bridge's own longest, 60 s.
            assert 20 < deadline_s < 45
            assert causes == ["bind/1"]


RAISED = {
    "no": (PeerRejected("slurmctld", "allocate", "busy", "busy"), PeerRejected),
    "a conflict": (Conflict("kube-apiserver", "PATCH", "version"), Conflict),
    "nobody answers": (PeerUnavailable("slurmctld", "allocate", "refused"), PeerUnavailable),
    "too late": (PeerTimeout("slurmctld", "allocate", "5 s"), PeerTimeout),
    "an ask that cannot be": (ParseError("x", "bad uid"), PeerRejected),
    "a bug": (InvariantError("oh", ["story"]), PeerProtocolError),
    "another bug": (KeyError("x"), PeerProtocolError),
}


@pytest.mark.parametrize(("raised", "kind"), RAISED.values(), ids=RAISED.keys())
async def test_an_error_of_the_bridge_arrives_as_what_it_means(raised, kind):
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await connected(client)

            async def fail(_ask):
                raise raised

            bridge.on_claim = fail
            with pytest.raises(kind) as caught:
                await client.claim(ASK, 5.0)
            assert type(caught.value) is kind
            if isinstance(raised, PeerRejected):
                got = caught.value
                assert (got.peer, got.op, got.text, got.reason) == (
                    raised.peer, raised.op, raised.text, raised.reason,
                )  # fmt: skip
            # The stream has not suffered.
            bridge.on_claim = None
            assert await client.claim(ASK, 5.0) == bridge.grant
            assert client.stats.streams == 1


async def test_at_the_deadline_the_client_is_free_and_the_bridge_is_told():
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await connected(client)
            ended = []

            async def hang(_ask):
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    ended.append("cancelled")
                    raise

            bridge.on_claim = hang
            async with asyncio.timeout(30):
                with pytest.raises(PeerTimeout):
                    await client.claim(ASK, 0.3)
            await until(lambda: ended == ["cancelled"])
            assert bridge.server._claims.busy == 0


async def test_a_caller_that_is_cancelled_cancels_the_claim_and_stays_cancelled():
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await connected(client)
            ended = asyncio.Event()

            async def hang(_ask):
                try:
                    await asyncio.sleep(30)
                finally:
                    ended.set()

            bridge.on_claim = hang
            task = asyncio.create_task(client.claim(ASK, 20.0))
            await until(lambda: bridge.claims)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(ended.wait(), 15)


async def test_more_claims_than_the_bridge_takes_at_once_are_turned_away_at_once():
    async with bridges(limits=Limits(claims=2)) as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await connected(client)
            gate = asyncio.Event()

            async def slow(_ask):
                await gate.wait()
                return bridge.grant

            bridge.on_claim = slow
            held = [asyncio.create_task(client.claim(ASK, 60.0)) for _ in range(2)]
            await until(lambda: len(bridge.claims) == 2)
            with pytest.raises(PeerUnavailable, match="2 calls are in progress"):
                await client.claim(ASK, 60.0)
            assert bridge.server.counts.overloaded == 1
            assert not any(task.done() for task in held), "it was not waited for them"
            gate.set()
            assert await asyncio.gather(*held) == [bridge.grant] * 2
            assert await client.claim(ASK, 60.0) == bridge.grant


async def test_without_a_leader_a_claim_fails_at_once():
    client = LinkClient(["127.0.0.1:1"], clock=CLOCK, rng=lambda: 0.5)
    async with asyncio.timeout(20):
        for asked in (
            client.claim(ASK, 60.0),
            client.release_unbound(ReleaseAsk("u", "n", "p", 1), 60.0),
        ):
            with pytest.raises(PeerUnavailable, match="no leader"):
                await asked


async def test_a_claim_in_flight_when_the_bridge_dies_ends_as_unknown():
    process = BridgeProcess()
    try:
        async with client_of(process.address) as client:
            await connected(client)
            asked = asyncio.create_task(client.claim(ClaimAsk("u", "n", "slow", "a"), 60.0))
            await asyncio.sleep(0.2)
            process.stop()
            with pytest.raises(PeerUnavailable):
                await asyncio.wait_for(asked, 20)
    finally:
        process.stop()


async def test_a_claim_in_flight_when_the_connection_is_given_up_ends_as_unknown():
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await connected(client)

            async def hang(_ask):
                await asyncio.sleep(30)

            bridge.on_claim = hang
            asked = asyncio.create_task(client.claim(ASK, 60.0))
            await until(lambda: bridge.claims)
            await client.close()
            with pytest.raises(PeerUnavailable):
                await asyncio.wait_for(asked, 20)


async def test_a_node_chosen_on_the_view_of_another_leader_is_not_claimed():
    async with bridges() as (bridge,), grpc.aio.insecure_channel(bridge.address) as channel:
        bridge.lead("t2")
        call = channel.unary_unary(
            f"/{SERVICE}/Claim", pb.ClaimRequest.SerializeToString, pb.ClaimReply.FromString
        )
        fields = {"uid": "u", "namespace": "n", "name": "p", "kube_node": "a"}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(pb.ClaimRequest(**fields, term="t1"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert bridge.claims == []
        for term in ("t2", ""):
            assert (await call(pb.ClaimRequest(**fields, term=term))).job_id == 4711
        for name in fields:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(pb.ClaimRequest(**fields | {name: ""}))
            assert read_fault(caught.value).reason == "form"


async def test_a_call_without_a_deadline_gets_one():
    async with bridges() as (bridge,), grpc.aio.insecure_channel(bridge.address) as channel:
        bridge.lead()
        call = channel.unary_unary(f"/{SERVICE}/Claim", pb.ClaimRequest.SerializeToString)
        await call(pb.ClaimRequest(uid="u", namespace="n", name="p", kube_node="a"))
        ((_, deadline_s),) = bridge.claims
        assert 1 < deadline_s <= 60


async def test_a_release_arrives():
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await connected(client)
            ask = ReleaseAsk(uid="uid-1", namespace="team", name="p", job_id=4711, cause="bind/1")
            await client.release_unbound(ask, 5.0)
            assert bridge.releases == [ask]


async def test_a_question_is_answered_by_the_leader_with_and_without_a_stream():
    async with bridges(2) as (follower, leader):
        follower.server.set_leader(False, leader.address)
        leader.lead()
        async with client_of("127.0.0.1:1", follower.address, run=False) as client:
            assert await client.query("status", b"{}", 5.0) == b'{"name": "status"}'
        async with client_of(follower.address) as client:
            await connected(client)
            assert await client.query("who", b'{"node": "a"}', 5.0) == b'{"name": "who"}'
        assert leader.questions == [("status", b"{}"), ("who", b'{"node": "a"}')]
        assert follower.questions == []
        async with client_of(follower.address, run=False) as client:
            with pytest.raises(PeerRejected, match="no such question"):
                await client.query("nope", b"{}", 5.0)


async def test_a_question_without_any_leader_ends_within_its_deadline():
    async with bridges(2) as (one, other):
        one.server.set_leader(False, other.address)
        other.server.set_leader(False, one.address)
        async with client_of(one.address, other.address, run=False) as client:
            async with asyncio.timeout(20):
                with pytest.raises(PeerUnavailable):
                    await client.query("status", b"{}", 1.0)


async def test_of_sixteen_claims_at_a_time_none_waits_for_another():
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await connected(client)
            gate = asyncio.Event()

            async def slow_for_some(ask):
                if ask.name == "held":
                    await gate.wait()
                return bridge.grant

            bridge.on_claim = slow_for_some
            held_ask = ClaimAsk("u", "n", "held", "a")
            held = [asyncio.create_task(client.claim(held_ask, 60.0)) for _ in range(15)]
            await until(lambda: len(bridge.claims) == 15)
            for _ in range(25):
                assert await client.claim(ASK, 30.0) == bridge.grant
            assert not any(task.done() for task in held)
            gate.set()
            assert await asyncio.gather(*held) == [bridge.grant] * 15


async def test_sixteen_claims_at_a_time_are_answered_each_once():
    async with bridges() as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await connected(client)

            async def work():
                return [await client.claim(ASK, 30.0) for _ in range(25)]

            answers = await asyncio.gather(*(work() for _ in range(16)))
            assert answers == [[bridge.grant] * 25] * 16
            assert len(bridge.claims) == 400
