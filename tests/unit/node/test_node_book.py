"""The book keeps who was given what over a restart of the agent."""

import pytest

from slurmbridge.node.book import Book, NativeJob
from slurmbridge.node.device import Gpu


def test_a_new_agent_reads_what_the_old_one_wrote(tmp_path):
    old = Book(str(tmp_path / "node.json"))
    old.gpus = (Gpu(0, "GPU-0", 3, "/dev/nvidia3"),)
    old.give("u-1", "a/b", 7, "main", ["GPU-0", "GPU-1"], [0, 1])
    old.started(NativeJob(9, "alice", "ml", "main", (3,)))
    new = Book(str(tmp_path / "node.json"))
    assert new.served == {("u-1", "main")}
    assert new.pods["u-1"].gpus == {0, 1}
    assert new.gpus == old.gpus
    assert new.native[9].user == "alice"
    new.drop(["u-1"])
    new.ended(9)
    again = Book(str(tmp_path / "node.json"))
    assert (again.pods, again.native) == ({}, {})


def test_native_jobs_whose_gpus_a_pod_has_are_forgotten(tmp_path):
    book = Book(str(tmp_path / "node.json"))
    book.started(NativeJob(9, "alice", "ml", "main", (2, 3)))
    book.started(NativeJob(10, "alice", "ml", "main", (0,)))
    book.free_of_jobs([3, 4])
    assert set(book.native) == {10}
    assert set(Book(str(tmp_path / "node.json")).native) == {10}


def test_the_last_who_was_given_a_set_of_devices_is_known(tmp_path):
    book = Book(str(tmp_path / "node.json"))
    book.give("old", "a/b", 7, "main", ["GPU-0"], [0])
    book.give("new", "a/b", 8, "main", ["GPU-0"], [0])
    assert book.newest_with(frozenset({"GPU-0"})).uid == "new"
    assert book.newest_with(frozenset({"GPU-1"})) is None


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"version": 2}', '{"version": 1, "pods": [{"uid": 7}]}']
)
def test_a_file_that_cannot_be_read_is_made_anew(tmp_path, text):
    (tmp_path / "node.json").write_text(text)
    book = Book(str(tmp_path / "node.json"))
    assert book.pods == {}
    book.adopt("u-1", "a/b", 7, [2])
    assert Book(str(tmp_path / "node.json")).pods["u-1"].gpus == {2}
