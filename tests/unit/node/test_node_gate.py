"""What the gate says is held: as long as a hook asks, and no longer."""

from slurmbridge.node.book import Book
from slurmbridge.node.gate import ASKED_S, Gate


class Look:
    """The pod's processes are there until the test says otherwise."""

    why = "pod u-1 has a cgroup with 1 processes"

    async def left(self, uids):
        return self.why

    async def contexts(self, indices):
        return ""


class NoPods:
    def known(self):
        return []


async def test_a_hold_ends_with_its_cause_and_with_an_epilog_that_asks_no_more(tmp_path):
    now, look = [100.0], Look()
    book = Book(str(tmp_path / "book.json"))
    gate = Gate("", look, book, NoPods(), None, None, lambda: now[0])
    question = {"ask": "hold", "job": {"id": "7", "gpus": "0"}, "uids": ["u-1"]}
    assert await gate._answer(question) == look.why
    assert gate.held == {7: look.why}
    now[0] += ASKED_S - 1.0
    await gate._answer(question)
    now[0] += ASKED_S - 1.0
    assert gate.held == {7: look.why}, "it is still asked for"
    now[0] += 2.0
    assert gate.held == {}, "its Epilog has been killed"
    await gate._answer(question)
    look.why = ""
    assert await gate._answer(question) == ""
    assert gate.held == {}
