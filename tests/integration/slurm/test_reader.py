"""The reader against a real slurmctld: what it sees while jobs come, go, lie and linger."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from slurmbridge.clock import SystemClock
from slurmbridge.pool.errors import ParseError, PeerRejected, PeerTimeout, PeerUnavailable
from slurmbridge.pool.ledger import build_node
from slurmbridge.pool.nodestate import why_not_usable
from slurmbridge.slurm.command import SlurmCommand
from slurmbridge.slurm.reader import SlurmReader
from tests.support.slurm import NodeGroup, SlurmCluster, SlurmConfig

pytestmark = pytest.mark.slurm

PARTITIONS = (
    "PartitionName=main Nodes=ALL Default=YES State=UP MaxTime=INFINITE",
    "PartitionName=hidden Nodes=ALL Hidden=YES State=UP MaxTime=60",
)


class Counted(SlurmCommand):
    """Counts the commands that it runs."""

    runs = 0

    async def run(self, argv, **more):
        self.runs += 1
        return await super().run(argv, **more)


@pytest.fixture(scope="module")
def hold(tmp_path_factory):
    """While this file is there, the Epilog of every job waits."""
    return tmp_path_factory.mktemp("epilog") / "hold"


@pytest.fixture(scope="module")
def slurm(hold):
    epilog = hold.with_name("epilog.sh")
    epilog.write_text(f"#!/bin/sh\nwhile [ -e {hold} ]; do sleep 0.1; done\n")
    epilog.chmod(0o755)
    for folder in (hold.parent, *hold.parents[1:3]):
        folder.chmod(0o755)
    config = SlurmConfig(
        groups=(NodeGroup(4), NodeGroup(1, "cpu", gpus=0), NodeGroup(1, "any", gpu_type="")),
        partitions=PARTITIONS,
        epilog=str(epilog),
    )
    with SlurmCluster(config) as cluster:
        yield cluster


@pytest.fixture
def clean(slurm, hold):
    """A cluster without jobs before and after."""
    yield slurm
    hold.unlink(missing_ok=True)
    slurm.run("scancel", "--user=root")
    deadline = time.monotonic() + 20
    while slurm.run("squeue", "-h").strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
async def command(slurm):
    made = Counted(environ=slurm.env())
    yield made
    made.close()


@pytest.fixture
async def reader(command):
    return SlurmReader(command, SystemClock(), timeout_s=10)


def salloc(slurm, node, gres, name="job", comment="", *more):
    """Grant a job at once, in front of all that wait; its id."""
    done = slurm.run_raw(
        *("salloc", "--no-shell", "-I", "-w", node, f"--gres={gres}", "--mem=10", f"-J{name}"),
        *("--priority=4294967000", f"--comment={comment}", *more),
    )
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split("Granted job allocation ")[1].split()[0])


def sbatch(slurm, *argv):
    return int(
        slurm.run("sbatch", "--parsable", "--mem=10", "--output=/dev/null", *argv).split(";")[0]
    )


async def until(reader, test, timeout_s=15):
    deadline = time.monotonic() + timeout_s
    while True:
        snapshot = await reader.snapshot()
        if test(snapshot):
            return snapshot
        assert time.monotonic() < deadline, snapshot.jobs
        await asyncio.sleep(0.1)


def indices(job):
    return None if job.gpus is None else {node: use.indices for node, use in job.gpus.items()}


async def test_no_text_of_a_user_changes_what_anyone_holds(clean, reader):
    victim = salloc(clean, "gpu002", "gpu:2", "victim")
    record = clean.run("scontrol", "-o", "-d", "show", "job", str(victim)).strip()
    # Slurm takes 1,024 bytes a text: what a reader looks at, the rest left out.
    forged = re.sub(
        r" (Requeue|Eligible|Accrue|Deadline|ReqB|CPUs|TRES|Socks|Ntasks).*?(?= \w+=)", "", record
    )
    forged = forged.replace("NodeList=gpu002", "NodeList=gpu003").replace("IDX:0-1", "IDX:0-7")
    forged = forged[: forged.index(" MinCPUsNode=") + 14]
    assert len(forged) < 900
    texts = [
        ("a\n" + forged, "b\n" + forged + "\nJobId=1 JobName=x"),
        ("x NodeList=gpu003 GRES=gpu:8(IDX:0-7) JobState=PENDING", "\x1f|\t\r\n"),
        ("%i %n $(id) ;", " UserId=root(0) GroupId=root(0) JobState=PENDING NodeList=(null)"),
    ]
    liars = [salloc(clean, "gpu001", "gpu:1", name, comment) for name, comment in texts]
    for index in range(9):  # so many new jobs that all are listed at once
        salloc(clean, "gpu004", "gpu:1" if index < 8 else "gpu:0", f"n{index}")
    snapshot = await reader.snapshot()
    assert indices(snapshot.jobs[victim]) == {"gpu002": (0, 1)}
    assert [indices(snapshot.jobs[liar]) for liar in liars] == [
        {"gpu001": (0,)},
        {"gpu001": (1,)},
        {"gpu001": (2,)},
    ]
    assert [(snapshot.jobs[j].name, snapshot.jobs[j].comment) for j in liars] == texts
    ledger = build_node(snapshot.nodes["gpu003"], snapshot.jobs.values(), {})
    assert sum(count.count for count in ledger.free()) == 8
    assert await reader.jobs_named("victim") == [await reader.job(victim)]
    assert indices(await reader.job(victim)) == {"gpu002": (0, 1)}


async def test_every_kind_of_job_is_seen_with_what_it_holds(clean, reader):
    hidden = salloc(clean, "gpu001", "gpu:3", "hidden", "", "--partition=hidden")
    asleep = salloc(clean, "gpu001", "gpu:2", "asleep")
    clean.run("scontrol", "suspend", str(asleep))
    untyped = salloc(clean, "any001", "gpu:1")
    on_cpus = salloc(clean, "cpu001", "gpu:0")
    exclusive = sbatch(clean, "-w", "gpu002", "--exclusive", "--wrap", "sleep 60")
    array = sbatch(clean, "-w", "gpu003", "-a", "0-999%2", "--gres=gpu:1", "--wrap", "sleep 60")
    # GPUs of the first component on one node, of the second on another.
    het = sbatch(
        clean,
        "-w",
        "gpu003",
        "--gres=gpu:4",
        ":",
        "-w",
        "gpu004",
        "--gres=gpu:4",
        "--wrap",
        "sleep 60",
    )
    snapshot = await until(
        reader, lambda s: sum(j.state.base == "RUNNING" for j in s.jobs.values()) == 8
    )
    jobs = snapshot.jobs
    assert indices(jobs[hidden]) == {"gpu001": (0, 1, 2)}
    assert (jobs[asleep].state.base, indices(jobs[asleep])) == ("SUSPENDED", {"gpu001": (3, 4)})
    assert indices(jobs[untyped]) == {"any001": (0,)}
    assert snapshot.nodes["any001"].gpus_used.total == 1
    assert (jobs[on_cpus].nodes, jobs[on_cpus].gpus) == (("cpu001",), {})
    assert indices(jobs[exclusive]) == {"gpu002": tuple(range(8))}
    assert (jobs[array].state.base, jobs[array].tasks, jobs[array].gpus_wanted) == (
        "PENDING",
        998,
        1,
    )
    assert len([j for j in jobs.values() if j.comment == jobs[array].comment and j.tasks > 1]) == 1
    assert [indices(jobs[j]).keys() for j in (het, het + 1)] == [{"gpu003"}, {"gpu004"}]
    assert snapshot.partitions["hidden"].hidden
    assert (snapshot.reservations, snapshot.config.version != "") == ((), True)


async def test_a_completing_job_keeps_its_gpus_until_its_epilog_ends(clean, reader, command, hold):
    job = salloc(clean, "gpu[001-002]", "gpu:3", "ends", "", "-N2")
    salloc(clean, "gpu001", "gpu:1", "stays")
    running = await reader.snapshot()
    hold.touch()
    clean.run("scancel", str(job))
    ending = await until(reader, lambda s: "COMPLETING" in s.jobs[job].state.flags)
    assert ending.nodes["gpu001"].gpus_used.total == 1  # Slurm's node record has let them go
    assert ending.jobs[job].gpus == running.jobs[job].gpus
    owners = build_node(ending.nodes["gpu001"], ending.jobs.values(), {})
    assert len(owners.free()) == 1
    assert owners.free()[0].count == 4
    assert why_not_usable(ending.nodes["gpu001"].state) == "COMPLETING"
    refused = clean.run_raw(
        "salloc", "--no-shell", "-I", "-w", "gpu001", "--gres=gpu:1", "--mem=10"
    )
    assert "Requested nodes are busy" in refused.stderr
    # Whoever comes now has not seen it run, and can't know: unknown, not free.
    newcomer = await SlurmReader(command, SystemClock()).snapshot()
    assert newcomer.jobs[job].gpus is None
    assert build_node(newcomer.nodes["gpu002"], newcomer.jobs.values(), {}).free()[0].count == 0
    hold.unlink()
    over = await until(reader, lambda s: s.jobs[job].state.is_finished)
    assert over.jobs[job].gpus == {}
    assert (await reader.job(job)).state.is_finished


async def test_a_requeued_job_is_read_anew_under_its_old_id(clean, reader):
    clean.wait_scheduling()
    job = sbatch(clean, "--requeue", "-w", "gpu001", "--gres=gpu:2", "--wrap", "sleep 60")
    first = await until(reader, lambda s: s.jobs[job].state.base == "RUNNING")
    salloc(clean, "gpu002", "gpu:1")
    clean.run("scontrol", "requeuehold", str(job))
    waiting = await until(
        reader, lambda s: s.jobs[job].state.base == "PENDING" and not s.jobs[job].state.flags
    )
    assert (waiting.jobs[job].gpus, waiting.jobs[job].nodes) == ({}, ())
    clean.run("scontrol", "update", f"JobId={job}", "ReqNodeList=gpu002", "StartTime=now")
    clean.run("scontrol", "release", str(job))
    second = await until(reader, lambda s: s.jobs[job].state.base == "RUNNING")
    assert (indices(first.jobs[job]), indices(second.jobs[job])) == (
        {"gpu001": (0, 1)},
        {"gpu002": (1, 2)},
    )
    assert second.jobs[job].restarts == first.jobs[job].restarts + 1


async def test_one_job_is_nobody_only_when_slurmctld_says_so(clean, reader):
    job = salloc(clean, "gpu001", "gpu:1", "mine")
    assert (await reader.job(job)).nodes == ("gpu001",)
    assert await reader.job(9_999_999) is None
    assert [j.id for j in await reader.jobs_named("mine")] == [job]
    assert await reader.jobs_named("min") == []
    with pytest.raises(ParseError):
        await reader.jobs_named("mine,job")


async def test_the_number_of_commands_does_not_grow_with_the_jobs(clean, reader, command):
    await reader.snapshot()
    before = command.runs
    await reader.snapshot()
    few = command.runs - before
    for node in ("gpu001", "gpu002", "gpu003"):
        for _ in range(8):
            salloc(clean, node, "gpu:1")
    sbatch(clean, "--hold", "-a", "0-500", "--gres=gpu:1", "--wrap", "true")
    before = command.runs
    snapshot = await reader.snapshot()
    assert len([j for j in snapshot.jobs.values() if j.gpus]) == 24
    assert command.runs - before <= few + 1
    before = command.runs
    await reader.snapshot()
    assert command.runs - before == few == 3


async def test_while_claims_come_and_go_no_used_gpu_ever_looks_free(clean, reader):
    clock = SystemClock()
    looked = asyncio.Event()
    held = {}  # job id -> (granted, ending asked for); our clock, like the snapshot's

    async def churn(node):
        while not looked.is_set():
            job = await asyncio.to_thread(salloc, clean, node, "gpu:2")
            held[job] = (node, clock.wall(), None)
            await asyncio.sleep(0.25)
            held[job] = (*held[job][:2], clock.wall())
            await asyncio.to_thread(clean.run, "scancel", str(job))
            # A node on which a job ends takes no other, and salloc -I says "busy".
            while "COMPLETING" in await asyncio.to_thread(
                clean.run, "scontrol", "show", "node", node
            ):
                await asyncio.sleep(0.01)

    async def watch():
        least, latest, seen = time.monotonic() + 3, time.monotonic() + 60, 0
        while seen <= 10 or time.monotonic() < least:
            assert time.monotonic() < latest, seen
            snapshot = await reader.snapshot()
            for job, (node, granted, ending) in held.items():
                if granted < snapshot.began and (ending is None or ending > snapshot.ended):
                    record = snapshot.nodes[node]
                    free = sum(
                        c.count for c in build_node(record, snapshot.jobs.values(), {}).free()
                    )
                    assert free <= 6, (job, record, snapshot.jobs.get(job))
                    seen += 1
        looked.set()

    nodes = ("gpu001", "gpu002", "gpu003", "gpu004")
    await asyncio.gather(*(churn(node) for node in nodes), watch())


async def test_a_slurmctld_that_is_away_or_hangs_gives_no_snapshot_and_no_answer(clean, command):
    patient = SlurmReader(command, SystemClock())
    reader = SlurmReader(command, SystemClock(), timeout_s=1.0)
    job = salloc(clean, "gpu001", "gpu:2")
    before = await patient.snapshot()
    clean.pause_slurmctld()
    try:
        for question in (reader.snapshot(), reader.job(job), reader.jobs_named("job")):
            with pytest.raises(PeerTimeout):
                await question
    finally:
        clean.resume_slurmctld()
    await asyncio.to_thread(clean.wait_saved, job)
    clean.kill9_slurmctld()
    for question in (reader.snapshot(), reader.job(job), reader.jobs_named("job")):
        with pytest.raises(PeerUnavailable) as caught:
            await question
        assert not isinstance(caught.value, PeerRejected)
    clean.start_slurmctld()
    after = await patient.snapshot()
    assert after.config.boot_time > before.config.boot_time
    assert after.jobs[job].gpus == before.jobs[job].gpus
