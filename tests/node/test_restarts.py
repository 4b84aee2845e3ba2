"""Parts of a node are killed and started again while its kubelet admits pods."""

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.node_checker import NodeChecker
from tests.support.node_pool import Claimed, NodePool, unique, wait

NODE = "gpu002"
GPUS = 7
"""Of a native job: a shell has seven file numbers to lock them with."""
BINDS = 100
FIRST = 10
"""So many run before the kubelet is killed, and must go on."""
KUBELETS_OWN = ("context canceled", "start failed: : signal: killed", "no healthy devices present")


def why(pool, name):
    """What the status of a pod says of its end."""
    status = pool.get(name)["status"]
    containers = [c.get("state") for c in status.get("containerStatuses", ())]
    return f"{status.get('reason', '')}: {status.get('message', '')} {json.dumps(containers)}"


def phases_of(pool, phase):
    return [p["metadata"]["name"] for p in pool.pods() if p["status"].get("phase") == phase]


def alive(pool):
    return phases_of(pool, "Running")


def test_100_binds_at_once_with_restarts_in_the_middle_give_no_wrong_device(figures):
    with NodePool(nodes=1, gpus=BINDS, releaser=False, slurm_config={"cpus": 256}) as pool:
        node, name = pool.node["gpu001"], "gpu001"
        claims: list[Claimed] = []
        safe: set[str] = set()
        lost: list[str] = []
        for _ in range(BINDS):
            body = pool.pod(unique("burst"), 1, every=2.0)
            uid = pool.kube.api.create(body)["metadata"]["uid"]
            ref = f"default/{body['metadata']['name']}"
            claims.append(pool.claim(name, 1, uid, ref))
        pool.claims = {claim.name: claim for claim in claims}

        def say(what):
            phases = Counter(p["status"].get("phase") for p in pool.pods())
            print(f"{what}: {dict(phases)}")

        def restart():
            # In order: a crash in this moment loses the pods that are being admitted.
            pool.restart_agent(name)
            wait(lambda: pool.is_registered(name), 30, "registered")
            say("agent restarted")
            wait(lambda: len(alive(pool)) >= FIRST, 150, f"{FIRST} pods run", say, "too few")
            lost.extend(why(pool, one) for one in phases_of(pool, "Failed"))
            safe.update(alive(pool))
            node.kill9_kubelet()
            node.start_kubelet()
            # The kubelet admits all pods anew, and fails those whose plugin is not there yet.
            wait(lambda: pool.snapshot(name)["registrations"] > 1, 60, "registered again")
            say("kubelet restarted")

        with NodeChecker(pool, every_s=0.25) as checker, ThreadPoolExecutor(25) as threads:
            list(threads.map(pool.bind, claims))
            bound = time.monotonic()
            # Now: the bridge binds nothing more to a node whose agent has said that it leaves.
            restarter = threading.Thread(target=restart)
            restarter.start()

            def settled():
                phases = [p["status"].get("phase") for p in pool.pods()]
                return all(phase in ("Running", "Failed", "Succeeded") for phase in phases)

            wait(settled, 300, "every pod runs or failed", lambda: str(pool.pods())[:2000])
            restarter.join()
            took = time.monotonic() - bound
            checker.sample()
        failed = [p["metadata"]["name"] for p in pool.pods() if p["status"]["phase"] == "Failed"]
        reasons = [why(pool, one) for one in failed]
        ran = [c for c in claims if (pool.marks / "start" / c.name).exists()]
        figures.count(
            starts=len(ran),
            samples=checker.samples,
            wrong=len(checker.wrong),
            overlaps=len(checker.overlaps) + len(pool.overlaps()),
        )
        print(f"{len(ran)} of {BINDS} ran {took:.0f} s after the binds; failed: {reasons[:3]}")
        assert checker.wrong == []
        assert checker.overlaps == []
        assert pool.overlaps() == []
        for claim in ran:
            given = (pool.marks / "start" / claim.name).read_text().split()
            assert given == [pool.uuid(name, i) for i in claim.gpus]
        # What a killed kubelet does to pods that it had admitted and not started yet, with any plugin:
        # it takes a container's start with it, or admits all of them anew before one can register.
        assert all(any(known in text for known in KUBELETS_OWN) for text in reasons), reasons
        assert len(ran) + len(failed) >= BINDS
        # A restart of the agent in order costs nobody anything; one of the kubelet none that ran.
        assert lost == []
        assert len(safe) >= FIRST
        assert safe.isdisjoint(failed), (safe & set(failed), reasons)
        wait(lambda: pool.is_registered(name), 30, "registered at last")
        # One may have started its process, and been told of that too late.
        running = {f"default/{c.name}" for c in ran if c.name not in failed}
        told = lambda: {p["ref"] for p in pool.snapshot(name)["report"]["pods"]}  # noqa: E731
        wait(lambda: running <= told(), 20, "the agent tells of all of them", told)
        # And it goes on: the next pod gets the device of its claim.
        pool.wait_gpus(name)
        for one in failed:
            pool.delete(one, grace_s=0)
        one = claims[0]
        pool.delete(one.name)
        wait(lambda: pool.get(one.name) is None, 30, "the first is gone")
        pool.slurm.run("scancel", str(one.job_id))
        placed = []
        body = pool.pod(unique("next"), 1)
        wait(lambda: placed.append(pool.place(body, name)) or placed[-1], 60, "room for the next")
        pool.wait_running(placed[-1].name, 60)
        given = (pool.marks / "start" / placed[-1].name).read_text().split()
        assert given == [pool.uuid(name, i) for i in placed[-1].gpus]


def _containerd(pool):
    pool.node[NODE].kill9_containerd()
    pool.node[NODE].start_containerd()


def _slurmd(pool):
    pool.slurm.kill9_slurmd(NODE)
    pool.slurm.start_slurmd(NODE)


def _agent(pool):
    pool.kill9_agent(NODE)
    pool.start_agent(NODE)


KILLED = {
    # What a dead plugin costs: the pod that is in its hands, and those that come before its return.
    # Never one that is bound once the agent is registered again; the others cost nothing at all.
    "agent": (_agent, ("rpc error", *KUBELETS_OWN)),
    "containerd": (_containerd, ()),
    "slurmd": (_slurmd, ()),
}


@pytest.mark.parametrize("part", KILLED)
def test_a_part_killed_in_the_middle_of_admissions_gives_no_wrong_device(pool, figures, part):
    restart, costs = KILLED[part]
    wait(lambda: pool.is_registered(NODE), 60, "registered")
    pool.wait_gpus(NODE)
    wait(lambda: not pool.pods(), 60, "the node is empty")
    with NodeChecker(pool, every_s=0.25) as checker:
        bodies = [pool.pod(unique(f"killed-{part}"), 1) for _ in range(8)]
        names = [body["metadata"]["name"] for body in bodies]
        uids = [pool.kube.api.create(body)["metadata"]["uid"] for body in bodies]
        # All claims first: Slurm gives nothing on a node where one is ending.
        placed = []

        def claim(name, uid):
            one = pool.claim(NODE, 1, uid, f"default/{name}")
            if one is not None:
                placed.append(one)
            return one is not None

        for name, uid in zip(names, uids, strict=True):
            wait(lambda name=name, uid=uid: claim(name, uid), 60, "room")
        pool.claims.update(zip(names, placed, strict=True))
        for claim in placed[:4]:
            pool.bind(claim)
        restart(pool)
        # As the bridge does: none is bound to a node whose agent is not registered.
        wait(lambda: pool.is_registered(NODE), 30, "registered")
        for claim in placed[4:]:
            pool.bind(claim)

        def settled():
            return all(pool.phase(name) in ("Running", "Failed") for name in names)

        wait(settled, 120, "every pod runs or failed", lambda: str(pool.pods())[:2000])
        checker.sample()
    failed = [name for name in names if pool.phase(name) == "Failed"]
    reasons = [why(pool, name) for name in failed]
    figures.count(
        starts=8 - len(failed),
        samples=checker.samples,
        wrong=len(checker.wrong),
        overlaps=len(checker.overlaps) + len(pool.overlaps()),
    )
    print(f"{part}: failed {reasons}")
    assert checker.wrong == []
    assert checker.overlaps == []
    assert pool.overlaps() == []
    assert all(any(known in text for known in costs) for text in reasons), reasons
    assert not {claim.name for claim in placed[4:]} & set(failed), reasons
    for claim in placed:
        if claim.name not in failed:
            given = (pool.marks / "start" / claim.name).read_text().split()
            assert given == [pool.uuid(NODE, i) for i in claim.gpus]
    for name in names:
        pool.delete(name, grace_s=1)
    wait(lambda: not pool.pods(), 60, "all are gone")


def test_the_agent_registers_again_with_every_return_of_the_kubelet(pool):
    for _ in range(2):
        count = pool.snapshot(NODE)["registrations"]
        pool.node[NODE].kill9_kubelet()
        pool.node[NODE].start_kubelet()
        wait(lambda c=count: pool.snapshot(NODE)["registrations"] > c, 30, "registered again")
        wait(lambda: pool.is_registered(NODE), 30, "registered")
        socket = (pool.node[NODE].plugins / "kubelet.sock").stat().st_ctime
        ours = max(p.stat().st_ctime for p in pool.node[NODE].plugins.glob("slurmbridge-*.sock"))
        print(f"our socket {(ours - socket) * 1000:.0f} ms after kubelet.sock")
    pool.wait_gpus(NODE)


def reboot(pool, boot_id):
    """The power of the node fails, and comes back: nothing of /run is left."""
    node = pool.node[NODE]
    pool.kill9_agent(NODE)
    pool.slurm.kill9_slurmd(NODE)
    node.power_off()
    for left in ("node.json", "node.sock", "hooks.json"):
        (pool.run_folder(NODE) / left).unlink(missing_ok=True)
    node.set_boot_id(boot_id)
    node.start_containerd()
    pool.slurm.start_slurmd(NODE)
    node.start_kubelet()
    # The agent is a pod of the node, and comes after its kubelet.
    pool.start_agent(NODE)


def test_a_reboot_in_the_middle_of_admissions_gives_no_wrong_device_and_frees_nothing_early(
    pool, figures
):
    wait(lambda: pool.is_registered(NODE), 60, "registered")
    pool.wait_gpus(NODE)
    wait(lambda: not pool.pods(), 60, "the node is empty")
    found = len(pool.overlaps())
    with NodeChecker(pool, every_s=0.25) as checker:
        names = []
        for _ in range(3):
            name = unique("ran")
            body = pool.pod(name, 1, ignore_term=True)
            wait(lambda body=body: pool.place(body, NODE), 60, "room")
            names.append(name)
        for name in names:
            pool.wait_running(name)
        claims = []
        for _ in range(4):
            name = unique("admitted")
            uid = pool.kube.api.create(pool.pod(name, 1))["metadata"]["uid"]
            claims.append(pool.claim(NODE, 1, uid, f"default/{name}"))
            assert claims[-1] is not None
            pool.claims[name] = claims[-1]
            names.append(name)
        for claim in claims:
            pool.bind(claim)
        # They wait for all of them: none may start beside what is left of a pod.
        job = pool.native(GPUS, node=NODE, run_s=0.2)
        reboot(pool, "22222222-3333-4444-8555-666666666666")
        wait(lambda: pool.is_registered(NODE), 60, "registered")
        pool.wait_gpus(NODE)

        def settled():
            return all(pool.phase(name) in ("Running", "Failed", "") for name in names)

        wait(settled, 120, "every pod runs or failed", lambda: str(pool.pods())[:2000])
        checker.sample()
        for claim in claims:
            if pool.phase(claim.name) == "Running":
                given = (pool.marks / "start" / claim.name).read_text().split()
                assert given == [pool.uuid(NODE, i) for i in claim.gpus]
        for name in names:
            pool.delete(name, grace_s=1)
        start = pool.marks / "start" / f"job-{job}"
        wait(start.exists, 120, "the native job at last", lambda: pool.slurm.run("squeue"))
        wait(lambda: pool.job_state(job) != "RUNNING", 30, "its end")
        # And the node works as before: the next pods have the devices of their claims.
        after = [unique("after") for _ in range(4)]
        for name in after:
            wait(lambda n=name: pool.place(pool.pod(n, 2), NODE), 60, "room for the next")
        for name in after:
            pool.wait_running(name, 60)
            given = (pool.marks / "start" / name).read_text().split()
            assert given == [pool.uuid(NODE, i) for i in pool.claims[name].gpus]
        checker.sample()
    figures.count(
        starts=8,
        samples=checker.samples,
        wrong=len(checker.wrong),
        overlaps=len(checker.overlaps) + len(pool.overlaps()) - found,
    )
    assert checker.wrong == []
    assert checker.overlaps == []
    assert pool.overlaps()[found:] == []
    assert len(checker.pods_seen) >= 7
    for name in after:
        pool.delete(name, grace_s=1)
    wait(lambda: not pool.pods(), 60, "all are gone")
