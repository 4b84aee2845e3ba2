"""Load: pods, gangs and native jobs that come and go, thrown in by three threads.

Nothing here waits for anything: what the API server or slurmctld does not take now is dropped.
"""

from __future__ import annotations

import contextlib
import random  # noqa: TID251 - seeded
import subprocess
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Self

from slurmbridge.pool import keys
from tests.support.kube_api import KubeError
from tests.support.slurm import SlurmError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.chaos.ground import Ground
    from tests.support.chaos.judge import Causes

PLANNED, REACTIVE = "default", "reactive"
LOST = (OSError, HTTPException, KubeError, SlurmError, subprocess.TimeoutExpired)
"""What a peer that is away answers."""


@dataclass
class Load:
    """A context manager; `done` counts what was done."""

    ground: Ground
    causes: Causes
    seed: int
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(work, pause, i), name=work.__name__)
            for i, (work, pause) in enumerate(
                ((self.pods, 0.5), (self.gangs, 4.0), (self.native, 0.7))
            )
        ]
        self._number = 0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, work: Callable[[random.Random], None], pause_s: float, number: int) -> None:
        luck = random.Random(f"{self.seed}/{number}")
        while not self._end.wait(pause_s * luck.uniform(0.2, 1.8)):
            try:
                work(luck)
            except LOST:
                self.done["not taken"] += 1

    def pods(self, luck: random.Random) -> None:
        """A pod more, or one less."""
        living = self.living()
        is_full = len(living) >= self.ground.most_pods
        if is_full and luck.random() < 0.8:
            return
        if is_full or (living and luck.random() < 0.1):
            one = luck.choice(living)
            gang, dash, _ = one["metadata"]["name"].partition("-")
            for item in living if dash else [one]:
                # A gang that has lost a member before it began would wait for it for ever.
                if not dash or item["metadata"]["name"].startswith(f"{gang}-"):
                    self.delete(item, luck)
            return
        self._number += 1
        runs = luck.choice((2, 4, 8, 12, 25))
        body = self.ground.pod(
            f"p{self._number}",
            luck.choice((1, 1, 2, 3, 4)),
            luck.choice((PLANNED, REACTIVE)),
            {},
            run_s=runs,
            stop_s=luck.choice((0.2, 1, 3)),
        )
        self.ground.kube.api.create(body)
        self.done["pod"] += 1

    def gangs(self, luck: random.Random) -> None:
        """A gang of pods that start together."""
        if len(self.living()) >= self.ground.most_pods:
            return
        self._number += 1
        name, size = f"g{self._number}", luck.choice((2, 3, 4))
        gpus, runs = luck.choice((1, 2, 4)), luck.choice((4, 8, 12))
        for rank in range(size):
            notes = {keys.GROUP: name, keys.GROUP_SIZE: str(size), keys.RANK: str(rank)}
            body = self.ground.pod(f"{name}-{rank}", gpus, PLANNED, notes, run_s=runs, stop_s=0.2)
            self.ground.kube.api.create(body)
        self.done["gang"] += 1

    def native(self, luck: random.Random) -> None:
        """A native job more; sometimes one is cancelled by its user."""
        slurm = self.ground.slurm
        own = slurm.run("squeue", "-h", "-u", "nobody", "-o", "%A", timeout_s=5).split()
        is_full = len(own) >= self.ground.most_jobs
        if is_full and luck.random() < 0.9:
            return
        if is_full or (own and luck.random() < 0.05):
            slurm.run("scancel", luck.choice(own), timeout_s=5)
            self.done["native cancelled"] += 1
            return
        gpus = luck.choice((1, 1, 2, 2, 4, 8))
        self.ground.native(gpus, luck.choice((2, 5, 9, 14)))
        self.done["native"] += 1

    def living(self) -> list[dict[str, Any]]:
        """Pods of the load that have not ended; those that have are cleared away."""
        living = []
        for item in self.ground.kube.api.items("/api/v1/pods"):
            if item["metadata"]["namespace"] not in (PLANNED, REACTIVE):
                continue
            if item["status"].get("phase") in ("Succeeded", "Failed"):
                self.causes.deleted.add(item["metadata"]["uid"])
                with contextlib.suppress(*LOST):
                    self.ground.kube.api.delete(path_of(item))
            elif not item["metadata"].get("deletionTimestamp"):
                living.append(item)
        return living

    def delete(self, item: dict[str, Any], luck: random.Random) -> None:
        """Delete a pod, one in eight by force."""
        self.causes.deleted.add(item["metadata"]["uid"])
        by_force = luck.random() < 0.125
        self.ground.kube.api.delete(path_of(item), grace_s=0 if by_force else None)
        self.done["pod deleted by force" if by_force else "pod deleted"] += 1


def path_of(item: dict[str, Any]) -> str:
    """Path of a pod."""
    meta = item["metadata"]
    return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
