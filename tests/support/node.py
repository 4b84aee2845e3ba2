"""A real Kubernetes node on this machine: kubelet, containerd and runc in a mount namespace.

Several nodes stand side by side: each has its own mount namespace with a private folder over the
kubelet's fixed state folder (device plugin sockets), its own containerd and its own cgroup root.
Needs root, and Debian's containerd, runc, containernetworking-plugins, umoci, skopeo and
busybox-static (tests.support.bootstrap). Pods must use `hostNetwork` and `imagePullPolicy: Never`.

A node's folder must be short: containerd puts unix sockets below it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import grpc

from tests.support import binaries
from tests.support.keeper import Keeper, keeps
from tests.support.node_image import IMAGE, image_archive
from tests.support.ports import PortBlock, reserve

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.kube import KubeCluster

STATE = "/var/lib/kubelet"
"""Where the kubelet of every node believes its state to be."""
CRI_VERSION = "/runtime.v1.RuntimeService/Version"
CGROUPS = Path("/sys/fs/cgroup")
_numbers = itertools.count(1)

CONTAINERD = """\
version = 2
root = "{dir}/root"
state = "{dir}/state"
oom_score = 0
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs", \
"io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", \
"io.containerd.snapshotter.v1.aufs"]
[grpc]
  address = "{dir}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{dir}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""

CNI = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [
        {
            "type": "ptp",
            "ipMasq": False,
            "ipam": {
                "type": "host-local",
                "subnet": "10.244.7.0/24",
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
    ],
}


COMMANDS = ("containerd", "ctr", "runc", "umoci", "skopeo", "nsenter", "unshare")


class NodeProblem(RuntimeError):
    """A part of the node failed; the text has the end of its log."""


def host_problems() -> list[str]:
    """Why no real node can run on this machine, one text each; [] when one can."""
    found = []
    for command in COMMANDS:
        if shutil.which(command) is None:
            found.append(f"{command} is not installed (`make prerequisites`)")
    if os.getuid() != 0:
        return [*found, "root is needed, for mount namespaces, cgroups and containers"]
    argv = ["unshare", "-m", "--propagation", "private", "true"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        found.append(f"no mount namespace can be made: {done.stderr.strip()}")
    hierarchies = cgroup_hierarchies()
    if not hierarchies:
        found.append(f"no cgroup hierarchy is mounted below {CGROUPS}")
    for hierarchy in hierarchies:
        probe = hierarchy / f"sbnode-probe-{os.getpid()}"
        try:
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            found.append(f"no cgroup can be made in {hierarchy}: {error.strerror}")
    return found


def cgroup_hierarchies() -> list[Path]:
    """Every mounted cgroup hierarchy: one with cgroup v2, one a controller with v1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [p for p in CGROUPS.iterdir() if p.is_dir() and not p.is_symlink()]


@dataclass
class RealNode:
    """A node between `start` and `stop` (or as a context manager).

    kubelet_config: more fields of the KubeletConfiguration. Attributes after start: `dir`, `plugins`
    (the folder with kubelet.sock), `pod_resources` (socket).
    """

    kube: KubeCluster
    name: str
    kubelet_config: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    keep: bool = False

    def __post_init__(self) -> None:
        self._keeper: Keeper | None = None
        self._ports: PortBlock | None = None
        self.dir = Path()
        self._holder = 0
        self._number = next(_numbers)

    @property
    def state(self) -> Path:
        """What stands over the kubelet's state folder in the node, seen from outside."""
        return self.dir / "kubelet"

    @property
    def plugins(self) -> Path:
        """Folder of the device plugin sockets, seen from outside."""
        return self.state / "device-plugins"

    @property
    def pod_resources(self) -> Path:
        """Socket of PodResources, seen from outside."""
        return self.state / "pod-resources" / "kubelet.sock"

    @property
    def cgroup_root(self) -> str:
        """Root of the node's pods in every cgroup hierarchy: `/sbnode-<name>-<pid>-<number>`.

        No two nodes of a process may share one, though their names be the same: a kubelet removes
        the cgroups of pods that it does not know.
        """
        return f"/sbnode-{self.name}-{os.getpid()}-{self._number}"

    def port(self, index: int) -> int:
        """A port of the node's own; 0 is the kubelet's, 2 and up are for tests."""
        if self._ports is None:
            raise NodeProblem("the node has not been started")
        return self._ports[index]

    def start(self, timeout_s: float = 90.0) -> Self:
        """Start containerd and kubelet, and wait until the node is Ready.

        Raises:
            NodeProblem: a part ended, or the node is not Ready in time.

        """
        if problems := host_problems():
            raise NodeProblem("no real node can run here: " + "; ".join(problems))
        archive = image_archive()
        self.dir = Path(tempfile.mkdtemp(prefix="sbn-"))
        self._keeper = Keeper()
        self._ports = reserve(16)
        try:
            self._lay_folder()
            self._make_cgroups()
            self._start_holder()
            self.start_containerd()
            subprocess.run(
                ["ctr", "-a", self._containerd, "-n", "k8s.io", "images", "import", str(archive)],
                check=True,
                capture_output=True,
                timeout=60,
            )
            self.start_kubelet(wait=False)
            self._wait_for("node is Ready", self.is_ready, timeout_s, "kubelet")
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Kill everything, containers included, and remove the folder."""
        if self._keeper is not None:
            self._keeper.stop()
        # Containers are children of shims that left the keeper's tree only in name; whatever still
        # stands in our cgroups is ours.
        self._empty_cgroups()
        for root in self._cgroup_roots():
            for folder, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        if self._ports is not None:
            self._ports.release()
        if not keeps(self.keep) and self.dir != Path():
            shutil.rmtree(self.dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Parts

    def start_containerd(self, timeout_s: float = 30.0) -> None:
        """Start containerd and wait until a kubelet could use it.

        Its other services answer earlier: at first the runtime looks at the containers of before, and
        a kubelet that starts meanwhile ends.
        """
        self._start("containerd", ["containerd", "-c", str(self.dir / "containerd.toml")])

        def answers() -> bool:
            with grpc.insecure_channel(f"unix://{self._containerd}") as channel:
                ask = channel.unary_unary(CRI_VERSION)  # an empty message either way
                try:
                    ask(b"", timeout=1)
                except grpc.RpcError:
                    return False
            return True

        self._wait_for("containerd answers", answers, timeout_s, "containerd")

    def kill9_containerd(self) -> None:
        """End containerd as a crash does; shims and containers live on."""
        self._keep.kill("containerd")

    def start_kubelet(self, *, wait: bool = True, timeout_s: float = 60.0) -> None:
        """Start the kubelet; with `wait` until its pod-resources socket is there again."""
        self.pod_resources.unlink(missing_ok=True)
        labels = ",".join(f"{k}={v}" for k, v in self.labels.items())
        self._start(
            "kubelet",
            [
                *binaries.command("kubelet"),
                f"--config={self.dir / 'kubelet.json'}",
                f"--kubeconfig={self.kube.kubeconfig}",
                f"--root-dir={STATE}",
                f"--cert-dir={self.dir / 'pki'}",
                f"--hostname-override={self.name}",
                *([f"--node-labels={labels}"] if labels else []),
            ],
        )
        if wait:
            self._wait_for("kubelet serves", self.pod_resources.is_socket, timeout_s, "kubelet")

    def kill9_kubelet(self) -> None:
        """End the kubelet as a crash does; containers live on."""
        self._keep.kill("kubelet")

    def power_off(self) -> None:
        """The power fails: kubelet, containerd and every process of a pod end, their cgroups are gone.

        What a node keeps on its disk stays: the kubelet's and containerd's folders.
        """
        for part in ("kubelet", "containerd"):
            if self.poll(part) is None:
                self._keep.kill(part)
        self._empty_cgroups()
        for root in self._cgroup_roots():
            for top in root.iterdir():
                for folder, _, _ in os.walk(top, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)
        for socket in (*self.plugins.glob("*.sock"), self.pod_resources):
            socket.unlink(missing_ok=True)

    def pause_kubelet(self) -> None:
        """SIGSTOP."""
        self._keep.send("kubelet", signal.SIGSTOP)

    def resume_kubelet(self) -> None:
        """Undo `pause_kubelet`."""
        self._keep.send("kubelet", signal.SIGCONT)

    def set_boot_id(self, boot_id: str) -> None:
        """What the kubelet reads as the kernel's boot id when it starts next: a reboot, for it."""
        path = self.dir / "boot_id"
        path.write_text(f"{boot_id}\n")
        over = ["mount", "--bind", str(path), "/proc/sys/kernel/random/boot_id"]
        argv = ["nsenter", "-m", "-t", str(self._holder), *over]
        subprocess.run(argv, check=True, capture_output=True, timeout=10)

    def start_process(self, name: str, argv: list[str], **options: Any) -> int:
        """Start another process in the node's mount namespace; it ends with the node."""
        return self._start(name, argv, **options)

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to any process of the node by its name, e.g. SIGSTOP."""
        self._keep.send(name, number)

    def kill9(self, name: str) -> None:
        """End any process of the node by its name with SIGKILL."""
        self._keep.kill(name)

    def terminate(self, name: str, timeout_s: float = 10.0) -> int:
        """End a process with SIGTERM; its exit status."""
        self._keep.send(name, signal.SIGTERM)
        return self._keep.wait(name, timeout_s)

    def signal(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process of one of the node's pods; one that has ended is passed over."""
        if pid not in self.cgroup_pids():
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def poll(self, name: str) -> int | None:
        """Exit status of a process of the node, None while it runs."""
        return self._keep.poll(name)

    def log(self, name: str) -> Path:
        """Log file of a part."""
        return self.dir / f"{name}.log"

    # Asking

    def is_ready(self) -> bool:
        """Whether the API server says Ready of this node."""
        node = self.kube.api.find(f"/api/v1/nodes/{self.name}")
        if node is None:
            return False
        conditions = node["status"].get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def allocatable(self, resource: str = "nvidia.com/gpu") -> int:
        """Amount of a resource that the API server says is allocatable."""
        node = self.kube.api.get(f"/api/v1/nodes/{self.name}")
        return int(node["status"]["allocatable"].get(resource, "0"))

    def cgroup_pids(self) -> list[int]:
        """Every process of the node's pods."""
        found = set()
        for hierarchy in cgroup_hierarchies():
            for folder, _, files in os.walk(hierarchy / self.cgroup_root.strip("/")):
                if "cgroup.procs" in files:
                    with contextlib.suppress(OSError):
                        text = (Path(folder) / "cgroup.procs").read_text()
                        found |= {int(pid) for pid in text.split()}
        return sorted(found)

    # Inside

    def _cgroup_roots(self) -> list[Path]:
        roots = [one / self.cgroup_root.strip("/") for one in cgroup_hierarchies()]
        return [root for root in roots if root.is_dir()]

    def _empty_cgroups(self, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while pids := self.cgroup_pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
            if time.monotonic() > deadline:
                break

    @property
    def _containerd(self) -> str:
        return str(self.dir / "containerd.sock")

    @property
    def _keep(self) -> Keeper:
        if self._keeper is None:
            raise NodeProblem("the node has not been started")
        return self._keeper

    def _lay_folder(self) -> None:
        for name in ("kubelet", "cni", "pki", "podlogs", "root", "state"):
            (self.dir / name).mkdir(exist_ok=True)
        (self.dir / "containerd.toml").write_text(CONTAINERD.format(dir=self.dir, image=IMAGE))
        (self.dir / "cni" / "10-pods.conflist").write_text(json.dumps(CNI))
        assert self._ports is not None
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.cgroup_root,
            "cgroupsPerQOS": True,
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "failCgroupV1": False,
            "containerRuntimeEndpoint": f"unix://{self._containerd}",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "address": "127.0.0.1",
            "port": self._ports[0],
            "healthzPort": 0,
            "readOnlyPort": 0,
            "podLogsDir": str(self.dir / "podlogs"),
            "kubeAPIQPS": 500,
            "kubeAPIBurst": 1000,
            "eventRecordQPS": 500,
            "eventBurst": 1000,
            "registryPullQPS": 0,
            "nodeStatusUpdateFrequency": "1s",
            "syncFrequency": "10s",
            "maxPods": 250,
            "enableControllerAttachDetach": False,
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "10Mi"},
            **self.kubelet_config,
        }
        (self.dir / "kubelet.json").write_text(json.dumps(config, indent=1))

    def _make_cgroups(self) -> None:
        for hierarchy in cgroup_hierarchies():
            folder = hierarchy / self.cgroup_root.strip("/")
            folder.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (folder / name).exists() and not (folder / name).read_text().strip():
                    (folder / name).write_text((hierarchy / name).read_text())

    def _start_holder(self) -> None:
        """Make the mount namespace; it lives as long as any process in it."""
        script = f"mkdir -p {STATE} && mount --bind {self.state} {STATE} && echo held && exec sleep 1000000"
        argv = ["unshare", "-m", "--propagation", "private", "sh", "-c", script]
        self._holder = self._keep.start("holder", argv, log=self.log("holder"))
        held = lambda: "held" in self.log("holder").read_text()  # noqa: E731
        self._wait_for("mount namespace", held, 10.0, "holder")

    def _start(self, name: str, argv: list[str], **options: Any) -> int:
        entered = ["nsenter", "-m", "-t", str(self._holder), *argv]
        return self._keep.start(name, entered, log=self.log(name), **options)

    def _wait_for(
        self, what: str, reached: Callable[[], bool], timeout_s: float, part: str
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            status = self._keep.poll(part)
            if status is not None:
                raise NodeProblem(f"{part} ended with {status}: {self._log_end(part)}")
            if reached():
                return
            if time.monotonic() > deadline:
                raise NodeProblem(f"{what}: not in {timeout_s:g} s: {self._log_end(part)}")
            time.sleep(0.05)

    def _log_end(self, part: str) -> str:
        path = self.log(part)
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""
