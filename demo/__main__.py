"""The story of `make demo`, on real daemons; only GPUs and kubelets are played.

Its last line is one JSON object; it exits with 1 if a promise was broken, and leaves nothing
running.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from demo.screen import Screen
from tests.support import binaries
from tests.support.cluster import Cluster
from tests.support.kube_objects import pod
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

NODES, GPUS = 8, 8
PODS = "/api/v1/namespaces/default/pods"


class Story:
    """One run: what happens, told and checked."""

    def __init__(self, cluster: Cluster, product: Product, screen: Screen) -> None:
        self.cluster = cluster
        self.product = product
        self.screen = screen
        self.jobs: list[int] = []
        self.bound: set[str] = set()
        self.broken: list[str] = []

    def tell(self) -> None:
        """All acts, in order."""
        self.mixed_pool()
        self.planned_job()
        self.release()

    def mixed_pool(self) -> None:
        """Pods and native jobs arrive together, and share nodes GPU by GPU."""
        self.screen.act("Researchers and product teams arrive at the same moment")
        self.screen.say("20 jobs by sbatch (1 or 2 GPUs), 20 pods by the API server (1 or 2 GPUs)")
        api = self.cluster.kube.api
        for i in range(20):
            self._submit(f"--gres=gpu:{1 + i % 2}", "--time=10", seconds=30)
            api.create(pod(f"train-{i}", gpus=1 + i % 2, run_s=40 if i % 3 else 20))
        self._until("every pod is bound", lambda: self._count_bound("train") == 20, 30)
        self._until("every job runs", lambda: self._running(self.jobs) == 20, 30)
        self.screen.pool(self._pool())
        row = self._pool()[0]
        self.screen.say(f"`slurmbridge who {row['node']}` tells who owns what:")
        for gpu in self.product.cli("who", row["node"])["gpus"]:
            owner = gpu["pod"] or (f"job {gpu['jobId']} of {gpu['user']}" if gpu["jobId"] else "")
            self.screen.say(f"  GPU {gpu['gpu']}: {gpu['state']:<8} {owner}")

    def planned_job(self) -> None:
        """A big job is planned; what would delay it waits, what fits in before it runs."""
        self.screen.act("A researcher asks for all 8 nodes; Slurm's backfill plans the job")
        big = self._submit("--gres=gpu:8", f"--nodes={NODES}", "--time=5", seconds=6)
        self._until("Slurm has planned it", lambda: self._planned_start(big), 30)
        self.screen.say(f"job {big} is planned for {self._planned_start(big)}")
        node = self.cluster.slurm.node_names[0]
        self._until(
            "the bridge knows the plan", lambda: self.product.cli("who", node)["planStart"], 15
        )
        api = self.cluster.kube.api
        api.create(pod("service", gpus=1))
        short = {"slurmbridge.dev/duration": "20s"}
        api.create(pod("quick", gpus=1, run_s=5, annotations=short))
        self.screen.say("two pods come: `service` says no duration, `quick` says 20 s")
        self._until("quick is bound", lambda: self._count_bound("quick") == 1, 20)
        self._until("service is refused", lambda: "slurmbridge" in self._condition("service"), 20)
        waits = self.product.cli("explain", "default/service")["waits"]
        self.screen.say(f"service waits: {waits['text']}")
        for group in waits["nodes"].values():
            self.screen.say(f"  {group['count']} nodes: {group['text']}")
        if self._count_bound("service"):
            self.broken.append("a pod was bound into the plan of a native job")
        self.screen.pool(self._pool())
        self._until(
            "the big job runs, at its planned time or before", lambda: self._is_running(big), 150
        )
        self.screen.pool(self._pool())
        self._until("then service is bound", lambda: self._count_bound("service") == 1, 60)

    def release(self) -> None:
        """Slurm ends a claim: the pod is told and evicted."""
        self.screen.act("An administrator cancels the claim of a pod")
        claim = self._annotation("service", "slurmbridge.dev/claim").partition("/")[0]
        self.screen.say(f"scancel {claim}")
        self.cluster.slurm.run("scancel", claim)
        path = f"{PODS}/service"
        self._until("service is evicted", lambda: self.cluster.kube.api.find(path) is None, 30)
        api = self.cluster.kube.api
        for item in api.items(PODS):
            api.delete(f"{PODS}/{item['metadata']['name']}")
        self._until("all GPUs are free again", lambda: self._free() == NODES * GPUS, 60)
        self.screen.pool(self._pool())

    # What is looked at.

    def _submit(self, *options: str, seconds: int) -> int:
        done = self.cluster.slurm.run(
            *("sbatch", "--parsable", "--output=/dev/null", "--chdir=/", "--mem=100", *options),
            f"--wrap=exec sleep {seconds}",
        )
        self.jobs.append(int(done.strip()))
        return self.jobs[-1]

    def _until(self, what: str, ready: Callable[[], Any], timeout_s: float) -> None:
        began = time.monotonic()
        while not ready():
            if time.monotonic() - began > timeout_s:
                self.broken.append(f"not within {timeout_s:g} s: {what}")
                raise TimeoutError(what)
            self.screen.wait(what, time.monotonic() - began)
            time.sleep(0.2)
        self.screen.done(what, time.monotonic() - began)

    def _count_bound(self, prefix: str) -> int:
        found = [
            p["metadata"]["name"]
            for p in self.cluster.kube.api.items(PODS)
            if p["spec"].get("nodeName")
        ]
        self.bound.update(found)
        return sum(name.startswith(prefix) for name in found)

    def _running(self, jobs: list[int]) -> int:
        text = self.cluster.slurm.run("squeue", "-h", "--states=R", "--format=%A")
        return len({int(line) for line in text.split()} & set(jobs))

    def _is_running(self, job: int) -> bool:
        return self.cluster.slurm.job_field(job, "JobState") in ("RUNNING", "COMPLETED")

    def _planned_start(self, job: int) -> str:
        text = self.cluster.slurm.run("squeue", "-h", f"--jobs={job}", "--format=%S %Y").split()
        return text[0] if len(text) == 2 and text[1] != "(null)" else ""

    def _condition(self, name: str) -> str:
        item = self.cluster.kube.api.get(f"{PODS}/{name}")
        texts = [c.get("message", "") for c in item["status"].get("conditions", [])]
        return " ".join(texts)

    def _annotation(self, name: str, key: str) -> str:
        return str(self.cluster.kube.api.get(f"{PODS}/{name}")["metadata"]["annotations"][key])

    def _free(self) -> int:
        return int(self.product.cli("status")["gpus"]["free"])

    def _pool(self) -> list[dict[str, Any]]:
        """Rows of the pool as slurmctld and the API server tell it, read without our code."""
        sample = self.cluster.checker.sample()
        claims = {
            int(line)
            for line in self.cluster.slurm.run(
                "squeue", "-h", "--name=slurmbridge-demo", "--format=%A"
            ).split()
        }
        rows = []
        for node in self.cluster.slurm.node_names:
            letters = ""
            for index in range(GPUS):
                owners = sample.owners.get((node, index), ())
                letters += "." if not owners else "P" if owners[0] in claims else "J"
            rows.append({"node": node, "gpus": letters})
        return rows


def main() -> int:
    """Run the demo."""
    screen = Screen()
    screen.act(f"One pool: {NODES} nodes with {GPUS} GPUs each")
    screen.say("building the control plane of Kubernetes first, if it is not built yet")
    binaries.command("kube-apiserver")
    began = time.monotonic()
    cluster = Cluster(SlurmConfig(nodes=NODES, gpus_per_node=GPUS), scheduler=False)
    policy = {"cluster": "demo", "graceMinutes": 0}
    broken: list[str] = []
    with cluster:
        screen.done(
            "etcd, kube-apiserver, munged, slurmctld and slurmds run", time.monotonic() - began
        )
        with Product(cluster, policy=policy) as product:
            screen.done("bridge, extender and a stock kube-scheduler run", time.monotonic() - began)
            story = Story(cluster, product, screen)
            with cluster.checker.watch(0.5) as watch:
                try:
                    story.tell()
                except Exception as error:  # the story ends, the verdict is still told
                    story.broken.append(f"{type(error).__name__}: {error}")
            broken = story.broken + [str(seen.violation) for seen in watch.double_owned]
            screen.act("The verdict of a checker that read only slurmctld and the API server")
            for text in broken:
                screen.say(f"BROKEN: {text}")
            if not broken:
                screen.say(f"{len(watch.samples)} samples: no GPU ever had two owners")
            result = {
                "gpus": NODES * GPUS,
                "native_jobs": len(story.jobs),
                "pods_bound": len(story.bound),
                "samples": len(watch.samples),
                "double_owned": len(watch.double_owned),
                "seconds": round(time.monotonic() - began, 1),
            }
    screen.say("everything is stopped again")
    print(json.dumps(result), flush=True)
    return 1 if broken or not result["samples"] else 0


if __name__ == "__main__":
    sys.exit(main())
