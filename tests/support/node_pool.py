"""Two worlds on the same nodes: a real Slurm, real kubelets, the product's agent, and claims.

What the bridge would do is done here by hand (`bind`: salloc, then a Binding with the claim's
annotations; a releaser that ends a claim as soon as its pod is gone from the API), so that a test
shows what the node alone guarantees: the releaser is as hasty as can be.

Every process that has a GPU, pod or native job, holds an exclusive lock (flock) on a file of that
GPU, taken without waiting: whoever does not get it at once has found an overlap, exactly, and says
so. The kernel lets go of the lock with the last process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.support.kube import KubeCluster, KubeError
from tests.support.node import RealNode
from tests.support.node_image import IMAGE
from tests.support.slurm import SlurmCluster, SlurmConfig

if TYPE_CHECKING:
    pass

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurmbridge/node/slurm_script.py"
CLUSTER = "lab"
RESOURCE = "nvidia.com/gpu"

LOCK = """\
umask 0
n=3
for u in $GPUS; do
  eval "exec $n>$M/lock/$u"
  if flock -n $n; then echo "$NAME" > "$M/lock/$u.by"; else
    read by < "$M/lock/$u.by"; echo "$NAME $u $by" >> $M/overlap
  fi
  n=$((n+1))
done
echo "$GPUS" > $M/start/$NAME
"""
BEAT = 'while :; do echo > $M/beat/$NAME; sleep "$EVERY"; done'


@dataclass
class Claimed:
    """A pod with its claim."""

    name: str
    uid: str
    node: str
    job_id: int
    gpus: tuple[int, ...]
    namespace: str = "default"


@dataclass
class NodePool:
    """The nodes between `start` and `stop` (or as a context manager).

    hold: False takes the Epilog's hold out. agents: False starts none. node_config: more of the
    `node` section. sections: more of the agents' configuration. entry, agent_env: the module that
    runs as agent, and more of its environment ({} is replaced by the node's name). hooks: more of the
    hooks' configuration.
    """

    nodes: int = 2
    gpus: int = 8
    hold: bool = True
    agents: bool = True
    releaser: bool = True
    node_config: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    entry: str = "slurmbridge"
    agent_env: dict[str, str] = field(default_factory=dict)
    hooks: dict[str, Any] = field(default_factory=dict)
    slurm_config: dict[str, Any] = field(default_factory=dict)

    def start(self) -> Self:
        """Start everything; about 6 s."""
        self._stack = contextlib.ExitStack()
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def stop(self) -> None:
        """End everything."""
        self._stop.set()
        self._stack.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        self._stop = threading.Event()
        self.claims: dict[str, Claimed] = {}
        self._lock = threading.Lock()
        self.kube = self._stack.enter_context(KubeCluster(api_args=("--allow-privileged=true",)))
        self.slurm = SlurmCluster(
            SlurmConfig(nodes=self.nodes, gpus_per_node=self.gpus, **self.slurm_config)
        )
        self._stack.enter_context(self.slurm)
        self.names = self.slurm.node_names
        # Device files: real character devices, so that a runtime can make them in containers.
        for index in range(self.gpus):
            path = self.device(index)
            path.unlink()
            os.mknod(path, 0o20666, os.makedev(195, index))
        self.marks = self.slurm.dir / "marks"
        for name in ("lock", "start", "beat"):
            (self.marks / name).mkdir(parents=True)
            (self.marks / name).chmod(0o777)
        self.marks.chmod(0o777)
        self.node = {name: RealNode(self.kube, name) for name in self.names}
        self._write_hooks()
        self.slurm.reconfigure(epilog=str(self._hook("epilog")), prolog=str(self._hook("prolog")))
        self.slurm.wait_nodes()
        for node in self.node.values():
            self._stack.enter_context(node)
        if self.agents:
            for name in self.names:
                self.start_agent(name)
            for name in self.names:
                self.wait_gpus(name)
        if self.releaser:
            thread = threading.Thread(target=self._release, daemon=True)
            thread.start()
            self._stack.callback(thread.join, 10)
            self._stack.callback(self._stop.set)
        self.slurm.wait_scheduling()

    # Places

    def device(self, index: int) -> Path:
        """Device file of a GPU; the nodes share them."""
        return self.slurm.dir / "dev" / f"nvidia{index}"

    def uuid(self, node: str, index: int) -> str:
        """UUID of a GPU."""
        return f"GPU-{node}-{index}"

    def run_folder(self, node: str) -> Path:
        """The agent's folder."""
        return self.slurm.dir / f"run-{node}"

    def _hook(self, name: str) -> Path:
        return self.slurm.dir / f"{name}.sh"

    def _write_hooks(self) -> None:
        for name in self.names:
            self.run_folder(name).mkdir()
            gpus = [
                {"uuid": self.uuid(name, i), "minor": i, "path": str(self.device(i))}
                for i in range(self.gpus)
            ]
            (self.run_folder(name) / "devices.json").write_text(json.dumps({"gpus": gpus}))
            hooks = {
                "socket": f"{self.run_folder(name)}/node.sock",
                "state": f"{self.run_folder(name)}/node.json",
                "cluster": CLUSTER,
                "owner_uids": [os.getuid()],
                "cgroup_root": self.node[name].cgroup_root,
                **self.hooks,
            }
            self._hooks_conf(name).write_text(json.dumps(hooks))
        for hook in ("epilog", "prolog"):
            path = self._hook(hook)
            command = f"exec {sys.executable} -I -S {SCRIPT} {hook}"
            lines = [
                "#!/bin/sh",
                f"export SLURM_CONF={self.slurm.conf_path} PATH={os.environ['PATH']}",
                f"export SLURMBRIDGE_HOOKS={self.slurm.dir}/run-$SLURMD_NODENAME/hooks-test.json",
                command if self.hold else "exit 0",
            ]
            path.write_text("\n".join(lines) + "\n")
            path.chmod(0o755)

    def _hooks_conf(self, node: str) -> Path:
        return self.run_folder(node) / "hooks-test.json"

    @contextlib.contextmanager
    def other_hooks(self, node: str, **more: Any) -> Iterator[None]:
        """Epilog and Prolog of a node with another configuration."""
        text = self._hooks_conf(node).read_text()
        self._hooks_conf(node).write_text(json.dumps({**json.loads(text), **more}))
        try:
            yield
        finally:
            self._hooks_conf(node).write_text(text)

    # Agents

    def start_agent(self, node: str) -> None:
        """Start the product's agent on a node (in its mount namespace)."""
        real = self.node[node]
        config = {
            "apiVersion": "slurmbridge.dev/v1",
            "policy": {"cluster": CLUSTER, "granularity": "gpu", "resources": {RESOURCE: ""}},
            "slurm": {"conf": str(self.slurm.conf_path)},
            "kube": {"kubeconfig": str(self.kube.kubeconfig)},
            "node": {
                "name": node,
                "devices": f"{self.run_folder(node)}/devices.json",
                "gresConf": str(self.slurm.conf_path.with_name("gres.conf")),
                "run": str(self.run_folder(node)),
                "cgroupRoot": real.cgroup_root,
                "response": ["env", "devices"],
                "ownerUids": [os.getuid()],
                "lookS": 0.25,
                "listen": f"127.0.0.1:{real.port(2)}",
                **self.node_config,
            },
            **self.sections,
        }
        path = self.run_folder(node) / "config.yaml"
        path.write_text(json.dumps(config, indent=1))
        real.start_process(
            "agent",
            # Everything of a whole data centre runs on this machine, and a node's agent on each of
            # its nodes: it must not be kept from the kubelet by what is elsewhere.
            [
                *("nice", "-n", "-10"),
                *(sys.executable, "-m", self.entry, "node", "--config", str(path)),
            ],
            cwd=ROOT,
            env=os.environ
            | {"PATH": self.slurm.env()["PATH"]}
            | {k: v.format(node) for k, v in self.agent_env.items()},
        )

    def kill9_agent(self, node: str) -> None:
        """End the agent as a crash does."""
        self.node[node].kill9("agent")

    def restart_agent(self, node: str) -> None:
        """End the agent in order, as an update does, and start it again."""
        self.node[node].terminate("agent", 70.0)
        self.start_agent(node)

    def snapshot(self, node: str) -> dict[str, Any]:
        """What the agent knows (`/debug/snapshot`)."""
        from urllib.request import urlopen  # noqa: PLC0415

        url = f"http://127.0.0.1:{self.node[node].port(2)}/debug/snapshot"
        with urlopen(url, timeout=5) as answer:
            return json.load(answer)

    def is_registered(self, node: str) -> bool:
        """Whether the agent answers and the kubelet has taken it."""
        try:
            report = self.snapshot(node)["report"]
        except OSError:
            return False
        return bool(report and report["registered"])

    def metrics(self, node: str) -> str:
        """The agent's metrics as text."""
        from urllib.request import urlopen  # noqa: PLC0415

        with urlopen(f"http://127.0.0.1:{self.node[node].port(2)}/metrics", timeout=5) as answer:
            return answer.read().decode()

    def wait_gpus(self, node: str, timeout_s: float = 30.0) -> None:
        """Wait until all GPUs of the node can be given to pods.

        The API server alone does not tell: of an agent that is away it hears up to ten seconds later,
        and a pod that is bound meanwhile fails for good. The bridge asks the agent too.
        """
        for reached in (
            lambda: self.is_registered(node),
            lambda: self.node[node].allocatable() == self.gpus,
        ):
            wait(reached, timeout_s, f"GPUs of {node}")

    # Pods

    def pod(
        self,
        name: str,
        gpus: int,
        *,
        script: str = "",
        ignore_term: bool = False,
        run_s: float | None = None,
        grace_s: int = 5,
        every: float = 0.1,
        spec: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A pod that locks its GPUs and then beats, until it is ended or `run_s` has passed."""
        trap = "trap '' TERM" if ignore_term else "trap 'exit 0' TERM"
        end = BEAT if run_s is None else f"echo > $M/beat/$NAME; sleep {run_s:g} & wait $!; exit 0"
        body = (
            script
            or f'{trap}\nGPUS=$(IFS=,; set -- $NVIDIA_VISIBLE_DEVICES; echo "$@")\n{LOCK}{end}'
        )
        mounts = [{"name": "marks", "mountPath": "/m"}]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "schedulerName": "by-hand",
                "hostNetwork": True,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": grace_s,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "volumes": [{"name": "marks", "hostPath": {"path": str(self.marks)}}],
                "containers": [
                    {
                        "name": "main",
                        "image": IMAGE,
                        "imagePullPolicy": "Never",
                        "command": ["sh", "-c", body],
                        "env": [
                            {"name": "M", "value": "/m"},
                            {"name": "NAME", "value": name},
                            {"name": "EVERY", "value": f"{every:g}"},
                        ],
                        "volumeMounts": mounts,
                        "resources": {"limits": {RESOURCE: str(gpus)} if gpus else {}},
                    }
                ],
                **(spec or {}),
            },
        }

    def claim(
        self,
        node: str,
        gpus: int,
        uid: str,
        ref: str,
        minutes: int = 60,
        partition: str = "claims",
    ) -> Claimed | None:
        """A claim as the bridge makes it; None: refused."""
        done = self.slurm.run_raw(
            *("salloc", "--no-shell", "-I", "-p", partition, "-w", node, f"--gres=gpu:{gpus}"),
            *("--mem=100", f"--time={minutes}", "--priority=4294967000"),
            *("-J", f"slurmbridge-{CLUSTER}"),
            f"--comment=slurmbridge/1 cluster={CLUSTER} pod={uid} ref={ref}",
        )
        match = re.search(r"Granted job allocation (\d+)", done.stderr)
        if done.returncode or match is None:
            return None
        job_id = int(match[1])
        text = self.slurm.run("scontrol", "show", "job", "-d", "-o", str(job_id))
        found = re.search(r"GRES=gpu[^ ]*\(IDX:([0-9,-]+)\)", text)
        assert found, text
        return Claimed(ref.partition("/")[2], uid, node, job_id, tuple(sorted(indices(found[1]))))

    def bind(self, claim: Claimed) -> None:
        """Post the Binding with the claim's annotations, as the extender does."""
        notes = {
            "slurmbridge.dev/claim": f"{claim.job_id}/{claim.uid}",
            "slurmbridge.dev/gpus": ",".join(map(str, claim.gpus)),
        }
        self.kube.api.request(
            "POST",
            f"/api/v1/namespaces/default/pods/{claim.name}/binding",
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": claim.name, "uid": claim.uid, "annotations": notes},
                "target": {"apiVersion": "v1", "kind": "Node", "name": claim.node},
            },
        )

    def place(
        self, body: dict[str, Any], node: str, *, minutes: int = 60, partition: str = "claims"
    ) -> Claimed | None:
        """Create a pod, claim its GPUs, bind it; None: no room (the pod is deleted again)."""
        name = body["metadata"]["name"]
        limits = [c["resources"]["limits"] for c in body["spec"]["containers"]]
        gpus = sum(int(one.get(RESOURCE, 0)) for one in limits)
        init = [
            int(c["resources"]["limits"].get(RESOURCE, 0))
            for c in body["spec"].get("initContainers", ())
        ]
        gpus = max([gpus, *init])
        uid = self.kube.api.create(body)["metadata"]["uid"]
        claim = self.claim(node, gpus, uid, f"default/{name}", minutes, partition)
        if claim is None:
            self.delete(name, grace_s=0)
            return None
        with self._lock:
            self.claims[name] = claim
        self.bind(claim)
        return claim

    def get(self, name: str) -> dict[str, Any] | None:
        """The pod, None: there is none."""
        return self.kube.api.find(f"/api/v1/namespaces/default/pods/{name}")

    def pods(self) -> list[dict[str, Any]]:
        """All pods of the tests."""
        return list(self.kube.api.items("/api/v1/namespaces/default/pods"))

    def phase(self, name: str) -> str:
        """Phase of a pod; "" when there is none."""
        found = self.get(name)
        return "" if found is None else found["status"].get("phase", "")

    def delete(self, name: str, *, grace_s: int | None = None) -> None:
        """Delete a pod; grace_s 0: by force."""
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        with contextlib.suppress(KubeError):
            self.kube.api.request("DELETE", f"/api/v1/namespaces/default/pods/{name}", body)

    def wait_running(self, name: str, timeout_s: float = 20.0) -> None:
        """Wait until a pod's process has started (it has written its mark)."""
        mark = self.marks / "start" / name
        wait(
            mark.exists, timeout_s, f"start of {name}", lambda: (self.get(name) or {}).get("status")
        )

    def started(self, name: str) -> float:
        """When a pod or job has started: seconds, by its mark."""
        return (self.marks / "start" / name).stat().st_mtime

    def last_beat(self, name: str) -> float:
        """The last moment at which a pod was seen alive by its mark."""
        return (self.marks / "beat" / name).stat().st_mtime

    def overlaps(self) -> list[str]:
        """`name GPU owner` of everyone who found a GPU taken, and who took it last."""
        path = self.marks / "overlap"
        return path.read_text().splitlines() if path.exists() else []

    def pod_pids(self, node: str, uid: str) -> list[int]:
        """Processes of a pod."""
        found = []
        for pid in self.node[node].cgroup_pids():
            with contextlib.suppress(OSError):
                if f"pod{uid}" in Path(f"/proc/{pid}/cgroup").read_text():
                    found.append(pid)
        return found

    # Native jobs

    def native(
        self,
        gpus: int,
        *,
        node: str = "",
        run_s: float = 1.0,
        partition: str = "main",
        options: tuple[str, ...] = (),
        user: str | None = None,
        timeout_s: float = 60.0,
    ) -> int:
        """Submit a native job that locks its GPUs for `run_s`; its job id. Its name is `job-<id>`."""
        script = (
            "#!/bin/bash\n"
            f"M={self.marks}; NAME=job-$SLURM_JOB_ID\n"
            'GPUS=$(for i in ${SLURM_JOB_GPUS//,/ }; do echo -n "GPU-$SLURMD_NODENAME-$i "; done)\n'
            f"{LOCK}sleep {run_s:g}\n"
        )
        where = ("-w", node) if node else ()
        text = self.slurm.run(
            *("sbatch", "--parsable", "-o", "/dev/null", "-p", partition, "--mem=100", *where),
            *(f"--gres=gpu:{gpus}", *options),
            stdin=script,
            user=user,
            timeout_s=timeout_s,
        )
        return int(text.strip().partition(";")[0])

    def job_state(self, job_id: int) -> str:
        """JobState of a job, "" when slurmctld has forgotten it."""
        text = self.slurm.run("scontrol", "show", "job", "-o", str(job_id), check=False)
        match = re.search(r"JobState=(\S+)", text)
        return match[1] if match else ""

    def job_field(self, job_id: int, name: str) -> str:
        """One field of `scontrol show job`, "" when it is not there."""
        text = self.slurm.run("scontrol", "show", "job", "-o", str(job_id), check=False)
        match = re.search(rf"(?:^|\s){name}=(\S*)", text)
        return match[1] if match else ""

    def without_epilog(self, act: Any) -> None:
        """Do something while the Epilog lets everything through at once, as a lost claim does."""
        path = self._hook("epilog")
        text = path.read_text()
        path.write_text("#!/bin/sh\nexit 0\n")
        try:
            act()
            wait(
                lambda: not self.slurm.run("squeue", "-h", "-t", "CG", "-o", "%i").split(),
                20,
                "nothing completes",
            )
        finally:
            path.write_text(text)

    # The hasty releaser

    def _release(self) -> None:
        while not self._stop.wait(0.05):
            with self._lock:
                claims = dict(self.claims)
            if not claims:
                continue
            try:
                items = self.kube.api.items("/api/v1/namespaces/default/pods")
            except (KubeError, OSError):
                continue
            alive = {
                item["metadata"]["uid"]
                for item in items
                if item["status"].get("phase") not in ("Succeeded", "Failed")
            }
            gone = {name: c for name, c in claims.items() if c.uid not in alive}
            if not gone:
                continue
            ids = [str(c.job_id) for c in gone.values()]
            if self.slurm.run_raw("scancel", *ids).returncode == 0:
                with self._lock:
                    for name in gone:
                        self.claims.pop(name, None)


def indices(text: str) -> set[int]:
    """`0,2-3` as a set."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def wait(reached: Any, timeout_s: float, what: str, told: Any = None, *args: Any) -> None:
    """Wait until `reached()`; AssertionError with `told(*args)` when not in time."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not in {timeout_s:g} s {told(*args) if told else ''}")
        time.sleep(0.02)


def unique(prefix: str) -> str:
    """A name that no other pod has."""
    return f"{prefix}-{uuid.uuid4().hex[:8]}"
