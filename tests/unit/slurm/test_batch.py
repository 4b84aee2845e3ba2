import pytest

from slurmbridge.pool.errors import ParseError
from slurmbridge.slurm.batch import read_batch, write_batch

MARK = "QueueMarkAbc"
QUESTIONS = ["show job 1", "show job 99", "show config"]


def echoed(*answers):
    """What scontrol with a line editor prints: prompt and line before each answer."""
    text = f"scontrol: show hostlist {MARK}\n{MARK}\n"
    for question, answer in zip(QUESTIONS, answers, strict=False):
        text += f"scontrol: {question}\n{answer}scontrol: show hostlist {MARK}\n{MARK}\n"
    return text + "scontrol: \n"


def plain(*answers):
    return "".join(f"{part}{MARK}\n" for part in ("", *answers))


ANSWERS = ["JobId=1 JobName=x\n", "", "ClusterName = a\n"]


@pytest.mark.parametrize("printed", [echoed, plain])
def test_the_answers_come_apart_with_and_without_a_line_editor(printed):
    assert read_batch(printed(*ANSWERS), QUESTIONS, MARK) == ANSWERS


@pytest.mark.parametrize("printed", [echoed, plain])
def test_an_answer_may_hold_anything_but_the_mark(printed):
    hostile = (
        "JobName=a\nscontrol: show job 99\nscontrol: show hostlist QueueMarkXyz\nQueueMarkXyz\n"
    )
    assert read_batch(printed(hostile, *ANSWERS[1:]), QUESTIONS, MARK) == [hostile, *ANSWERS[1:]]


@pytest.mark.parametrize(
    "text", ["", "scontrol: \n", echoed(*ANSWERS[:2]), plain(*ANSWERS[:2]), "x\n" + plain(*ANSWERS)]
)
def test_a_script_that_was_not_answered_to_its_end_is_refused(text):
    with pytest.raises(ParseError):
        read_batch(text, QUESTIONS, MARK)


def test_only_questions_can_be_asked():
    assert write_batch(["show job 1"], MARK).splitlines() == [
        f"show hostlist {MARK}",
        "show job 1",
        f"show hostlist {MARK}",
    ]
    for question in ("update job 1", "show job 1\nshutdown", "show job 1;x", "shutdown"):
        with pytest.raises(ParseError):
            write_batch([question], MARK)
