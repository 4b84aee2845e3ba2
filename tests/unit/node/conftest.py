"""A small node of files, for what looks at cgroups and processes."""

import pytest

from slurmbridge.node import look
from slurmbridge.node import slurm_script as script

UID = "d47a0a28-e567-4794-9f2d-6c38d3f13c99"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A node: one pod's cgroup with process 17, that holds a device open."""
    base, proc = tmp_path / "cgroup", tmp_path / "proc"
    folder = base / "kubepods" / f"pod{UID}"
    folder.mkdir(parents=True)
    (base / "cgroup.controllers").write_text("")
    (folder / "cgroup.procs").write_text("17\n")
    (tmp_path / "nvidia0").write_text("")
    (proc / "17/fd").mkdir(parents=True)
    (proc / "17/ns").mkdir()
    (proc / "17/ns/mnt").symlink_to("mnt:[1]")
    (proc / "17/fd/3").symlink_to(tmp_path / "nvidia0")
    (proc / "17/mountinfo").write_text(f"1 2 254:0 /pods/{UID}/etc-hosts /etc/hosts rw - e v rw\n")
    (proc / "17/comm").write_text("train\n")
    (proc / "17/status").write_text("Name:\ttrain\nUid:\t0\t0\t0\t0\n")
    (proc / "17/environ").write_bytes(b"PATH=/bin\0NVIDIA_VISIBLE_DEVICES=all\0")
    (proc / "17/cgroup").write_text(f"0::/kubepods/pod{UID}\n")
    monkeypatch.setattr(script.pod_cgroups, "__defaults__", ("", str(base)))
    for function in (
        script.all_pids,
        script.mounted_pods,
        script.open_devices,
        script.command_of,
        script.real_uid,
        script.owner_of,
        look.visible_devices,
    ):
        defaults = function.__defaults__[:-1]
        monkeypatch.setattr(function, "__defaults__", (*defaults, str(proc)))
    return tmp_path
