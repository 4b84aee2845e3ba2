"""Listings of 900 jobs, as long as a real slurmctld makes them, and ten times as long.

slurmctld takes texts of 1,024 characters, and the reader asks for few of a job's fields: a listing of
900 jobs that other tools see with 30 MB has some MB here. What comes beyond stands in for a Slurm
that takes longer texts: a squeue that asks the real one and lengthens each comment.
"""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from slurmbridge.clock import SystemClock
from slurmbridge.core import event as ev
from slurmbridge.core import publish
from slurmbridge.pool.errors import PeerProtocolError
from slurmbridge.pool.ledger import build_node
from slurmbridge.slurm.command import SlurmCommand
from slurmbridge.slurm.poller import Pace, Poller
from slurmbridge.slurm.reader import SlurmReader
from tests.support.builders import Story, make_kube_node
from tests.support.slurm import NodeGroup, SlurmCluster, SlurmConfig

pytestmark = pytest.mark.slurm

JOBS = 900
HOLDERS = 8
"""So many of them have a GPU of each node."""
GROUPS = tuple(NodeGroup(1, chr(97 + n % 26) * 55, cpus=2 * JOBS) for n in range(26))
NODES = [name for group in GROUPS for name in group.names]
MB = 1_000_000
PADDED = 33_000
"""Characters more for each comment in the listings that slurmctld cannot make."""

SQUEUE = """#!{python}
import subprocess, sys
done = subprocess.run(["squeue", *sys.argv[1:]], stdout=subprocess.PIPE, check=True)
mark = sys.argv[-1].rpartition(":0")[2].encode()
sys.stdout.buffer.write(done.stdout.replace(mark + b"\\n", b"+" * {padded} + mark + b"\\n"))
"""


class Counted(SlurmCommand):
    """Counts the characters that its commands print."""

    printed = 0

    async def run(self, argv, **more):
        done = await super().run(argv, **more)
        self.printed += len(done.stdout)
        return done


def text_of(number: int) -> str:
    """A text of 1,020 characters that is no other job's."""
    return f"{number:04d} " + "a=b ; $(id) " * 84 + "no end"


@pytest.fixture(scope="module")
def slurm():
    """900 jobs on all 26 nodes, whose names no hostlist shortens, with the longest texts."""
    with SlurmCluster(SlurmConfig(groups=GROUPS, extra=("MaxJobCount=2000",))) as cluster:

        def submit(number: int) -> None:
            gpus = ["--gres=gpu:1"] if number < HOLDERS else []
            where = [f"--nodes={len(NODES)}", "--cpus-per-task=1", "--mem=10", *gpus]
            text = text_of(number)
            texts = [f"--job-name={text}", f"--comment={text}"]
            cluster.run("salloc", "--no-shell", "-Q", *where, *texts, timeout_s=120)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(submit, range(JOBS)))
        yield cluster


@pytest.fixture
def folder(tmp_path):
    """Slurm's commands with a squeue that prints 30 MB for 900 jobs."""
    for name in ("scontrol", "sinfo"):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\nexec {name} "$@"\n')
        tool.chmod(0o755)
    tool = tmp_path / "squeue"
    tool.write_text(SQUEUE.format(python=sys.executable, padded=PADDED))
    tool.chmod(0o755)
    return str(tmp_path)


@pytest.fixture
def commands():
    made = []

    def make(**how):
        made.append(Counted(**how))
        return made[-1]

    yield make
    for command in made:
        command.close()


@pytest.fixture
def allocated():
    """Most bytes that Python held at once since it was last asked, beyond those at that time."""
    tracemalloc.start()

    def peak() -> int:
        now, most = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        before, peak.before = peak.before, now
        return most - before

    peak.before = 0
    peak()
    yield peak
    tracemalloc.stop()


async def test_900_jobs_with_the_longest_texts_and_node_lists_are_read_whole(
    slurm, commands, allocated
):
    command = commands(environ=slurm.env())
    reader = SlurmReader(command, SystemClock())
    snapshot = await reader.snapshot()
    jobs = list(snapshot.jobs.values())
    assert 5 * MB < command.printed < 20 * MB
    assert sorted(job.comment for job in jobs) == [text_of(number) for number in range(JOBS)]
    assert [job.name for job in jobs] == [job.comment for job in jobs]
    assert {job.nodes for job in jobs} == {tuple(sorted(NODES))}
    assert sum(job.gpus == dict.fromkeys(NODES, one(job)) for job in jobs if job.gpus) == HOLDERS
    ledgers = [build_node(node, jobs, {}) for node in snapshot.nodes.values()]
    assert [sum(count.count for count in ledger.free()) for ledger in ledgers] == [0] * len(NODES)
    assert {len(ledger.native_jobs) for ledger in ledgers} == {JOBS}
    assert allocated() < 100 * MB
    for _ in range(3):
        snapshot = await reader.snapshot()
    assert allocated() < 100 * MB, "each reading takes the place of the last"


def one(job):
    """The one GPU that a job has on its first node."""
    return job.gpus[NODES[0]]


async def test_a_listing_of_30_mb_is_read_within_the_deadline_of_every_reading_and_200_mb(
    slurm, commands, folder, allocated
):
    command = commands(environ=slurm.env(), folder=folder)
    reader = SlurmReader(command, SystemClock())
    for _ in range(3):
        command.printed = 0
        snapshot = await reader.snapshot()
        assert 30 * MB < command.printed < 50 * MB
        assert len(snapshot.jobs) == JOBS
        assert {len(job.comment) for job in snapshot.jobs.values()} == {len(text_of(0)) + PADDED}
        assert allocated() < 200 * MB


async def test_a_listing_beyond_the_bound_is_no_answer_and_the_last_view_stays(
    slurm, commands, folder, allocated
):
    snapshot = await SlurmReader(commands(environ=slurm.env()), SystemClock()).snapshot()
    story = Story()
    story.handle(ev.PodsListed(()))
    story.handle(ev.NodesListed(tuple(make_kube_node(name).obj for name in NODES)))
    story.now = snapshot.ended
    story.handle(ev.Polled(snapshot))
    state = story.machine.state
    publish.refresh(state)
    views, ledgers = dict(state.views), dict(state.ledgers)
    assert {len(view.gpus) for view in ledgers.values()} == {8}

    short = commands(environ=slurm.env(), folder=folder, max_output=20 * MB)
    allocated()
    told = []
    poller = Poller(
        SlurmReader(short, SystemClock()).snapshot,
        lambda *_: told.append("a reading"),
        lambda error: told.append(error) or story.handle(ev.PollFailed(error.text)),
        pace=Pace(),
        clock=SystemClock(),
        jitter=lambda: 0.0,
    )
    polling = asyncio.create_task(poller.run())
    async with asyncio.timeout(120):
        while len(told) < 2:
            await asyncio.sleep(0.05)
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
    assert {type(error) for error in told} == {PeerProtocolError}
    assert state.poll_failed == "more than 20000000 bytes of output"
    assert allocated() < 60 * MB, "what is too much is not kept"
    publish.refresh(state)
    assert (state.views, state.ledgers) == (views, ledgers)
    assert state.snapshot is snapshot
    story.now += 6
    assert story.handle(ev.Ticked()) == []
    assert state.is_stale, "no claim is made by it any more"
