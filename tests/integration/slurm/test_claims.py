"""Claims on a real slurmctld: made, refused, found, changed, ended, covered."""

import asyncio
import os
import time

import pytest
from msgspec.structs import replace

from slurmbridge.clock import SystemClock
from slurmbridge.pool.claim import (
    Ask,
    ClaimId,
    ClaimRequest,
    GroupRequest,
    write_comment,
    write_filler,
)
from slurmbridge.pool.errors import ClaimUncertain, PeerRejected
from slurmbridge.pool.record import GpuCount, GpuRequest
from slurmbridge.slurm.claim_tool import ClaimTool
from slurmbridge.slurm.claims import SlurmClaims
from slurmbridge.slurm.command import SlurmCommand
from slurmbridge.slurm.reader import SlurmReader
from tests.support.slurm_config import DEFAULT_PARTITIONS, SlurmConfig

pytestmark = pytest.mark.slurm

CLOCK = SystemClock()
NAME = "slurmbridge-t1"
ASK = Ask(
    gpu=GpuRequest(2, "a100"),
    cpus=4,
    memory_mib=1000,
    minutes=30,
    rolling=True,
    partition="claims",
    exclusive_user=False,
)
SLEEP = "#!/bin/sh\nexec sleep 1000\n"
OTHER_PARTITIONS = (
    "PartitionName=down Nodes=ALL State=DOWN",
    "PartitionName=short Nodes=ALL State=UP MaxTime=5",
    "PartitionName=ml Nodes=ALL State=UP AllowAccounts=ml",
)


def asking(uid="u1", node="gpu001", **ask):
    if "gpus" in ask:
        ask["gpu"] = GpuRequest(ask.pop("gpus"))
    return ClaimRequest(ClaimId("t1", uid), f"ns/{uid}", node, replace(ASK, **ask))


def gang(members, nodes=(), uid="g-1", **ask):
    if "gpus" in ask:
        ask["gpu"] = GpuRequest(ask.pop("gpus"))
    claim_id = ClaimId("t1", uid, "group")
    return GroupRequest(claim_id, "ns/gang", replace(ASK, **ask), members, nodes=nodes)


@pytest.fixture(scope="module")
def slurm_up(slurm_cluster):
    return slurm_cluster(
        SlurmConfig(nodes=4, bf_interval_s=1, partitions=DEFAULT_PARTITIONS + OTHER_PARTITIONS)
    )


@pytest.fixture
def slurm(slurm_up):
    """The module's cluster without jobs."""
    yield slurm_up
    for user in (slurm_up.slurm_user, "nobody"):
        slurm_up.run("scancel", "--user", user)
    deadline = time.monotonic() + 20
    while slurm_up.run("squeue", "-h"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Side:
    """The adapter on a cluster, and what tests ask of Slurm beside it."""

    def __init__(self, slurm, **more):
        self.slurm = slurm
        self.command = SlurmCommand(environ=slurm.env())
        self.reader = SlurmReader(self.command, CLOCK)
        self.claims = SlurmClaims(self.command, self.reader, os.getuid(), clock=CLOCK, **more)
        self.tool = ClaimTool(self.command, self.reader, os.getuid(), CLOCK)

    async def native(self, *options, name="native", partition="main"):
        """A native job of another user; its id."""
        argv = ["sbatch", "--parsable", "-o", "/dev/null", "--mem=1", "-p", partition]
        out = await asyncio.to_thread(
            self.slurm.run, *argv, "-J", name, *options, stdin=SLEEP, user="nobody"
        )
        return int(out)

    async def state(self, job_id):
        return await asyncio.to_thread(self.slurm.job_field, job_id, "JobState")

    async def until(self, job_id, state, timeout_s=10.0):
        deadline = time.monotonic() + timeout_s
        while (now := await self.state(job_id)) != state:
            assert time.monotonic() < deadline, f"job {job_id} is {now}, not {state}"
            await asyncio.sleep(0.05)

    async def held(self, node="gpu001"):
        """What is held on a node: (name, comment, indices), by index; ending jobs have none."""
        jobs = [j for j in await self.reader.jobs_on(node) if j.state.holds_resources]
        uses = [((j.gpus or {}).get(node), j) for j in jobs]
        return sorted(
            ((j.name, j.comment, use.indices if use else ()) for use, j in uses),
            key=lambda held: held[2],
        )

    async def settled(self, count, node="gpu001"):
        """What is held on a node, once so many jobs are left there."""
        deadline = time.monotonic() + 10
        while len(held := await self.held(node)) != count:
            assert time.monotonic() < deadline, held
            await asyncio.sleep(0.05)
        return held

    async def take_others(self, free, node="gpu001"):
        """Native allocations on all GPUs of the node but these."""
        ids = {}
        for _ in range(8):
            argv = ["salloc", "--no-shell", "-I", "-w", node, "--mem=1", "--gres=gpu:1"]
            done = await asyncio.to_thread(self.slurm.run_raw, *argv, "-p", "main", "-J", "native")
            job_id = int(done.stderr.split()[-1])
            job = await self.tool.job(job_id, time.monotonic() + 5)
            ids[job.gpus[node].indices[0]] = job_id
        await asyncio.to_thread(self.slurm.run, "scancel", *(str(ids[index]) for index in free))
        await self.settled(8 - len(free), node)


@pytest.fixture
async def side(slurm):
    made = Side(slurm)
    yield made
    made.command.close()


# Making


async def test_a_claim_holds_what_was_asked_and_says_whose_it_is(side):
    before = CLOCK.wall()
    claim = await side.claims.allocate(asking(cpus=0, memory_mib=0), 5)
    assert claim.is_running
    assert (claim.gpus.counts, claim.gpus.indices) == ((GpuCount("a100", 2),), (0, 1))
    assert 29 * 60 < claim.ends - claim.started <= 30 * 60
    # Slurm tells whole seconds.
    assert before - 1 <= claim.started <= CLOCK.wall() + 1
    record = side.slurm.run("scontrol", "show", "job", "-d", str(claim.job_id))
    for field in (
        "JobName=slurmbridge-t1",
        "Comment=slurmbridge/1 cluster=t1 pod=u1 ref=ns/u1",
        "NumNodes=1 NumCPUs=1 NumTasks=1",
        "mem=1M",
        "Priority=4294967000",
        "TimeLimit=00:30:00",
        "BatchFlag=0",
        "Partition=claims",
    ):
        assert field in record


async def test_sixteen_claims_at_a_time_get_sixteen_different_gpus(side):
    requests = [asking(f"u{i}", f"gpu00{1 + i // 8}", gpus=1) for i in range(16)]
    claims = await asyncio.gather(*(side.claims.allocate(r, 10) for r in requests))
    assert len({(c.slurm_node, c.gpus.indices) for c in claims}) == 16
    assert all(c.is_running for c in claims)


async def test_a_gang_is_one_allocation_on_just_its_nodes(side):
    await side.claims.allocate(asking("u1", "gpu001", gpus=3), 5)
    job = await side.claims.allocate_group(gang(4, ("gpu001", "gpu002")), 5)
    assert job.nodes == ("gpu001", "gpu002")
    held = {name: use.indices for name, use in job.gpus.items()}
    assert [len(indices) for indices in held.values()] == [4, 4]
    assert not set(held["gpu001"]) & {0, 1, 2}
    record = side.slurm.run("scontrol", "show", "job", str(job.id))
    assert "Comment=slurmbridge/1 cluster=t1 group=g-1 ref=ns/gang" in record
    assert "mem=4000M" in record
    wanted = CLOCK.wall() + 90 * 60
    assert 0 <= await side.claims.extend(job.id, gang(5).id, wanted, 5) - wanted < 60
    assert await side.claims.cancel(gang(5).id, job.id, 5)


async def test_a_gang_that_does_not_fit_as_a_whole_gets_nothing(side):
    await side.claims.allocate(asking("u1", "gpu001", gpus=7), 5)
    with pytest.raises(PeerRejected) as refused:
        await side.claims.allocate_group(gang(4, ("gpu001", "gpu002")), 5)
    assert refused.value.reason == "busy"
    assert [claim_id.uid for claim_id, _ in await side.claims.find(NAME)] == ["u1"]


async def test_a_gang_waits_in_the_queue_and_runs_where_there_is_room(side):
    first = await side.claims.allocate_group(gang(4, side.slurm.node_names, gpus=8), 5)
    job_id = await side.claims.submit_group(gang(3, uid="g-2", gpus=4), 5)
    waiting = (await side.claims.look([job_id, 999], 5))[job_id]
    assert (waiting.state.base, waiting.gpus) == ("PENDING", {})
    assert (await side.claims.look([999], 5)) == {999: None}
    await side.claims.cancel(gang(4).id, first.id, 5)
    deadline = time.monotonic() + 20
    while (job := (await side.claims.look([job_id], 5))[job_id]).state.base != "RUNNING":
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert sum(use.total for use in job.gpus.values()) == 12


async def test_a_refused_claim_holds_nothing_and_is_not_found(side):
    await side.claims.allocate(asking("u1", gpus=7), 5)
    with pytest.raises(PeerRejected) as refused:
        await side.claims.allocate(asking("u2"), 5)
    assert refused.value.reason == "busy"
    assert [claim_id.uid for claim_id, _ in await side.claims.find(NAME)] == ["u1"]


@pytest.mark.parametrize(
    ("ask", "node", "reason"),
    {
        "more GPUs than the node has": ({"gpus": 9}, "gpu001", "too_large"),
        "a type that the node has not": ({"gpu": GpuRequest(1, "h100")}, "gpu001", "too_large"),
        "more memory than the node has": ({"memory_mib": 600_000}, "gpu001", "too_large"),
        "more CPUs than the node has": ({"cpus": 65}, "gpu001", "too_large"),
        "no such node": ({}, "gpu009", "node"),
        "no such partition": ({"partition": "nope"}, "gpu001", "partition"),
        "a partition that is down": ({"partition": "down"}, "gpu001", "partition"),
        "longer than the partition allows": ({"partition": "short"}, "gpu001", "partition"),
        "an account that may not": ({"partition": "ml", "account": "bio"}, "gpu001", "partition"),
        "no such reservation": ({"reservation": "nope"}, "gpu001", "reservation"),
    }.values(),
)
async def test_slurms_refusals_have_a_reason(side, ask, node, reason):
    with pytest.raises(PeerRejected) as refused:
        await side.claims.allocate(asking(node=node, **ask), 5)
    assert refused.value.reason == reason


async def test_a_drained_node_is_told_from_one_that_has_not_answered_yet(side):
    await asyncio.to_thread(
        side.slurm.run, "scontrol", "update", "nodename=gpu004", "state=drain", "reason=t"
    )
    boots = []
    young = Side(side.slurm, boot_time=lambda: boots[-1])
    try:
        for age_s, reason in ((60, "node"), (2, "starting")):
            boots.append(CLOCK.wall() - age_s)
            with pytest.raises(PeerRejected) as refused:
                await young.claims.allocate(asking(node="gpu004"), 5)
            assert refused.value.reason == reason
    finally:
        young.command.close()
        side.slurm.run("scontrol", "update", "nodename=gpu004", "state=resume")


async def test_pending_native_jobs_do_not_stand_before_a_claim(side):
    running = await side.native("-N4", "--gres=gpu:4", "-n4")
    await side.until(running, "RUNNING")
    waiting = await side.native("-N4", "--gres=gpu:8", "-n4")
    claim = await side.claims.allocate(asking(), 5)
    assert claim.gpus.indices == (4, 5)
    assert await side.state(waiting) == "PENDING"


async def test_granularity_node_shares_no_node_with_native_jobs(side):
    await side.until(await side.native("-w", "gpu001"), "RUNNING")
    with pytest.raises(PeerRejected) as refused:
        await side.claims.allocate(asking(exclusive_user=True), 5)
    assert refused.value.reason == "busy"
    first = await side.claims.allocate(asking("u1", "gpu002", exclusive_user=True), 5)
    second = await side.claims.allocate(asking("u2", "gpu002", exclusive_user=True), 5)
    assert first.gpus.indices + second.gpus.indices == (0, 1, 2, 3)


async def test_a_claim_whose_answer_was_lost_is_uncertain_and_can_be_found(side):
    await asyncio.to_thread(side.slurm.pause_slurmctld)
    try:
        with pytest.raises(ClaimUncertain) as uncertain:
            await side.claims.allocate(asking("u1"), 0.3)
        with pytest.raises(ClaimUncertain):
            await side.claims.submit_placeholder(asking("u2"), 0.3)
    finally:
        side.slurm.resume_slurmctld()
    assert uncertain.value.job_id is None
    deadline = time.monotonic() + 20
    found = {}
    while "u2" not in found and time.monotonic() < deadline:
        found = {claim_id.uid: job.id for claim_id, job in await side.claims.find(NAME)}
    assert "u2" in found  # the job of an sbatch that was killed stays
    assert await side.claims.cancel(ClaimId("t1", "u2"), found["u2"], 5)
    # The other one may be there or not; slurmctld may take it back when nobody hears of it.
    for claim_id, job in await side.claims.find(NAME):
        await side.claims.cancel(claim_id, job.id, 5)
    await side.settled(0)
    assert await side.claims.find(NAME) == []


async def test_a_placeholder_waits_runs_and_ends_at_once_when_cancelled(side):
    await side.until(await side.native("-w", "gpu001", "--gres=gpu:8"), "RUNNING")
    job_id = await side.claims.submit_placeholder(asking(), 5)
    ((claim_id, job),) = await side.claims.find(NAME)
    assert (claim_id, job.id, job.state.base) == (ClaimId("t1", "u1"), job_id, "PENDING")
    assert job.priority == 4294967000
    await asyncio.to_thread(side.slurm.run, "scancel", "--user", "nobody")
    await side.until(job_id, "RUNNING")
    assert await side.claims.cancel(claim_id, job_id, 5)
    await side.until(job_id, "CANCELLED")
    await side.settled(0)


# Ending and changing


async def test_a_claim_is_ended_once_and_then_certainly_not_there(side):
    claim = await side.claims.allocate(asking(), 5)
    assert await side.claims.cancel(claim.id, claim.job_id, 5)
    await side.until(claim.job_id, "CANCELLED")
    assert not await side.claims.cancel(claim.id, claim.job_id, 5)
    assert not await side.claims.cancel(claim.id, 99999, 5)


async def test_a_strangers_job_under_the_id_of_a_claim_is_never_touched(side):
    claim_id = ClaimId("t1", "u1")
    comment = write_comment(claim_id, "ns/u1")
    strangers = [
        await side.native("-w", "gpu001"),
        # Forgeries: our name and comment, by another user; and our user with another name.
        await side.native("-w", "gpu001", f"--comment={comment}", name=NAME),
        (await side.claims.allocate(replace(asking(), id=ClaimId("t2", "u1")), 5)).job_id,
        (await side.claims.allocate(asking("u2"), 5)).job_id,
    ]
    for job_id in strangers:
        await side.until(job_id, "RUNNING")
        assert not await side.claims.cancel(claim_id, job_id, 5)
        with pytest.raises(PeerRejected) as refused:
            await side.claims.extend(job_id, claim_id, CLOCK.wall() + 3600, 5)
        assert refused.value.reason == "identity"
    assert await side.claims.cancel_many([(claim_id, job_id) for job_id in strangers], 5) == set()
    # Should an id change hands between the look and scancel: its filters leave the first three.
    await side.tool.end(NAME, strangers[:3], time.monotonic() + 5)
    assert [await side.state(job_id) for job_id in strangers] == ["RUNNING"] * 4


async def test_many_claims_are_ended_together(side):
    claims = await asyncio.gather(
        *(side.claims.allocate(asking(f"u{i}", gpus=1), 10) for i in range(8))
    )
    gone = [(ClaimId("t1", "u99"), 99999)]
    wrong = [(ClaimId("t1", "u98"), claims[0].job_id)]
    pairs = [(claim.id, claim.job_id) for claim in claims[1:]]
    ended = await side.claims.cancel_many(pairs + gone + wrong, 10)
    assert ended == {claim.job_id for claim in claims[1:]}
    assert [job.id for _, job in await side.claims.find(NAME) if job.state.base == "RUNNING"] == [
        claims[0].job_id
    ]


async def test_a_claim_is_extended_and_never_shortened(side):
    claim = await side.claims.allocate(asking(minutes=10), 5)
    wanted = CLOCK.wall() + 60 * 45
    for until in (wanted, CLOCK.wall() + 60 * 3, CLOCK.wall() - 3600):
        end = await side.claims.extend(claim.job_id, claim.id, until, 5)
        ((_, job),) = await side.claims.find(NAME)
        assert job.end == end
        assert 0 <= end - wanted < 60


# Covering


async def test_a_pod_gets_its_claim_on_its_own_gpus_again(side):
    for free, want in (((1, 3, 4, 6), (3, 6)), ((0, 2, 5, 7), (5,)), ((2, 3), (2, 3))):
        await side.take_others(free)
        claim = await side.claims.cover(asking(gpus=len(want)), want, 15)
        assert (claim.is_running, claim.gpus.indices) == (True, want)
        held = await side.settled(8 - len(free) + 1)  # when the last fillers have ended
        assert [h for h in held if h[0] != "native"] == [
            (NAME, "slurmbridge/1 cluster=t1 pod=u1 ref=ns/u1", want)
        ]
        ((claim_id, job),) = [
            (c, j) for c, j in await side.claims.find(NAME) if j.state.base == "RUNNING"
        ]
        assert (claim_id, job.id) == (claim.id, claim.job_id)
        await asyncio.to_thread(side.slurm.run, "scancel", "--user", side.slurm.slurm_user)
        await side.settled(0)


async def test_two_pods_of_a_node_are_covered_at_the_same_time(side):
    wants = {"u1": (1, 4), "u2": (0,), "u3": (5, 6, 7)}
    claims = await asyncio.gather(
        *(side.claims.cover(asking(u, gpus=len(w)), w, 20) for u, w in wants.items())
    )
    assert {c.id.uid: c.gpus.indices for c in claims} == wants
    assert [held[2] for held in await side.settled(3)] == sorted(wants.values())


async def test_gpus_that_a_native_job_has_cannot_be_covered(side):
    await side.take_others((0, 1, 2, 4))
    with pytest.raises(PeerRejected) as refused:
        await side.claims.cover(asking(), (2, 3), 10)
    assert refused.value.reason == "indices"
    assert all(held[0] == "native" for held in await side.held())


async def test_the_gpus_are_covered_even_when_a_native_job_has_the_pods_cores(side):
    await side.until(await side.native("-w", "gpu001", "-c", "30"), "RUNNING")
    request = asking(cpus=40, exclusive_user=True)
    claim = await side.claims.cover(request, (2, 3), 4)
    assert claim.gpus.indices == (2, 3)
    assert "NumCPUs=1 " in side.slurm.run("scontrol", "show", "job", str(claim.job_id))


async def test_a_cover_gives_up_in_time_and_holds_nothing(side):
    await side.until(await side.native("-w", "gpu001", "-c", "64"), "RUNNING")
    with pytest.raises(PeerRejected) as refused:
        await side.claims.cover(asking(), (2, 3), 1.5)
    assert refused.value.reason == "indices"
    await side.settled(1)


async def test_after_a_crash_of_slurmctld_the_cover_comes_before_waiting_native_jobs(side):
    await side.until(await side.native("-w", "gpu001", "--gres=gpu:8", name="first"), "RUNNING")
    natives = [await side.native("-w", "gpu001", "--gres=gpu:4") for _ in range(2)]
    await asyncio.to_thread(side.slurm.stop_slurmctld)  # saves its state: the natives are in it
    await asyncio.to_thread(side.slurm.start_slurmctld)
    await asyncio.to_thread(side.slurm.kill9_slurmctld)
    await asyncio.to_thread(side.slurm.start_slurmctld)
    await asyncio.to_thread(side.slurm.run, "scancel", "--name=first")
    claim = await side.claims.cover(asking(), (2, 5), 25)
    assert claim.gpus.indices == (2, 5)
    await side.until(natives[0], "RUNNING")
    assert await side.state(natives[1]) == "PENDING"
    held = {index for _, _, indices in await side.held() for index in indices}
    assert len(held) == 6


async def test_a_site_that_schedules_in_cycles_only_gets_queued_claims(side):
    side.slurm.reconfigure(extra=("SchedulerParameters=defer,bf_interval=1",))
    try:
        with pytest.raises(PeerRejected) as refused:
            await side.claims.allocate(asking(), 5)
        assert refused.value.reason == "defer"
        claim = await side.claims.cover(asking(), None, 15)
        assert claim.is_running
        claim = await side.claims.cover(asking("u2", gpus=1), (6,), 25)
        assert claim.gpus.indices == (6,)
    finally:
        side.slurm.reconfigure(extra=())


async def test_what_a_dead_bridge_left_of_a_cover_is_swept(side):
    request = asking(gpus=1)
    ends = time.monotonic() + 10
    await side.tool.allocate(request, ends, write_filler(request.id))
    elsewhere = replace(request, slurm_node="gpu002")
    queued = await side.tool.submit(elsewhere, ends, write_filler(request.id))
    claim = await side.claims.allocate(asking("u2"), 5)
    other = await side.claims.allocate(replace(asking(), id=ClaimId("t2", "u1")), 5)
    assert [claim_id.uid for claim_id, _ in await side.claims.find(NAME)] == ["u2"]
    assert await side.claims.sweep(NAME, 5) == 2
    await side.until(queued, "CANCELLED")
    assert await side.claims.sweep(NAME, 5) == 0
    assert {await side.state(claim.job_id), await side.state(other.job_id)} == {"RUNNING"}
