"""The product's processes, altered for a test: another clock, or a guard taken out.

    python -m tests.support.altered run --config FILE

is `python -m slurmbridge run ...` with what the environment asks for:
`SLURMBRIDGE_TEST_FAILS`: the core fails over pods with this rank, half-way through a change.
`SLURMBRIDGE_TEST_CLOCK`: a file with the seconds by which the host's clock is wrong; it may change at
any time. `SLURMBRIDGE_TEST_DRIVER`: `<folder of the Slurm cluster>:<node>`, for an agent whose driver is
played (played_driver.py). `SLURMBRIDGE_TEST_WITHOUT`: name of a guard of `GUARDS` that is taken out, to show that the
independent checker finds what the guard is there for.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurmbridge.cli import main
from slurmbridge.clock import SystemClock
from slurmbridge.core import grant, pods, publish
from slurmbridge.pool import keys
from tests.support import played_driver

if TYPE_CHECKING:
    from collections.abc import Callable

CLOCK = "SLURMBRIDGE_TEST_CLOCK"
DRIVER = "SLURMBRIDGE_TEST_DRIVER"
WITHOUT = "SLURMBRIDGE_TEST_WITHOUT"
FAILS = "SLURMBRIDGE_TEST_FAILS"


def set_clock(path: Path) -> None:
    """Let the wall clock be wrong by what a file says."""

    def wall(_: SystemClock) -> float:
        try:
            offset = float(path.read_text() or 0)
        except (OSError, ValueError):
            offset = 0.0
        return time.time() + offset  # noqa: TID251 - this is the clock

    SystemClock.wall = wall


def trust_slurm_alone() -> None:
    """What Slurm calls free is free: our own book of pods whose claims are gone is not asked."""
    build = publish.build_node
    publish.build_node = lambda node, jobs, claims, charges=(): build(node, jobs, claims)
    grant.others_on = lambda state, entry, gpus: False


def end_at_deletion() -> None:
    """A pod that is told to go counts as gone: its grace period is not waited for."""
    see = pods.see

    def hasty(state, pod):
        if pod.deleting_since is not None and pod.node:
            pod = msgspec.structs.replace(pod, phase="Failed")
        see(state, pod)

    pods.see = hasty


def fail_over(rank: str) -> None:
    """A fault of ours that comes up with some pods."""
    see = pods.see

    def failing(state, pod):
        see(state, pod)
        if pod.annotations.get(keys.RANK) == rank:
            raise RuntimeError(f"a fault over {pod.ref}")

    pods.see = failing


GUARDS: dict[str, Callable[[], None]] = {
    "own-book": trust_slurm_alone,
    "grace-period": end_at_deletion,
}

if __name__ == "__main__":
    if os.environ.get(CLOCK):
        set_clock(Path(os.environ[CLOCK]))
    if os.environ.get(DRIVER):
        played_driver.play(*os.environ[DRIVER].split(":"))
    if os.environ.get(FAILS):
        fail_over(os.environ[FAILS])
    if os.environ.get(WITHOUT):
        GUARDS[os.environ[WITHOUT]]()
    sys.exit(main())
