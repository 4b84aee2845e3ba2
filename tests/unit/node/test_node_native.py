"""Native jobs whose Prolog or Epilog had no agent are noted and forgotten by slurmctld's word."""

import asyncio

import pytest

from slurmbridge.node.book import Book, NativeJob
from slurmbridge.node.native import NativeJobs, held_by
from slurmbridge.pool.errors import PeerTimeout
from slurmbridge.pool.noderecord import GpuOwner
from tests.support.builders import make_job

HERE = make_job(9).on("gpu001", "2-3")
OVER = {
    "slurmctld knows none": (None, True),
    "it runs": (HERE.obj, False),
    "its Epilog is at work": (
        make_job(9).on("gpu001", "2").state("COMPLETED+COMPLETING").obj,
        False,
    ),
    "it has completed": (make_job(9).on("gpu001", "2").state("COMPLETED").obj, True),
    "it is suspended": (make_job(9).on("gpu001", "2").state("SUSPENDED").obj, False),
    "it was requeued": (make_job(9).state("PENDING").obj, True),
    "its id is that of a job elsewhere": (make_job(9).on("gpu002", "2").obj, True),
    "its GPUs are not told": (make_job(9).on_unknown("gpu001").obj, False),
    "its state is none that we know": (make_job(9).on("gpu001", "2").state("ODD").obj, False),
}


@pytest.mark.parametrize("case", OVER)
def test_a_job_is_over_here_by_slurmctlds_own_word_only(case):
    job, is_over = OVER[case]
    assert (held_by(job, "gpu001") is None) is is_over


class Slurm:
    """Answers in turn; an exception is raised."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def job(self, job_id):
        self.asked.append(job_id)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


NO_ANSWER = PeerTimeout("slurmctld", "show job 9", "no answer")


def checked(tmp_path, answers, *, noted, owners=(), alive=()):
    """Ids in the book after each check."""
    book = Book(str(tmp_path / "node.json"))
    if noted:
        book.started(NativeJob(9, "alice", "ml", "main", (2, 3)))
    slurm = Slurm(*answers)
    native = NativeJobs(book, slurm, "gpu001")
    story = []
    while slurm.answers:
        asyncio.run(native.check(owners, alive))
        story.append(sorted(book.native))
    return story, book


def test_a_job_whose_epilog_ran_without_an_agent_is_forgotten_after_two_looks(tmp_path):
    story, _ = checked(tmp_path, [HERE.obj, None, None], noted=True)
    assert story == [[9], [9], []]


def test_no_answer_forgets_nothing_and_begins_nothing_anew(tmp_path):
    story, _ = checked(tmp_path, [NO_ANSWER, NO_ANSWER, None, NO_ANSWER, None], noted=True)
    assert story == [[9], [9], [9], [9], []]


def test_a_job_that_is_there_again_is_doubted_from_the_start(tmp_path):
    story, _ = checked(tmp_path, [None, HERE.obj, None, HERE.obj], noted=True)
    assert story == [[9]] * 4


def test_a_job_of_which_a_process_is_on_a_gpu_is_not_forgotten(tmp_path):
    story, _ = checked(tmp_path, [None, None, None], noted=True, alive={9})
    assert story == [[9]] * 3


def test_a_job_that_started_without_an_agent_is_noted_with_what_slurmctld_says(tmp_path):
    owners = (GpuOwner(2, "native", 9), GpuOwner(3, "native", 9), GpuOwner(4, "claim", 11, "u"))
    story, book = checked(tmp_path, [HERE.obj, HERE.obj], noted=False, owners=owners)
    assert story == [[], [9]]
    assert book.native[9] == NativeJob(9, "alice", "science", "gpu", (2, 3))


def test_an_owner_that_has_ended_meanwhile_is_not_noted(tmp_path):
    owners = (GpuOwner(2, "native", 9),)
    story, _ = checked(tmp_path, [None, None], noted=False, owners=owners)
    assert story == [[], []]
