"""Native jobs and pods, thrown at the same GPUs together."""

import random  # noqa: TID251 - seeded
import time

import pytest

from tests.support.node_checker import NodeChecker
from tests.support.node_pool import unique

STARTS = 300
LONGEST_S = 600
"""Two minutes on a machine of its own."""


@pytest.mark.timeout(LONGEST_S + 60)
def test_in_a_storm_each_gpu_has_one_owner_and_each_pod_its_claims_devices(pool, figures):
    rng = random.Random(5)
    todo = [("pod", rng.randint(1, 4)) for _ in range(STARTS // 2)]
    todo += [("job", rng.randint(1, 4)) for _ in range(STARTS - STARTS // 2)]
    rng.shuffle(todo)
    before = len(pool.overlaps())
    pods, jobs, alive = [], [], {}
    with NodeChecker(pool) as checker:
        deadline = time.monotonic() + LONGEST_S
        while todo or alive:
            assert time.monotonic() < deadline, (len(todo), alive, pool.slurm.run("squeue"))
            for name in list(alive):
                # A pod ends by itself, by delete, or by force while it ignores SIGTERM.
                kind, run_s, ends = alive[name]
                phase = pool.phase(name)
                if phase == "Failed":
                    raise AssertionError(pool.get(name)["status"])
                if kind == "self" and phase == "Succeeded":
                    pool.delete(name)
                    del alive[name]
                elif kind != "self" and ends is None:
                    if (pool.marks / "start" / name).exists():
                        alive[name] = (kind, run_s, time.monotonic() + run_s)
                elif kind != "self" and time.monotonic() > ends:
                    pool.delete(name, grace_s=0 if kind == "force" else None)
                    del alive[name]
            waiting = pool.slurm.run("squeue", "-h", "-t", "PD", "-o", "%i").split()
            while todo and todo[0][0] == "job" and len(waiting) < 4:
                _, gpus = todo.pop(0)
                jobs.append(pool.native(gpus, run_s=rng.uniform(0.1, 1.0)))
                waiting.append(jobs[-1])
            if todo and todo[0][0] == "pod":
                kind = rng.choice(["self", "self", "delete", "force"])
                name = unique(kind)
                run_s = rng.uniform(0.2, 1.5)
                body = pool.pod(
                    name,
                    todo[0][1],
                    run_s=run_s if kind == "self" else None,
                    ignore_term=kind == "force",
                    grace_s=1,
                )
                claim = pool.place(body, rng.choice(pool.names))
                if claim is not None:
                    todo.pop(0)
                    pods.append(name)
                    alive[name] = (kind, run_s, None)
            time.sleep(0.05)
        while pool.slurm.run("squeue", "-h", "-t", "PD,R,CG", "-o", "%i").split():
            assert time.monotonic() < deadline, pool.slurm.run("squeue")
            time.sleep(0.1)
    started = [name for name in pods if (pool.marks / "start" / name).exists()]
    ran = [job for job in jobs if (pool.marks / "start" / f"job-{job}").exists()]
    found = pool.overlaps()[before:]
    figures.count(
        starts=len(started) + len(ran),
        samples=checker.samples,
        wrong=len(checker.wrong),
        overlaps=len(checker.overlaps) + len(found),
    )
    assert checker.wrong == []
    assert checker.overlaps == []
    assert found == []
    assert len(ran) == len(jobs)
    assert len(started) == len(pods)
    assert checker.samples > 500
    assert checker.tables > checker.samples / 2, "the kubelets' tables were not read"
    assert len(checker.pods_seen) >= 0.8 * len(pods)
