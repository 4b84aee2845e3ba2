"""The extender over real sockets: answers, hostile input, overload, and not knowing."""

import asyncio
import json
import re

import aiohttp
import pytest

from extender.server import Bounds
from extender.sight import Limits
from slurmbridge.clock import SystemClock
from slurmbridge.link.message import ClaimGrant
from slurmbridge.pool import keys
from slurmbridge.pool.errors import PeerRejected
from slurmbridge.pool.policy import Policy
from slurmbridge.pool.reason import Reason
from tests.support.extender import bind_body, choice, pod_body, served
from tests.support.link import until
from tests.support.pool_view import make_node

POOL = (make_node("a"), make_node("b", free=0), make_node("c", blocked="DRAIN"))
NAMES = ["a", "b", "c"]


@pytest.fixture
async def pool():
    async with served(*POOL) as here:
        yield here


async def test_one_pod_from_filter_to_bind(pool):
    status, answer = await pool.post("filter", choice(NAMES, "2"))
    assert (200, ["a"], "") == (status, answer["NodeNames"], answer["Error"])
    assert (200, [{"Host": "a", "Score": 10}]) == await pool.post("prioritize", choice(["a"], "2"))
    assert (200, {"Error": ""}) == await pool.post("bind", bind_body())
    ((ask, deadline_s),) = pool.bridge.claims
    assert ("u1", "team-a", "pod-u1", "a") == (ask.uid, ask.namespace, ask.name, ask.kube_node)
    assert deadline_s > 1
    assert re.fullmatch(r"u1/t-[0-9a-f]+", ask.cause)
    ((_, annotations),) = pool.posted
    assert {keys.CLAIM: "4711/u1", keys.GPUS: "0-3,6"} == annotations


def only_one(pool):
    """Whether all that was asked and posted is of one pod, node and claim: the bridge has but one."""
    asked = {(ask.uid, ask.kube_node) for ask, _ in pool.bridge.claims}
    posted = {(bind.uid, bind.node, *sorted(notes.items())) for bind, notes in pool.posted}
    return asked == {("u1", "a")} and len(posted) == 1


async def test_a_second_bind_takes_no_second_claim(pool):
    for _ in range(3):
        assert (200, {"Error": ""}) == await pool.post("bind", bind_body())
    assert only_one(pool)


async def test_a_scheduler_that_gave_up_finds_its_pod_bound(pool):
    posting, gate = asyncio.Event(), asyncio.Event()

    async def slowly(_):
        posting.set()
        await gate.wait()

    pool.on_post = slowly
    scheduler = asyncio.create_task(pool.post("bind", bind_body()))
    async with asyncio.timeout(20):
        await posting.wait()
    scheduler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scheduler
    gate.set()
    assert (200, {"Error": ""}) == await pool.post("bind", bind_body())
    assert only_one(pool)


async def test_a_hundred_binds_at_once_have_as_many_winners_as_gpus(pool):
    free = list(range(8))

    async def grant(ask):
        await asyncio.sleep(0.001)
        if not free:
            raise PeerRejected("slurmctld", "salloc", "Requested nodes are busy", "busy")
        return ClaimGrant(job_id=100 + free[-1], gpus=str(free.pop()), generation=99)

    pool.bridge.on_claim = grant
    answers = await asyncio.gather(*(pool.post("bind", bind_body(uid=f"u{i}")) for i in range(100)))
    won = [answer for status, answer in answers if status == 200 and not answer["Error"]]
    assert (8, 8) == (len(won), len(pool.posted))
    assert 8 == len({notes[keys.GPUS] for _, notes in pool.posted})
    assert {200} == {status for status, _ in answers}


async def test_what_is_being_claimed_is_not_offered_again(pool):
    gate = asyncio.Event()

    async def grant(ask):
        await gate.wait()
        return ClaimGrant(job_id=9, gpus="0-7", generation=2)

    pool.bridge.on_claim = grant
    await pool.post("filter", choice(NAMES, "8", uid="big"))
    bind = asyncio.create_task(pool.post("bind", bind_body(uid="big")))
    await until(lambda: pool.bridge.claims)
    _, answer = await pool.post("filter", choice(NAMES, "1", uid="small"))
    assert Reason.GPU_BUSY.text == answer["FailedAndUnresolvableNodes"]["a"]
    _, again = await pool.post("filter", choice(NAMES, "8", uid="big"))
    assert ["a"] == again["NodeNames"], "a pod does not stand in its own way"
    gate.set()
    await bind
    await pool.view(make_node("a", free=0, claimed=8), generation=2)
    _, answer = await pool.post("filter", choice(["a"], "1", uid="small"))
    assert Reason.GPU_BUSY.text == answer["FailedAndUnresolvableNodes"]["a"]
    assert '"in_flight":[]' in (await pool.get("/debug/snapshot"))[1]


REFUSED_REQUESTS = {
    "minus one": "-1",
    "a part of a GPU": "1.5",
    "a thousandth": "500m",
    "more than any node": "1e9",
    "no number": "many",
    "nothing": "",
    "an absurd exponent": "1e999999999",
    "a number with a line feed": "1\n",
    "a part of a GPU as a number": 1.5,
}


@pytest.mark.parametrize("gpus", REFUSED_REQUESTS.values(), ids=REFUSED_REQUESTS.keys())
async def test_a_gpu_request_that_cannot_be_served_is_refused_everywhere(pool, gpus):
    status, answer = await pool.post("filter", choice(NAMES, gpus))
    assert 200 == status
    assert "" == answer["Error"]
    assert [] == answer["NodeNames"]
    assert set(NAMES) == set(answer["FailedAndUnresolvableNodes"])
    (text,) = set(answer["FailedAndUnresolvableNodes"].values())
    assert text.startswith(Reason.REQUEST.text)
    assert "\n" not in text
    assert (200, [{"Host": n, "Score": 0} for n in NAMES]) == await pool.post(
        "prioritize", choice(NAMES, gpus)
    )


@pytest.mark.parametrize("gpus", ["0", 0, "0.0"], ids=str)
async def test_zero_gpus_are_none_of_our_business(pool, gpus):
    _, answer = await pool.post("filter", choice(NAMES, gpus))
    assert NAMES == answer["NodeNames"]


async def test_two_kinds_of_pool_gpus_in_one_pod_are_refused():
    policy = Policy("prod", resources={"nvidia.com/gpu": "", "example.com/gpu": "b"})
    async with served(*POOL, policy=policy) as here:
        body = choice(NAMES)
        limits = body["Pod"]["spec"]["containers"][0]["resources"]["limits"]
        limits["example.com/gpu"] = "1"
        _, answer = await here.post("filter", body)
        assert set(NAMES) == set(answer["FailedAndUnresolvableNodes"])


ODD_NAMES = ['a"b', "a\nb", "a\\b", "\u2028", "<script>", "x" * 253, "", "ä", "a", "a"]


async def test_odd_names_are_escaped_and_outside_the_pool(pool):
    status, answer = await pool.post("filter", choice(ODD_NAMES))
    assert (200, ODD_NAMES) == (status, answer["NodeNames"])


async def test_odd_names_of_pool_nodes_come_back_whole():
    odd = ['a"b', "a\nb", "x" * 253]
    async with served(*(make_node(name, free=0) for name in odd)) as here:
        _, answer = await here.post("filter", choice(odd))
        assert set(odd) == set(answer["FailedAndUnresolvableNodes"])


async def test_annotations_of_users_reach_nobody_unchecked(pool):
    for value in ("a b", "--uid=0", "a;b", "a\nb", "x" * 5000, "$(id)", "\u202e"):
        body = choice(NAMES, metadata={"annotations": {keys.ACCOUNT: value}})
        _, answer = await pool.post("filter", body)
        (text,) = set(answer["FailedAndUnresolvableNodes"].values())
        assert text.startswith(Reason.ANNOTATION.text)
        assert len(text) <= 200
        assert value not in text


FAULTY = {
    "not json": (b"hello", 400),
    "nothing": (b"", 400),
    "cut off": (b'{"Pod":{},"NodeNames":["a"', 400),
    "an array": (b"[1,2]", 200),
    "null": (b"null", 200),
    "no pod": (b'{"NodeNames":["a"]}', 200),
    "no names": (json.dumps({"Pod": pod_body()}).encode(), 200),
    "a number for a name": (json.dumps(choice([1])).encode(), 200),
    "a name too long": (json.dumps(choice(["x" * 254])).encode(), 200),
    "deeply nested": (b'{"Pod":' + b"[" * 100_000, 400),
    "not UTF-8": (b'{"Pod":{},"NodeNames":["\xff"]}', 400),
}


@pytest.mark.parametrize(("body", "expected"), FAULTY.values(), ids=FAULTY.keys())
async def test_a_faulty_request_is_an_answer_with_its_fault(pool, body, expected):
    status, answer = await pool.post("filter", body)
    assert expected == status
    if status == 200:
        assert answer["Error"].startswith("slurmbridge: ")
        assert not answer.get("NodeNames")
    status, answer = await pool.post("prioritize", body)
    assert (expected, expected != 200 or answer == []) == (status, True)
    status, answer = await pool.post("preempt", body)
    if status == 200:
        assert {"NodeNameToMetaVictims": {}} == answer
    status, answer = await pool.post("bind", body)
    assert status in (200, 400)
    assert status == 400 or answer["Error"]
    assert [] == pool.bridge.claims
    assert 200 == (await pool.post("filter", choice(NAMES)))[0], "it lives"


@pytest.mark.parametrize(
    "node", ["", "../x", "a/b", "a?b", "a%2e", "A", "a\nb", "x" * 254], ids=repr
)
async def test_a_bind_to_what_is_no_node_goes_nowhere(pool, node):
    status, answer = await pool.post("bind", bind_body(node=node))
    assert (200, True) == (status, bool(answer["Error"]))
    assert [] == pool.bridge.claims == pool.posted


async def test_a_body_beyond_the_limit_is_not_read():
    async with served(*POOL, bounds=Bounds(body_bytes=10_000)) as here:
        assert 413 == (await here.post("filter", b"x" * 10_001))[0]

        async def chunks():
            for _ in range(20):
                yield b"y" * 1000

        async with here.session.post(f"{here.url}/filter", data=chunks()) as reply:
            assert 413 == reply.status
        assert 200 == (await here.post("filter", choice(NAMES)))[0]


async def test_a_body_that_does_not_come_is_not_waited_for():
    async with served(*POOL, bounds=Bounds(read_s=0.2)) as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.extender.server.port)
        writer.write(b"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in await reader.readline()
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", here.extender.server.port)
        writer.write(b"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        assert 200 == (await here.post("filter", choice(NAMES)))[0]


async def test_too_many_at_once_are_told_to_come_again():
    async with served(*POOL, bounds=Bounds(requests=2, binds=1)) as here:
        port = here.extender.server.port
        stuck = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in stuck:
            writer.write(b"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            await writer.drain()
        await until(lambda: here.extender.server._active["other"] == 2)
        async with here.session.post(f"{here.url}/filter", json=choice(NAMES)) as reply:
            assert (503, "1") == (reply.status, reply.headers["Retry-After"])
        assert 200 == (await here.post("bind", bind_body()))[0], "binds have a lane of their own"
        for _, writer in stuck:
            writer.close()
        await until(lambda: here.extender.server._active["other"] == 0)
        assert 200 == (await here.post("filter", choice(NAMES)))[0]
        metrics = (await here.get("/metrics"))[1]
        assert 'requests_total{outcome="overloaded",verb="filter"} 1.0' in metrics


async def test_whole_nodes_are_answered_with_whole_nodes(pool):
    nodes = [{"metadata": {"name": name}, "x": "y" * 20_000} for name in [*NAMES, "outside"]]
    body = {"Pod": pod_body(), "Nodes": {"metadata": {}, "items": nodes}, "NodeNames": None}
    _, answer = await pool.post("filter", body)
    assert None is answer["NodeNames"]
    assert [nodes[0], nodes[3]] == answer["Nodes"]["items"]
    _, answer = await pool.post("prioritize", body)
    assert [*NAMES, "outside"] == [entry["Host"] for entry in answer]


async def test_preempt_spares_pods_where_slurm_would_not_give_the_node():
    nodes = (make_node("claims", free=0, claimed=8), make_node("native", free=0, native_jobs=1))
    async with served(*nodes) as here:
        victims = {"Pods": [{"UID": "v"}], "NumPDBViolations": 0}
        body = {
            "Pod": pod_body("8"),
            "NodeNameToVictims": None,
            "NodeNameToMetaVictims": {"claims": victims, "native": victims},
        }
        assert (200, {"NodeNameToMetaVictims": {"claims": victims}}) == await here.post(
            "preempt", body
        )


class LaterClock(SystemClock):
    """It is later by `ahead` seconds."""

    ahead = 0.0

    def monotonic(self):
        return super().monotonic() + self.ahead


class TestNotKnowing:
    async def test_before_the_first_view_nothing_is_decided(self):
        async with served() as here:
            _, answer = await here.post("filter", choice(NAMES))
            assert {"Error": Reason.BLIND.text} == answer
            _, answer = await here.post("bind", bind_body())
            assert {"Error": Reason.BLIND.text} == answer
            status, scores = await here.post("prioritize", choice(NAMES))
            assert (200, {0}) == (status, {entry["Score"] for entry in scores})
            assert 503 == (await here.get("/readyz"))[0]
            assert 200 == (await here.get("/livez"))[0]
            here.bridge.lead("t1", *POOL)
            await until(lambda: here.link.view)
            assert 200 == (await here.get("/readyz"))[0]
            assert ["a"] == (await here.post("filter", choice(NAMES)))[1]["NodeNames"]

    async def test_a_view_that_ages_is_stale_and_then_none(self):
        clock = LaterClock()
        async with served(*POOL, limits=Limits(stale=60, blind=600), link_clock=clock) as here:
            await here.view(*POOL, interval_s=0.01)
            assert ["a"] == (await here.post("filter", choice(NAMES)))[1]["NodeNames"]
            assert ["x", "y"] == (await here.post("filter", choice(["x", "y"])))[1]["NodeNames"]
            await here.bridge.server.stop()
            clock.ahead = 100
            assert {"Error": Reason.STALE.text} == (await here.post("filter", choice(NAMES)))[1]
            _, answer = await here.post("filter", choice(["b", "c"]))
            assert {"b", "c"} == set(answer["FailedAndUnresolvableNodes"])
            clock.ahead = 1000
            assert {"Error": Reason.BLIND.text} == (await here.post("filter", choice(NAMES)))[1]
            outside = await here.post("filter", choice(["x", "y"]))
            assert ["x", "y"] == outside[1]["NodeNames"]
            new = await here.post("filter", choice(["x", "new"]))
            assert {"Error": Reason.BLIND.text} == new[1]
            assert 503 == (await here.get("/readyz"))[0]
            _, answer = await here.post("bind", bind_body())
            assert "no answer from the bridge" in answer["Error"]
            assert [] == here.posted

    async def test_a_pod_with_a_claim_goes_home_while_the_view_is_stale(self):
        clock = LaterClock()
        async with served(*POOL, limits=Limits(stale=60, blind=600), link_clock=clock) as here:
            await here.view(*POOL, held=[("u1", "c", 5)], interval_s=0.01)
            await here.bridge.server.stop()
            clock.ahead = 100
            assert ["c"] == (await here.post("filter", choice(NAMES)))[1]["NodeNames"]


class TestAdmin:
    async def test_metrics_tell_verdicts_latency_and_age(self, pool):
        await pool.post("filter", choice(NAMES, "9"))
        await pool.post("bind", bind_body())
        text = (await pool.get("/metrics"))[1]
        for line in (
            'slurmbridge_extender_verdicts_total{reason="gpu_total"} 2.0',
            'slurmbridge_extender_verdicts_total{reason="slurm_state"} 1.0',
            'slurmbridge_extender_requests_total{outcome="refused",verb="filter"} 1.0',
            'slurmbridge_extender_requests_total{outcome="bound",verb="bind"} 1.0',
            'slurmbridge_extender_request_seconds_count{verb="filter"} 1.0',
            "slurmbridge_extender_view_nodes 3.0",
            "slurmbridge_extender_view_generation 1.0",
        ):
            assert line in text
        age = re.search(r"^slurmbridge_extender_view_age_seconds (\S+)$", text, re.MULTILINE)
        assert 0 <= float(age[1]) < 60

    async def test_no_series_names_a_pod_or_a_node(self, pool):
        before = (await pool.get("/metrics"))[1].count("\n")
        for i in range(30):
            await pool.post("filter", choice([f"n{i}", "a"], uid=f"u{i}"))
        after = (await pool.get("/metrics"))[1]
        assert after.count("\n") <= before + 4
        assert "n17" not in after

    async def test_the_snapshot_holds_the_view_and_the_binds(self, pool):
        snapshot = json.loads((await pool.get("/debug/snapshot"))[1])
        assert {"a", "b", "c"} == set(snapshot["view"]["nodes"])
        assert ("fresh", "prod") == (snapshot["freshness"], snapshot["policy"]["cluster"])

    async def test_the_admin_port_is_not_the_schedulers(self, pool):
        async with pool.session.get(f"{pool.url}/metrics") as reply:
            assert 404 == reply.status
        async with pool.session.post(f"{pool.admin_url}/filter", json={}) as reply:
            assert 404 == reply.status
        async with pool.session.get(f"{pool.url}/filter") as reply:
            assert 405 == reply.status


async def test_a_bug_is_told_as_an_error_and_the_server_goes_on(pool, monkeypatch):
    monkeypatch.setattr("extender.filter.choose", lambda *_: 1 / 0)
    status, answer = await pool.post("filter", choice(NAMES))
    assert (200, True) == (status, "internal error" in answer["Error"])
    monkeypatch.undo()
    assert ["a"] == (await pool.post("filter", choice(NAMES)))[1]["NodeNames"]


async def test_keep_alive_connections_serve_many_requests(pool):
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        for _ in range(50):
            async with session.post(f"{pool.url}/filter", json=choice(NAMES)) as reply:
                assert ["a"] == (await reply.json())["NodeNames"]
