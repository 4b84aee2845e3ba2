"""The order of things in a bind, with a bridge and an API server that answer as the test says."""

import asyncio

import pytest

from extender.bind import BOUND, Binder
from extender.inflight import InFlight
from extender.wire import Bind
from slurmbridge.link.message import ClaimGrant
from slurmbridge.pool import keys
from slurmbridge.pool.errors import Conflict, PeerRejected, PeerTimeout, PeerUnavailable
from tests.support.clock import HandClock

POD = Bind("train-0", "team-a", "u1", "gpu1")
GRANT = ClaimGrant(77, "0-1", 5)
BUSY = PeerRejected("slurmctld", "salloc", "Requested nodes are busy", "busy")
SILENT = PeerTimeout("kube-apiserver", "POST", "no answer")


class World:
    """Answers in the order given; the last one for ever. Notes everything in `story`."""

    def __init__(self, *, claims=(GRANT,), posts=(None,), asks_for_gpus=True):
        self.story = []
        self._claims, self._posts = list(claims), list(posts)
        self._asks = asks_for_gpus
        self.gate = asyncio.Event()
        self.gate.set()
        self.inflight = InFlight()
        self.binder = Binder(self, self._post, self._look, self.inflight, HandClock())

    async def claim(self, ask, deadline_s):
        assert deadline_s > 0
        self.story.append(("claim", ask.kube_node))
        await self.gate.wait()
        return _next(self._claims)

    async def release_unbound(self, ask, deadline_s):
        self.story.append(("release", ask.job_id))
        if isinstance(self._asks, Exception):
            raise self._asks

    async def _post(self, bind, annotations, deadline_s):
        self.story.append(("post", bind.node, annotations))
        _next(self._posts)

    async def _look(self, bind, deadline_s):
        self.story.append(("look", bind.name))
        if isinstance(self._asks, Exception):
            raise self._asks
        return self._asks

    async def bind(self, pod=POD, *, in_pool=True):
        outcome = await self.binder.bind(pod, in_pool=in_pool, term="t1", cause="c1")
        await self.binder.close(1.0)
        return outcome


def _next(answers):
    answer = answers.pop(0) if len(answers) > 1 else answers[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


ANNOTATIONS = {keys.CLAIM: "77/u1", keys.GPUS: "0-1"}


async def test_first_the_claim_then_the_binding_with_both_annotations():
    world = World()
    assert BOUND == await world.bind()
    assert [("claim", "gpu1"), ("post", "gpu1", ANNOTATIONS)] == world.story


async def test_without_a_claim_nothing_is_posted():
    world = World(claims=[BUSY])
    outcome = await world.bind()
    assert ("refused", True) == (outcome.word, "Requested nodes are busy" in outcome.error)
    assert [("claim", "gpu1")] == world.story
    assert 0 == len(world.inflight)


async def test_no_answer_to_a_claim_leaves_the_gpus_taken_for_a_while():
    world = World(claims=[PeerUnavailable("bridge", "Claim", "gone")])
    assert "unavailable" == (await world.bind()).word
    assert [("claim", "gpu1")] == world.story
    assert 1 == len(world.inflight)


async def test_a_second_call_for_the_same_node_is_told_what_the_api_server_says_now():
    """A pod that was bound may be unbound again: etcd was restored from a backup."""
    world = World(posts=[None, None, SILENT])
    assert [BOUND, BOUND] == [await world.bind() for _ in range(2)]
    assert ["claim", "post"] * 2 == [entry[0] for entry in world.story]
    assert "unknown" == (await world.bind()).word


async def test_a_second_call_while_the_first_runs_joins_it():
    world = World()
    world.gate.clear()
    both = [asyncio.create_task(world.bind()) for _ in range(2)]
    await asyncio.sleep(0)
    world.gate.set()
    assert [BOUND, BOUND] == await asyncio.gather(*both)
    assert 2 == len(world.story)


async def test_a_caller_that_goes_away_does_not_stop_the_bind():
    world = World()
    world.gate.clear()
    caller = asyncio.create_task(world.binder.bind(POD, in_pool=True, term="t", cause="c"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    world.gate.set()
    assert BOUND == await world.bind()
    assert [("claim", "gpu1"), ("post", "gpu1", ANNOTATIONS)] == world.story


@pytest.mark.parametrize("moment", ["while it runs", "after it", "after a binding of unknown fate"])
async def test_never_two_nodes(moment):
    other = Bind("train-0", "team-a", "u1", "gpu2")
    world = World(posts=[SILENT] if "unknown" in moment else [None])
    world.gate.clear()
    first = asyncio.create_task(world.bind())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if moment != "while it runs":
        world.gate.set()
        await first
    second = asyncio.create_task(world.binder.bind(other, in_pool=True, term="t1", cause="c2"))
    await asyncio.sleep(0)
    world.gate.set()
    assert "elsewhere" == (await second).word
    await first
    assert all("gpu2" not in entry for entry in world.story)


@pytest.mark.parametrize(
    "no",
    [
        PeerRejected("kube-apiserver", "POST", "pods train-0 not found", "notfound"),
        Conflict("kube-apiserver", "POST", "pod is already assigned to gpu9", "conflict"),
    ],
    ids=["the pod is gone", "the pod is elsewhere"],
)
async def test_a_binding_that_is_refused_gives_the_claim_back(no):
    world = World(posts=[no])
    outcome = await world.bind()
    assert ("not_bound", True) == (outcome.word, no.text in outcome.error)
    assert ("release", 77) == world.story[-1]
    assert 0 == len(world.inflight)


async def test_a_binding_of_unknown_fate_is_tried_once_more():
    world = World(posts=[SILENT, None])
    assert BOUND == await world.bind()
    assert ["claim", "post", "post"] == [entry[0] for entry in world.story]


async def test_a_binding_of_unknown_fate_keeps_its_claim_for_the_bridge_to_judge():
    world = World(posts=[SILENT])
    assert "unknown" == (await world.bind()).word
    assert ["claim", "post", "post"] == [entry[0] for entry in world.story]
    assert "gpu1" == world.inflight.home_of("u1")


async def test_a_release_that_is_not_taken_is_left_to_the_bridge():
    no = PeerRejected("kube-apiserver", "POST", "gone", "notfound")
    world = World(posts=[no], asks_for_gpus=PeerUnavailable("bridge", "Release", "gone"))
    assert "not_bound" == (await world.bind()).word


async def test_no_claim_for_a_node_outside_the_pool():
    world = World()
    assert BOUND == await world.bind(in_pool=False)
    assert [("post", "gpu1", {})] == world.story


async def test_no_claim_for_a_pod_that_filter_saw_ask_for_no_gpu():
    world = World()
    world.inflight.remember("u1", None)
    assert BOUND == await world.bind()
    assert [("post", "gpu1", {})] == world.story


NOT_OURS = PeerRejected("bridge", "Claim", "the pod asks for no pool GPU", "request")


async def test_a_pod_that_the_bridge_does_not_take_is_looked_at():
    world = World(claims=[NOT_OURS], asks_for_gpus=False)
    assert BOUND == await world.bind()
    assert [("claim", "gpu1"), ("look", "train-0"), ("post", "gpu1", {})] == world.story


@pytest.mark.parametrize("seen", [True, PeerUnavailable("kube-apiserver", "GET", "gone")], ids=str)
async def test_a_pod_with_a_faulty_gpu_request_or_none_that_can_be_seen_is_not_bound(seen):
    world = World(claims=[NOT_OURS], asks_for_gpus=seen)
    assert "refused" == (await world.bind()).word
    assert [("claim", "gpu1"), ("look", "train-0")] == world.story


async def test_too_many_binds_at_once_are_told_to_come_again():
    world = World()
    while not world.inflight.is_full:
        world.inflight.begin(f"p{len(world.inflight)}", "gpu1", "t", 1.0)
    assert "full" == (await world.bind()).word
    assert [] == world.story


async def test_texts_of_peers_are_cut_to_size():
    world = World(claims=[PeerRejected("slurmctld", "salloc", "x" * 9000, "busy")])
    assert 256 == len((await world.bind()).error)
