"""A machine on which no real node can run fails the tests of the node agent, and is told why."""

import os

import pytest

from tests.node import conftest
from tests.support import node


def test_without_root_the_run_ends_with_the_reason(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(pytest.UsageError, match=r"are not skipped: .*root is needed"):
        conftest.pytest_configure(None)


def test_a_cgroup_tree_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "cgroup.controllers").touch()
    monkeypatch.setattr(node, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 0)

    def refuse(path, *_):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(node.Path, "mkdir", refuse)
    found = [text for text in node.host_problems() if "cgroup" in text]
    assert found == [f"no cgroup can be made in {tmp_path}: Read-only file system"]


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(node.shutil, "which", lambda command: None)
    found = node.host_problems()
    assert "containerd is not installed (`make prerequisites`)" in found
