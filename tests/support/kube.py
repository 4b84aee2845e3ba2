"""A real Kubernetes control plane on this machine: etcd, API server, scheduler, controllers.

TLS with an own authority, RBAC, tokens of service accounts by TokenRequest: clients connect as they
would anywhere. Nodes are API objects that `create_nodes` makes; `tests.support.hollow` plays their
kubelets.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.support import binaries, kube_objects
from tests.support.keeper import Keeper, fresh_folder, keeps
from tests.support.kube_api import KubeApi, KubeError, Object
from tests.support.kube_objects import HOLLOW_READY
from tests.support.kube_pki import Authority, Certificate
from tests.support.ports import PortBlock, reserve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import aiohttp

__all__ = ["KubeApi", "KubeCluster", "KubeError", "KubeProblem"]

HOSTS = ("IP:127.0.0.1", "DNS:localhost", "DNS:kubernetes.default.svc", "IP:10.96.0.1")
ISSUER = "https://kubernetes.default.svc"
# Nodes are objects without kubelets and leases: the lifecycle controller would take all for dead.
CONTROLLERS = "*,-node-lifecycle-controller,-node-ipam-controller"
ETCD, ETCD_PEER, API, MANAGER, FIRST_SCHEDULER = range(5)
PORTS = 16


class KubeProblem(RuntimeError):
    """A component of the test cluster failed; the text has the end of its log."""


@dataclass
class KubeCluster:
    """A running control plane between `start` and `stop` (or as a context manager).

    folder: where it lives, missing or empty; None makes one under the temporary folder. It is
    removed at the end unless `keep` (or SLURMBRIDGE_KEEP in the environment) says otherwise.
    api_args: more flags of kube-apiserver, e.g. `--feature-gates=...`.
    Attributes after start: `url`, `kubeconfig` (admin), `ca_crt`, `api` (a KubeApi as admin).
    """

    folder: Path | None = None
    api_args: tuple[str, ...] = ()
    keep: bool = False

    def __post_init__(self) -> None:
        self._keeper: Keeper | None = None
        self._ports: PortBlock | None = None
        self._dir = Path()
        self._token = secrets.token_hex(16)
        self._api: KubeApi | None = None
        self._apis: list[KubeApi] = []
        self._certificate: Certificate | None = None
        self._schedulers: dict[str, int] = {}

    # Life

    def start(self, timeout_s: float = 60.0) -> Self:
        """Start etcd and the API server and wait until it is ready (about 4 s).

        Raises:
            KubeProblem: a component ended, or it is not ready in time.

        """
        # First: it may have to be built.
        binaries.command("kube-apiserver")
        self._dir = fresh_folder(self.folder, "sb-kube-")
        self._keeper = Keeper()
        if not keeps(self.keep):
            self._keeper.remove_at_end(self._dir)
        try:
            self._ports = reserve(PORTS)
            self.start_etcd()
            self._write_credentials()
            self.start_api(timeout_s=timeout_s)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Kill everything and remove the folder (see `keep`)."""
        for api in self._apis:
            api.close()
        if self._keeper is not None:
            self._keeper.stop()
        if self._ports is not None:
            self._ports.release()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # What clients need

    @property
    def dir(self) -> Path:
        """The cluster's folder (after start); logs are `<component>.log` in it."""
        return self._dir

    @property
    def url(self) -> str:
        """`https://127.0.0.1:<port>`; the same after a restart of the API server."""
        return f"https://127.0.0.1:{self._block[API]}"

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the administrator (group system:masters)."""
        return self._dir / "admin.kubeconfig"

    @property
    def ca_crt(self) -> Path:
        """The authority that signed the API server's certificate."""
        return self._authority.crt

    @property
    def token(self) -> str:
        """Bearer token of the administrator."""
        return self._token

    @property
    def api(self) -> KubeApi:
        """Requests as the administrator."""
        if self._api is None:
            raise KubeProblem("the cluster has not been started")
        return self._api

    def api_as(self, kubeconfig: Path) -> KubeApi:
        """Requests as the user of a kubeconfig of this cluster."""
        user = json.loads(kubeconfig.read_text())["users"][0]["user"]
        return self._connect(self.url, user["token"])

    def session(self, limit: int = 64) -> aiohttp.ClientSession:
        """An aiohttp session as the administrator: `session.get("/api/v1/pods")`."""
        import aiohttp  # noqa: PLC0415 - the rest of this module runs without it

        return aiohttp.ClientSession(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self._token}"},
            connector=aiohttp.TCPConnector(ssl=self.api.ssl, limit=limit),
        )

    def kubeconfig_for_service_account(
        self, namespace: str, name: str, lifespan_s: int = 3600
    ) -> Path:
        """Kubeconfig with a token of a service account; made with its namespace if missing.

        It has the rights that RBAC objects give it, so none until a test makes some.
        """
        for obj in (
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": name, "namespace": namespace},
            },
        ):
            try:
                self.api.create(obj)
            except KubeError as error:
                if error.status != 409:
                    raise
        answer = self.api.request(
            "POST",
            f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"expirationSeconds": lifespan_s},
            },
        )
        path = self._dir / f"{namespace}.{name}.kubeconfig"
        self.write_kubeconfig(path, answer["status"]["token"], namespace)
        return path

    def write_kubeconfig(self, path: Path, token: str, namespace: str = "default") -> None:
        """Write a kubeconfig (JSON, which is YAML too) with a bearer token."""
        ca = base64.b64encode(self.ca_crt.read_bytes()).decode()
        context = {"cluster": "test", "user": "test", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": self.url, "certificate-authority-data": ca},
                }
            ],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
        path.write_text(json.dumps(config, indent=1) + "\n")
        path.chmod(0o600)

    def issue(self, name: str, *hosts: str, both: bool = False) -> Certificate:
        """A server certificate of the cluster's authority (`hosts` as `IP:...` or `DNS:...`).

        both: good for a client too.
        """
        return self._authority.issue(name, *(hosts or HOSTS), both=both)

    def kubectl(self, *arguments: str, stdin: str = "", timeout_s: float = 60.0) -> str:
        """Run kubectl (kustomize included) as the administrator; its stdout.

        Raises:
            KubeProblem: it exited non-zero; with its stderr.

        """
        done = subprocess.run(
            [*binaries.command("kubectl"), *arguments],
            env=os.environ | {"KUBECONFIG": str(self.kubeconfig)},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise KubeProblem(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    # Nodes

    def create_nodes(
        self,
        names: Sequence[str],
        *,
        gpus: int = 8,
        cpus: int = 64,
        memory_mb: int = 512_000,
        labels: Callable[[int, str], Mapping[str, str]] | Mapping[str, str] | None = None,
        pods: int = 110,
        hollow: bool = True,
    ) -> None:
        """Make Ready, schedulable nodes; about 1,000 a second.

        Args:
            labels: the same for all, or called with (position, name) for each.
            hollow: label them for the hollow kubelet.

        """

        def one(place: int, name: str) -> Object:
            more = labels(place, name) if callable(labels) else labels
            return kube_objects.node(
                name,
                gpus=gpus,
                cpus=cpus,
                memory_mb=memory_mb,
                labels=more,
                pods=pods,
                hollow=hollow,
            )

        self.api.create_all(one(place, name) for place, name in enumerate(names))

    # API server

    def start_api(self, *, wait: bool = True, timeout_s: float = 60.0) -> None:
        """Start the API server on its port; with `wait` until it is ready."""
        certificate, folder = self._server_certificate, self._dir
        self._start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._block[ETCD]}",
            f"--secure-port={self._block[API]}",
            "--bind-address=127.0.0.1",
            f"--tls-cert-file={certificate.crt}",
            f"--tls-private-key-file={certificate.key}",
            # Not for clients, who have tokens: without it the other components miss the config map
            # that tells them whom to trust, and complain all the time.
            f"--client-ca-file={self.ca_crt}",
            f"--requestheader-client-ca-file={self.ca_crt}",
            "--requestheader-allowed-names=front-proxy",
            f"--cert-dir={folder / 'certs'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--endpoint-reconciler-type=none",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={self._signing_key}",
            f"--service-account-signing-key-file={self._signing_key}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            # Pods need no token of their own here, and nodes without kubelets must be schedulable.
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
            "--max-requests-inflight=3000",
            "--max-mutating-requests-inflight=2000",
            "--profiling=false",
            *self.api_args,
        )
        if wait:
            self._wait_for("kube-apiserver", self._api_is_ready, timeout_s)

    def kill9_api(self) -> None:
        """End the API server as a crash does."""
        self._keep.kill("kube-apiserver")

    def stop_api(self) -> None:
        """End the API server in order (SIGTERM)."""
        self._keep.send("kube-apiserver", signal.SIGTERM)
        self._keep.wait("kube-apiserver", 30.0)

    def pause_api(self) -> None:
        """SIGSTOP: connections stand, and nothing answers."""
        self._keep.send("kube-apiserver", signal.SIGSTOP)

    def resume_api(self) -> None:
        """Undo `pause_api`."""
        self._keep.send("kube-apiserver", signal.SIGCONT)

    # Scheduler and controllers

    def start_scheduler(
        self,
        config: Mapping[str, Any] | str | None = None,
        *,
        extenders: Sequence[Mapping[str, Any]] = (),
        name: str = "kube-scheduler",
        args: Sequence[str] = (),
        timeout_s: float = 30.0,
    ) -> None:
        """Start a kube-scheduler and wait until it is ready.

        Args:
            config: a KubeSchedulerConfiguration (mapping or YAML text); None: the default one.
                Client connection, leader election (off) and rates are filled in when missing.
            extenders: added to those of `config`.
            name: several schedulers run side by side under different names.
            args: more flags.

        """
        if isinstance(config, str):
            import yaml  # noqa: PLC0415 - the rest of this module runs without it

            given: Mapping[str, Any] = yaml.safe_load(config)
        else:
            given = config or {}
        full: Object = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            **given,
        }
        rates = {"kubeconfig": str(self.kubeconfig), "qps": 5000, "burst": 5000}
        full["clientConnection"] = rates | full.get("clientConnection", {})
        full["extenders"] = [*full.get("extenders", []), *extenders]
        path = self._dir / f"{name}.json"
        path.write_text(json.dumps(full, indent=1))
        place = self._schedulers.setdefault(name, len(self._schedulers))
        port = self._block[FIRST_SCHEDULER + place]
        self._start(
            "kube-scheduler",
            f"--config={path}",
            *self._serving(port),
            *args,
            name=name,
        )
        self._wait_for(name, lambda: self._is_ready(port), timeout_s)

    def kill9_scheduler(self, name: str = "kube-scheduler") -> None:
        """End a scheduler with SIGKILL; `start_scheduler` may start it again."""
        self._keep.kill(name)

    def scheduler_url(self, name: str = "kube-scheduler") -> str:
        """Base URL of a scheduler's `/metrics` (same authority and token as the API server)."""
        return f"https://127.0.0.1:{self._block[FIRST_SCHEDULER + self._schedulers[name]]}"

    def start_controller_manager(
        self, controllers: str = CONTROLLERS, args: Sequence[str] = (), timeout_s: float = 30.0
    ) -> None:
        """Start kube-controller-manager (jobs, garbage, namespaces, ...) and wait until ready."""
        port = self._block[MANAGER]
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            f"--controllers={controllers}",
            "--leader-elect=false",
            f"--service-account-private-key-file={self._signing_key}",
            f"--root-ca-file={self.ca_crt}",
            "--kube-api-qps=1000",
            "--kube-api-burst=1000",
            *self._serving(port),
            *args,
        )
        self._wait_for(
            "kube-controller-manager", lambda: self._is_ready(port, "/healthz"), timeout_s
        )

    # Kubelets

    def start_hollow_kubelets(self, *, final_status: bool = True, timeout_s: float = 30.0) -> None:
        """Start the process that plays the kubelets of all hollow nodes (name: `hollow`).

        Args:
            final_status: False saves one write for each deleted pod (for benches).

        """
        log = self._dir / "hollow.log"
        log.unlink(missing_ok=True)
        more = [] if final_status else ["--no-final-status"]
        self.start_process(
            "hollow",
            [
                sys.executable,
                "-m",
                "tests.support.hollow",
                "--kubeconfig",
                str(self.kubeconfig),
                *more,
            ],
            cwd=Path(__file__).parents[2],
        )
        self._wait_for("hollow", lambda: HOLLOW_READY in log.read_text(), timeout_s)

    # More processes of the cluster

    def start_process(self, name: str, argv: Sequence[str], **options: Any) -> int:
        """Start another process that ends with the cluster; options as for Keeper.start."""
        return self._keep.start(name, argv, log=self._dir / f"{name}.log", **options)

    def kill9(self, name: str) -> None:
        """End any process of the cluster by its name, `etcd` included, with SIGKILL."""
        self._keep.kill(name)

    def poll(self, name: str) -> int | None:
        """Exit status of any process of the cluster, None while it runs."""
        return self._keep.poll(name)

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to any process of the cluster, e.g. SIGSTOP."""
        self._keep.send(name, number)

    def pids(self) -> list[int]:
        """Every living process of the cluster."""
        return self._keep.pids()

    # Inside

    @property
    def _keep(self) -> Keeper:
        if self._keeper is None:
            raise KubeProblem("the cluster has not been started")
        return self._keeper

    @property
    def _block(self) -> PortBlock:
        if self._ports is None:
            raise KubeProblem("the cluster has not been started")
        return self._ports

    @property
    def _authority(self) -> Authority:
        return Authority(self._dir / "pki")

    @property
    def _signing_key(self) -> Path:
        return self._dir / "pki" / "tokens.key"

    @property
    def _server_certificate(self) -> Certificate:
        if self._certificate is None:
            raise KubeProblem("the cluster has not been started")
        return self._certificate

    def _connect(self, url: str, token: str) -> KubeApi:
        api = KubeApi(url, token, str(self.ca_crt))
        self._apis.append(api)
        return api

    def _write_credentials(self) -> None:
        self._authority.create()
        self._authority.signing_key("tokens")
        self._certificate = self._authority.issue("server", *HOSTS)
        tokens = self._dir / "tokens.csv"
        tokens.write_text(f'{self._token},admin,admin,"system:masters"\n')
        tokens.chmod(0o600)
        self.write_kubeconfig(self.kubeconfig, self._token)
        self._api = self._connect(self.url, self._token)

    def start_etcd(self) -> None:
        """Start etcd on what is in `etcd/` of the folder; `kill9("etcd")` ends it."""
        client = f"http://127.0.0.1:{self._block[ETCD]}"
        peer = f"http://127.0.0.1:{self._block[ETCD_PEER]}"
        self._start(
            "etcd",
            f"--data-dir={self._dir / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=error",
        )

    def save_etcd(self) -> Path:
        """A backup: what etcd has on its disk now; it stands still meanwhile."""
        saved = self._dir / f"etcd.{time.monotonic_ns()}"
        self.send("etcd", signal.SIGSTOP)
        try:
            shutil.copytree(self._dir / "etcd", saved)
        finally:
            self.send("etcd", signal.SIGCONT)
        return saved

    def restore_etcd(self, saved: Path) -> None:
        """Set the API server back to a backup of `save_etcd`: both are killed and started again.

        Kubernetes' documentation has kube-scheduler and the controllers started anew afterwards:
        that is the caller's.
        """
        self.kill9_api()
        self.kill9("etcd")
        shutil.rmtree(self._dir / "etcd")
        shutil.copytree(saved, self._dir / "etcd")
        self.start_etcd()
        self.start_api()

    def _serving(self, port: int) -> list[str]:
        certificate = self._server_certificate
        return [
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            f"--tls-cert-file={certificate.crt}",
            f"--tls-private-key-file={certificate.key}",
            f"--authentication-kubeconfig={self.kubeconfig}",
            f"--authorization-kubeconfig={self.kubeconfig}",
        ]

    def _start(self, component: str, *flags: str, name: str = "") -> None:
        name = name or component
        self.start_process(name, [*binaries.command(component), *flags], cwd=self._dir)

    def _api_is_ready(self) -> bool:
        return self.api.get("/readyz") == {"text": "ok"}

    def _is_ready(self, port: int, path: str = "/readyz") -> bool:
        one = self._connect(f"https://127.0.0.1:{port}", self._token)
        try:
            return one.get(path) == {"text": "ok"}
        finally:
            one.close()

    def _wait_for(self, name: str, ready: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            status = self._keep.poll(name)
            if status is not None:
                raise KubeProblem(f"{name} ended with {status}: {self._log_end(name)}")
            with contextlib.suppress(OSError, KubeError):
                if ready():
                    return
            if time.monotonic() > deadline:
                raise KubeProblem(f"{name}: not ready in {timeout_s:g} s: {self._log_end(name)}")
            time.sleep(0.05)

    def _log_end(self, name: str) -> str:
        path = self._dir / f"{name}.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""
