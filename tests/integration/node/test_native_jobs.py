"""The book's native jobs against a real slurmctld: forgotten by its word, never by its silence."""

import asyncio
import time

import pytest

from slurmbridge.node.book import Book, NativeJob
from slurmbridge.node.native import NativeJobs
from slurmbridge.pool.noderecord import GpuOwner
from slurmbridge.slurm.command import SlurmCommand
from slurmbridge.slurm.details import JobDetails
from tests.support.slurm import SlurmCluster, SlurmConfig

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def slurm():
    with SlurmCluster(SlurmConfig(nodes=2)) as cluster:
        cluster.wait_nodes()
        cluster.wait_scheduling()
        yield cluster


def test_a_job_that_no_agent_saw_start_is_noted_and_one_that_no_agent_saw_end_is_forgotten(
    slurm, tmp_path
):
    here, other = slurm.node_names
    argv = ("sbatch", "--parsable", "-o", "/dev/null", "-w", here, "--gres=gpu:2", "--mem=100")
    job_id = int(slurm.run(*argv, "--wrap=sleep 600"))
    wait(lambda: slurm.job_field(job_id, "JobState") == "RUNNING")
    book = Book(str(tmp_path / "node.json"))
    stale = NativeJob(4_000_000, "alice", "", "", (7,))
    book.started(stale)

    async def story():
        command = SlurmCommand(str(slurm.conf_path), environ=slurm.env())
        details = JobDetails(command, timeout_s=5.0)
        native, elsewhere = NativeJobs(book, details, here), NativeJobs(book, details, other)
        owners = (GpuOwner(0, "native", job_id),)
        # A slurmctld that hangs or is away says nothing of anybody.
        slurm.pause_slurmctld()
        for _ in range(2):
            await native.check(owners, ())
        slurm.resume_slurmctld()
        assert list(book.native) == [stale.job_id]
        for _ in range(2):
            await native.check(owners, ())
        assert list(book.native) == [job_id]
        noted = book.native[job_id]
        assert (noted.user, noted.partition, len(noted.gpus)) == ("root", "main", 2)
        for _ in range(3):
            await native.check((), ())
        assert list(book.native) == [job_id]
        # As a book that came with the wrong node: the job is not there.
        for _ in range(2):
            await elsewhere.check((), ())
        assert not book.native
        book.started(noted)
        slurm.run("scancel", str(job_id))
        wait(lambda: slurm.job_field(job_id, "JobState") == "CANCELLED")
        wait(lambda: not slurm.run("squeue", "-h", "-j", str(job_id), "-o", "%i").strip())
        for _ in range(2):
            await native.check(owners, ())
        assert not book.native
        command.close()

    asyncio.run(story())


def wait(reached, timeout_s=30.0):
    end = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.1)
