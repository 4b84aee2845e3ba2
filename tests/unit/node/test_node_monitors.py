"""A process that watches GPUs is told by whose it is, not by its name alone."""

import os
import subprocess

import pytest

from slurmbridge.node import slurm_script
from slurmbridge.node.book import Book
from slurmbridge.node.device import DeviceMap, Gpu
from slurmbridge.node.inventory import Usage
from slurmbridge.node.look import NodeLook

GPU = Gpu(index=0, uuid="GPU-0", minor=0, path="/dev/null")
NAME = "nvidia-smi"


class Driver:
    """One process has a context on the GPU."""

    def usage(self):
        return {"GPU-0": Usage(pids=(4242,))}


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """Who is seen to use the GPU, when process 4242 is called so, is a user's, and is in a pod."""
    book = Book(str(tmp_path / "book.json"))
    look = NodeLook({}, lambda: DeviceMap(gpus=(GPU,)), Driver(), None, book, lambda: 0.0)

    async def of(command, uid, pod="", *, given=False, job=0):
        monkeypatch.setattr(slurm_script, "command_of", lambda pid: command)
        monkeypatch.setattr(slurm_script, "real_uid", lambda pid: uid)
        monkeypatch.setattr(slurm_script, "owner_of", lambda pid: (pod, job))
        groups = {pod: ["/folder"]} if pod else {}
        monkeypatch.setattr(slurm_script, "pod_cgroups", lambda root: groups)
        monkeypatch.setattr(slurm_script, "cgroup_processes", lambda folders: {4242})
        monkeypatch.setattr(slurm_script, "open_devices", lambda pids, wanted: {})
        if given:
            book.give(pod, "a/b", 7, "main", ["GPU-0"], [0])
        return [user.pid for user in await look.users([0])]

    return of


async def test_the_nodes_own_monitors_use_no_gpu(seen):
    assert await seen(NAME, 0) == []
    assert await seen(NAME, 120) == []
    assert await seen(NAME, 0, "u-1") == []


@pytest.mark.parametrize(
    ("command", "uid", "pod"),
    [
        ("python3", 0, ""),
        (NAME, 1000, ""),
        (NAME, 70000, ""),
        (NAME, None, ""),
        (NAME, 120, "u-1"),
        (NAME, 1000, "u-1"),
    ],
)
async def test_a_users_process_that_is_called_like_one_does(seen, command, uid, pod):
    assert await seen(command, uid, pod) == [4242]


async def test_so_does_a_process_of_a_slurm_job_whoever_has_submitted_it(seen):
    assert await seen(NAME, 0, job=12) == [4242]


async def test_so_does_any_process_of_a_pod_that_was_given_gpus(seen):
    assert await seen(NAME, 0, "u-1", given=True) == [4242]


def test_the_real_user_id_is_read_from_the_process():
    assert slurm_script.real_uid(os.getpid()) == os.getuid()
    child = subprocess.Popen(["true"])
    child.wait()
    assert slurm_script.real_uid(child.pid) is None
