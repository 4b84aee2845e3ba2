"""Our own daemons on a test cluster: real processes, with exactly the rights that manifests/ gives.

    with Cluster(config, scheduler=False) as cluster, Product(cluster) as product:
        cluster.kube.api.create(pod("a", gpus=1))

Starts bridges and extenders as a user would (console entry points, a configuration file, kubeconfigs
of their own service accounts), and kube-scheduler with the extender block of manifests/.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from tests.support import ports

if TYPE_CHECKING:
    from tests.support.chaos.wires import Wires
    from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[2]
NAMESPACE = "slurmbridge"
LINK, BRIDGE_ADMIN, EXTENDER, EXTENDER_ADMIN = range(4)


@dataclass
class Product:
    """Bridges, extenders and kube-scheduler on one cluster.

    policy, sections: merged into the configuration (camelCase keys). bridges, extenders: replicas.
    The scheduler calls the first extender. env: more environment of the bridges; {} is
    replaced by their number. altered: they run by tests/support/altered.py. wires: the daemons'
    ways to the API server and to slurmctld, where they do not lead there directly.
    """

    cluster: Cluster
    policy: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    bridges: int = 1
    extenders: int = 1
    start_scheduler: bool = True
    tls: bool = False
    env: dict[str, str] = field(default_factory=dict)
    altered: bool = False
    wires: Wires | None = None

    def __post_init__(self) -> None:
        self._ports: list[ports.PortBlock] = []
        self._folder = Path()

    def start(self) -> Self:
        """Start everything; ready when every part says so."""
        kube = self.cluster.kube
        self._folder = kube.dir / "product"
        self._folder.mkdir()
        self._ports = [ports.reserve(4) for _ in range(max(self.bridges, self.extenders))]
        kube.kubectl("apply", "-f", "-", stdin=self._manifests())
        self._accounts = {
            name: kube.kubeconfig_for_service_account(NAMESPACE, name)
            for name in ("slurmbridge", "slurmbridge-extender")
        }
        if self.wires is not None:
            for account in self._accounts.values():
                self.wires.lead_kubeconfig(account)
        if self.tls:
            # One certificate for all: names and addresses of this host.
            self._certificate = kube.issue("product", both=True)
        for i in range(self.bridges):
            self.config_path(i).write_text(yaml.safe_dump(self._config(i)))
            self.start_bridge(i)
        for i in range(self.extenders):
            self.start_extender(i)
        for i in range(self.bridges):
            self._wait_ready(self._ports[i][BRIDGE_ADMIN], f"bridge-{i}")
        for i in range(self.extenders):
            self._wait_ready(self._ports[i][EXTENDER_ADMIN], f"extender-{i}")
        if self.start_scheduler:
            kube.start_scheduler(self.scheduler_config())
        return self

    def stop(self) -> None:
        """The cluster's keeper ends the processes; only the ports are ours."""
        for block in self._ports:
            block.release()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Parts

    def start_bridge(self, i: int = 0) -> None:
        """Start bridge number i (again)."""
        entry = "tests.support.altered" if self.altered else "slurmbridge"
        self.cluster.kube.start_process(
            f"bridge-{i}",
            [sys.executable, "-m", entry, "run", "--config", str(self.config_path(i))],
            env=self._env() | {k: v.format(i) for k, v in self.env.items()},
            cwd=ROOT,
        )

    def start_extender(self, i: int = 0) -> None:
        """Start extender number i (again)."""
        block = self._ports[i]
        links = [part for j in range(self.bridges) for part in ("--bridge", self.link(j))]
        self.cluster.kube.start_process(
            f"extender-{i}",
            [
                *(sys.executable, "-m", "extender", "run", *links),
                *("--kubeconfig", str(self._accounts["slurmbridge-extender"])),
                *("--listen", f"127.0.0.1:{block[EXTENDER]}"),
                *("--admin-listen", f"127.0.0.1:{block[EXTENDER_ADMIN]}"),
                *self._extender_tls(),
            ],
            env=self._env(),
            cwd=ROOT,
        )

    def kill9_bridge(self, i: int = 0) -> None:
        """End a bridge with SIGKILL."""
        self.cluster.kube.kill9(f"bridge-{i}")

    def kill9_extender(self, i: int = 0) -> None:
        """End an extender with SIGKILL."""
        self.cluster.kube.kill9(f"extender-{i}")

    def wait_bridge(self, i: int = 0, timeout_s: float = 30.0) -> None:
        """Wait until bridge i is ready (a follower is too)."""
        self._wait_ready(self._ports[i][BRIDGE_ADMIN], f"bridge-{i}", timeout_s)

    def wait_extender(self, i: int = 0, timeout_s: float = 30.0) -> None:
        """Wait until extender i is ready."""
        self._wait_ready(self._ports[i][EXTENDER_ADMIN], f"extender-{i}", timeout_s)

    # What a user would ask

    def link(self, i: int = 0) -> str:
        """Address of bridge i."""
        return f"127.0.0.1:{self._ports[i][LINK]}"

    def extender_url(self, i: int = 0) -> str:
        """URL of extender i."""
        scheme = "https" if self.tls else "http"
        return f"{scheme}://127.0.0.1:{self._ports[i][EXTENDER]}"

    def config_path(self, i: int = 0) -> Path:
        """Configuration file of bridge i."""
        return self._folder / f"bridge-{i}.yaml"

    def cli(self, *arguments: str, i: int = 0) -> Any:
        """Answer of `slurmbridge ... -o json`."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "slurmbridge", *arguments),
                *("-o", "json", "--config", str(self.config_path(i))),
            ],
            env=self._env(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"slurmbridge {' '.join(arguments)}: {done.returncode} {done.stderr}"
            )
        return json.loads(done.stdout)

    def metrics(self, part: str = "bridge", i: int = 0) -> dict[str, float]:
        """Samples of /metrics: `name{labels}` -> value."""
        port = self._ports[i][BRIDGE_ADMIN if part == "bridge" else EXTENDER_ADMIN]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = {}
        for line in lines:
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found

    def log(self, name: str) -> str:
        """Log of one process (`bridge-0`, `extender-0`)."""
        return (self.cluster.kube.dir / f"{name}.log").read_text()

    # Configuration

    def scheduler_config(self) -> dict[str, Any]:
        """kube-scheduler's configuration of manifests/, with our address and without TLS."""
        path = ROOT / "manifests/overlays/default-scheduler/scheduler.yaml"
        config: dict[str, Any] = yaml.safe_load(path.read_text())
        config.pop("clientConnection")
        config["leaderElection"] = {"leaderElect": False}
        for extender in config["extenders"]:
            extender["urlPrefix"] = self.extender_url()
            if self.tls:
                files = self._certificate
                ca = str(self.cluster.kube.ca_crt)
                extender["tlsConfig"] = {
                    "caFile": ca,
                    "certFile": str(files.crt),
                    "keyFile": str(files.key),
                }
            else:
                extender.pop("enableHTTPS")
                extender.pop("tlsConfig")
        return config

    def _config(self, i: int) -> dict[str, Any]:
        block = self._ports[i]
        slurm_conf = self.cluster.slurm.conf_path
        if self.wires is not None:
            slurm_conf = self.wires.lead_slurm_conf(slurm_conf)
        policy = {"cluster": "test", "granularity": "gpu", "partition": "claims"} | self.policy
        base: dict[str, Any] = {
            "apiVersion": "slurmbridge.dev/v1",
            "policy": policy,
            "slurm": {"conf": str(slurm_conf)},
            "kube": {
                "kubeconfig": str(self._accounts["slurmbridge"]),
                "lease": {"namespace": NAMESPACE, "durationS": 5, "renewS": 1},
            },
            "link": {"listen": self.link(i)},
            "admin": {"listen": f"127.0.0.1:{block[BRIDGE_ADMIN]}"},
            # Hollow kubelets have no devices, and no agents.
            "rules": {"agents": "optional"},
        }
        if self.tls:
            base["link"]["tls"] = {
                "cert": str(self._certificate.crt),
                "key": str(self._certificate.key),
                "clientCa": str(self.cluster.kube.ca_crt),
            }
        for name, value in self.sections.items():
            both = isinstance(base.get(name), dict) and isinstance(value, dict)
            base[name] = base[name] | value if both else value
        return base

    def _extender_tls(self) -> list[str]:
        if not self.tls:
            return []
        crt, key = str(self._certificate.crt), str(self._certificate.key)
        ca = str(self.cluster.kube.ca_crt)
        return [
            *("--bridge-tls-cert", crt, "--bridge-tls-key", key, "--bridge-tls-ca", ca),
            *("--tls-cert", crt, "--tls-key", key, "--tls-client-ca", ca),
        ]

    def _manifests(self) -> str:
        """What of the base the daemons need here: namespace, accounts, rights, Lease."""
        text = self.cluster.kube.kubectl("kustomize", str(ROOT / "manifests/base"))
        wanted = {
            *("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding"),
            *("Role", "RoleBinding", "Lease"),
        }
        docs = [d for d in yaml.safe_load_all(text) if d["kind"] in wanted]
        return yaml.safe_dump_all(docs)

    def _env(self) -> dict[str, str]:
        return self.cluster.slurm.env() | {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}

    def _wait_ready(self, port: int, name: str, timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        text = ""
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2):
                    return
            except OSError as error:
                text = str(error)
            time.sleep(0.05)
        tail = "\n".join(self.log(name).splitlines()[-20:])
        raise RuntimeError(f"{name} is not ready after {timeout_s:g} s: {text}\n{tail}")
