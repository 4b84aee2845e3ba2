"""Plays the driver's list of processes for native jobs of tests: who was given GPUs uses them.

A real job would hold its GPUs open and be told of by NVML. The jobs of a test have no driver; they
carry `MARK` in their environment instead (with the folder of their cluster, since several clusters
may run on one machine). The Prolog has no such mark: it runs before the job.
"""

from __future__ import annotations

import os
from pathlib import Path

from slurmbridge.node.inventory import FileInventory, Usage

MARK = "SLURMBRIDGE_TEST_NATIVE"


def native_processes(
    folder: str, proc: str = "/proc"
) -> dict[str, dict[int, tuple[str, set[int]]]]:
    """Node -> process id -> (job id, its GPUs), of native jobs of the cluster in `folder`."""
    mark = f"{MARK}={folder}".encode()
    found: dict[str, dict[int, tuple[str, set[int]]]] = {}
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        try:
            entries = Path(proc, name, "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark in entries:
            said = dict(e.decode(errors="replace").split("=", 1) for e in entries if b"=" in e)
            if "SLURMD_NODENAME" not in said:
                continue
            held = {int(i) for i in said.get("SLURM_JOB_GPUS", "").split(",") if i}
            on_node = found.setdefault(said["SLURMD_NODENAME"], {})
            on_node[int(name)] = (said["SLURM_JOB_ID"], held)
    return found


def play(folder: str, node: str) -> None:
    """Let this process's `FileInventory` tell of the native jobs of one node."""

    def usage(_: FileInventory) -> dict[str, Usage]:
        pids: dict[str, list[int]] = {}
        for pid, (_job, gpus) in native_processes(folder).get(node, {}).items():
            for index in gpus:
                pids.setdefault(f"GPU-{node}-{index}", []).append(pid)
        return {uuid: Usage(pids=tuple(found)) for uuid, found in pids.items()}

    FileInventory.usage = usage
