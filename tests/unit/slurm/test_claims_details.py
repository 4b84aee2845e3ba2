"""Reading single jobs back: one scontrol for many askers, and whose a job is by its record."""

import asyncio

import pytest

from slurmbridge.pool.claim import ClaimId, claim_of, filler_of, write_filler
from slurmbridge.pool.errors import PeerProtocolError, PeerRejected, PeerUnavailable
from slurmbridge.slurm.command import CommandResult
from slurmbridge.slurm.details import JobDetails
from tests.unit.slurm.claim_records import CLAIM, record


class Scontrol:
    """Answers like `scontrol -o -d` reading from stdin: jobs by id, and an error for others."""

    def __init__(self, jobs):
        self.jobs = jobs
        self.scripts = []
        self.extra_error = ""

    async def run(self, argv, *, timeout_s, stdin="", check=True):
        assert argv[0] == "scontrol"
        self.scripts.append(stdin)
        await asyncio.sleep(0)
        out, errors = "", self.extra_error
        for line in stdin.splitlines():
            if line.startswith("show hostlist "):
                out += line.removeprefix("show hostlist ") + "\n"
            else:
                job_id = int(line.removeprefix("show job "))
                out += self.jobs.get(job_id, "")
                if job_id not in self.jobs:
                    errors += "slurm_load_jobs error: Invalid job id specified\n"
        return CommandResult(out, errors, 1 if errors else 0, 0.0, 0.0)


async def test_a_job_comes_with_its_gpus():
    job = await JobDetails(Scontrol({1: record()})).job(1)
    assert (job.gpus["n1"].indices, job.comment) == ((1,), CLAIM)


async def test_questions_of_many_go_to_few_processes():
    scontrol = Scontrol({i: record(i) for i in range(1, 17)})
    details = JobDetails(scontrol)
    jobs = await asyncio.gather(*(details.job(i) for i in [*range(1, 17), 3]))
    assert [job.id for job in jobs] == [*range(1, 17), 3]
    assert len(scontrol.scripts) == 1


async def test_an_answer_is_never_older_than_its_question():
    scontrol = Scontrol({1: record()})
    details = JobDetails(scontrol)
    first = asyncio.create_task(details.job(1))
    while not scontrol.scripts:
        await asyncio.sleep(0)
    # The first process is under way: it may have looked already.
    assert await asyncio.gather(first, details.job(1))
    assert len(scontrol.scripts) == 2


async def test_a_job_that_slurmctld_does_not_know_is_none_among_others():
    details = JobDetails(Scontrol({2: record(2)}))
    gone, there = await asyncio.gather(details.job(1), details.job(2))
    assert gone is None
    assert there.id == 2


async def test_silence_is_not_an_answer():
    scontrol = Scontrol({1: ""})
    with pytest.raises(PeerProtocolError):
        await JobDetails(scontrol).job(1)


@pytest.mark.parametrize(
    ("text", "error"),
    {
        "no answer": (
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            PeerUnavailable,
        ),
        "a no": ("slurm_load_jobs error: Access/permission denied", PeerRejected),
        "one of them beside a job that is gone": (
            "slurm_load_jobs error: Socket timed out on send/recv operation",
            PeerUnavailable,
        ),
    }.values(),
)
async def test_another_error_is_the_answer_to_nobody(text, error):
    scontrol = Scontrol({1: record()})
    scontrol.extra_error = text + "\n"
    details = JobDetails(scontrol)
    results = await asyncio.gather(details.job(1), details.job(2), return_exceptions=True)
    assert [type(result) for result in results] == [error, error]
    scontrol.extra_error = ""
    assert (await details.job(1)).id == 1


async def test_an_asker_that_goes_away_disturbs_nobody():
    details = JobDetails(Scontrol({1: record(), 2: record(2)}))
    goner = asyncio.create_task(details.job(1))
    stays = asyncio.create_task(details.job(1))
    await asyncio.sleep(0)
    goner.cancel()
    assert (await stays).id == 1
    assert (await details.job(2)).id == 2


# What stood behind the comment on 22.05.8, 24.11.5 and 26.05.5.
TAILS = {
    "22.05 immediate": "  Power= TresPerNode=gres:gpu:1 ",
    "22.05 batch": "  StdErr=/dev/null StdIn=/dev/null StdOut=/dev/null Power= ",
    "24.11 immediate": "  GresEnforceBind=No TresPerNode=gres/gpu:1 TresPerTask=cpu=1 ",
    "24.11 batch": "  StdErr=/dev/null StdIn=/dev/null StdOut=/dev/null ",
    "26.05 immediate": " GresEnforceBind=No TresPerNode=gres/gpu:1 TresPerTask=cpu=1",
    "26.05 batch": " StdErr= StdIn=/dev/null StdOut=/dev/null",
    "nothing": "",
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS.keys())
@pytest.mark.parametrize("sluid", ["", " SLUID=sECHM8PKETYZ00"], ids=["", "SLUID"])
async def test_a_claim_and_a_filler_are_recognised_whatever_follows(tail, sluid):
    filler = write_filler(ClaimId("k1", "u1"))
    details = JobDetails(
        Scontrol({1: record(tail=tail, sluid=sluid), 2: record(2, filler, tail, sluid)})
    )
    job = await details.job(1)
    assert claim_of(job, "k1", 0) == ClaimId("k1", "u1")
    assert filler_of(job, "k1", 0) is None
    job = await details.job(2)
    assert claim_of(job, "k1", 0) is None
    assert filler_of(job, "k1", 0) == "u1"
    assert filler_of(job, "k2", 0) is None
    assert filler_of(job, "k1", 1000) is None
