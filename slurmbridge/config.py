"""The configuration file (a ConfigMap's YAML): strict, and with every fault told at once.

Reload: the new text is read and checked whole; only if it is good is it taken, else the old one
stays and the faults are logged. Sections that only count at start are named in `NEEDS_RESTART`.
Each field is described in docs/config.md, which is made from the docstrings here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import yaml

from slurmbridge.core.settings import Eviction, Freshness, NodeSync, Settings
from slurmbridge.pool.claim import CLUSTER_RE
from slurmbridge.pool.errors import ConfigError, ParseError, Problem
from slurmbridge.pool.hostlist import expand
from slurmbridge.pool.policy import OPTION_RE, Granularity, Policy
from slurmbridge.pool.share import NodeGroup, faults

MOST_BYTES: Final = 1 << 20
"""A ConfigMap cannot be larger (1 MiB)."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Keys are written in camelCase, as everywhere in Kubernetes."""


class Poll(_Section, frozen=True):
    """How slurmctld is read.

    budget: share of slurmctld's time that reading may take; the interval grows with the cost.
    min_s: shortest interval in seconds. max_s: longest interval in seconds.
    timeout_s: deadline of one reading in seconds.
    """

    budget: Annotated[float, msgspec.Meta(gt=0, le=0.5)] = 0.05
    min_s: Seconds = 1.0
    max_s: Seconds = 30.0
    timeout_s: Seconds = 30.0


class Slurm(_Section, frozen=True):
    """How to reach slurmctld. The bridge must run as root or SlurmUser.

    conf: path of slurm.conf; empty: Slurm's default.
    cluster: ClusterName that has to answer, anything else is not believed; empty: that of the first
        answer since this bridge leads.
    commands: folder of salloc, sbatch, scancel, scontrol and squeue; empty: from PATH.
    concurrency: how many commands may run at a time.
    claim_timeout_s: deadline of one claim in seconds.
    poll: how often slurmctld is read.
    """

    conf: str = ""
    cluster: str = ""
    commands: str = ""
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=256)] = 16
    claim_timeout_s: Seconds = 5.0
    poll: Poll = Poll()


class Lease(_Section, frozen=True):
    """Leader election between bridge replicas (coordination.k8s.io/v1 Lease).

    name: name of the Lease. namespace: where it is; empty: the bridge's own namespace.
    duration_s: how long a dead leader blocks the others, in seconds.
    renew_s: seconds between two renewals; less than half of duration_s.
    """

    name: str = "slurmbridge"
    namespace: str = ""
    duration_s: Annotated[int, msgspec.Meta(ge=3, le=300)] = 15
    renew_s: Annotated[int, msgspec.Meta(ge=1, le=100)] = 2


class Kube(_Section, frozen=True):
    """How to reach the API server.

    kubeconfig: path of a kubeconfig; empty: the pod's own service account.
    cluster_uid: UID of the cluster's namespace kube-system; what another cluster says is not
        believed. Empty: the first that answers while a bridge leads.
    lease: the leader election.
    """

    kubeconfig: str = ""
    cluster_uid: str = ""
    lease: Lease = Lease()


class Pool(_Section, frozen=True):
    """Which nodes are shared.

    selector: labels that a pool node must have; empty: every node that Slurm knows
        and that has a GPU on either side.
    names: Kubernetes node name to Slurm node name, where they differ. A host list (`gpu7a,gpu7b`)
        says that one machine is several Slurm nodes: no pods go there, but its state is carried
        over to all of them. Without an entry the node
        label counts, then the same name, then the same first part of the name in any case.
    slurm_node_label: node label that holds the Slurm name.
    topology_labels: node labels of the levels of the topology, from the root down (zone before
        rack). What Slurm says of its switches or blocks comes before them (docs/topology.md).
    accelerator_labels: node labels of NVLink domains and the like, from the root down, a dimension
        of their own. Empty: topograph's labels, where nodes carry them.
    topology_file: path of a topology.conf or topology.yaml that is used where `scontrol show
        topology` says nothing; empty: none. Read again every minute.
    groups: node groups, and how many of their GPUs each side may have. A node belongs to the first
        group that names it.
    """

    selector: Mapping[str, str] = {}
    names: Mapping[str, str] = {}
    slurm_node_label: str = "slurmbridge.dev/slurm-node"
    topology_labels: tuple[str, ...] = ("topology.kubernetes.io/zone",)
    accelerator_labels: tuple[str, ...] = ()
    topology_file: str = ""
    groups: tuple[NodeGroup, ...] = ()


class Tls(_Section, frozen=True):
    """Certificates of the link's port, PEM files; a changed file is taken at the next handshake.

    cert: the server's certificate chain. key: its private key.
    client_ca: the authority that must have signed the certificates of clients.
    """

    cert: str
    key: str
    client_ca: str


class Link(_Section, frozen=True):
    """The gRPC port for extenders and the command line.

    listen: `host:port` or `unix:/path`.
    advertise: what followers tell clients as the leader's address; empty: the pod's IP (POD_IP)
        and the port.
    tls: certificates, a must on every address that is not of this host.
    clients: patterns (`slurmbridge-extender.*`), one of which must match a name in the certificate
        of whoever asks for views and claims; none: every certificate of tls.clientCa may.
    node_ca: the authority of the node agents' certificates, where that is another one than
        tls.clientCa: Kubernetes' own signs the kubelets' (docs/node-agent.md). Needs `clients`,
        since it signs others' certificates too.
    insecure: plain text over the network all the same, for tests.
    """

    listen: str = "127.0.0.1:7443"
    advertise: str = ""
    tls: Tls | None = None
    clients: tuple[str, ...] = ()
    node_ca: str = ""
    insecure: bool = False


class Admin(_Section, frozen=True):
    """The HTTP port for health, metrics and debugging.

    listen: `host:port`. Pages below `/debug/` are served to this host only.
    """

    listen: str = "127.0.0.1:8081"


class Rules(_Section, frozen=True):
    """Times of the book of claims.

    hold_s: seconds after which a claim that is not bound is given back.
    linger_s: seconds that the claim of a force-deleted pod is kept at least; the pod's own grace
        period if that is longer.
    agents: with granularity gpu, `required`: a node takes pods only while its agent is registered
        and fresh, and a claim is given back only by the agent's word, or when the node is fenced
        (docs/node-agent.md). `optional`: for tests without real kubelets; pods may get other GPUs
        than their claims have.
    node_annotation_s: shortest time in seconds between two writings of the node annotations; four
        times that while pods wait, since each writing wakes all of them.
    group_s: seconds after which a group of which not all pods have come is told that it was given
        up; it starts all the same when they come.
    climb_s: seconds for which a gang's preferred topology level holds, where its annotation does
        not say.
    group_queue_s: seconds after which a gang that does not fit is put into Slurm's queue.
    gangs_as_one: a gang whose members ask for the same gets one Slurm allocation for all of them,
        which is given back when the last one has ended; false: a claim for each member.
    """

    hold_s: Seconds = 60.0
    linger_s: Seconds = 30.0
    agents: Literal["required", "optional"] = "required"
    node_annotation_s: Seconds = 15.0
    group_s: Seconds = 300.0
    climb_s: Seconds = 120.0
    group_queue_s: Seconds = 2.0
    gangs_as_one: bool = True


class Hooks(_Section, frozen=True):
    """What Slurm's Epilog and Prolog do on a pool node; the agent writes hooks.json at its start.

    longest_hold_s: seconds for which the Epilog holds up the end of a claim, then the node is
        drained. PrologEpilogTimeout of slurm.conf must be longer.
    prolog_wait_s: seconds for which the Prolog of a native job waits for GPUs that a pod still
        uses. BatchStartTimeout of slurm.conf (10) must be longer.
    on_busy: what is done then: `requeue` the job (one that cannot be is cancelled), or `drain` the
        node.
    """

    longest_hold_s: Annotated[float, msgspec.Meta(ge=1, le=86400)] = 900.0
    prolog_wait_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 8.0
    on_busy: Literal["requeue", "drain"] = "requeue"


class Node(_Section, frozen=True):
    """The agent of a pool node (`slurmbridge node`); the bridge does not read it.

    name: Kubernetes node name; empty: NODE_NAME of the environment, else the host name.
    slurm_name: Slurm node name; empty: the same.
    resource: extended resource that the device plugin offers; must be one of policy.resources.
    devices: `nvml`, or the path of a JSON file of devices.
    gres_conf: path of Slurm's gres.conf.
    kubelet: the kubelet's state folder (device-plugins and pod-resources are below it).
    run: folder of the agent's socket and book; must not outlive a reboot.
    cgroup_root: the kubelet's cgroupRoot, where it is not the top.
    response: how containers are told of their devices: any of `env`, `cdi`, `devices`.
    cdi_kind: vendor and class of CDI names.
    owner_uids: Unix users that the bridge submits claims as.
    monitors: commands that may hold a GPU open without using it, where the node's own accounts run
        them (user id below 1000; in pods: root, and not in one that was given GPUs).
    look_s: seconds between two looks at the node.
    quarantine: what a finding about a GPU closes to new pods: `none`, the `gpu` (unhealthy to the
        kubelet), or the `node`; until it is over.
    hooks: what Slurm's Epilog and Prolog do.
    bridge: addresses of the bridges' link; none: the agent works without.
    bridge_name: name in the bridge's certificate; empty: the host of the address.
    tls: certificates for the link (client_ca: the authority of the bridge).
    listen: `host:port` of health and metrics.
    """

    name: str = ""
    slurm_name: str = ""
    resource: str = "nvidia.com/gpu"
    devices: str = "nvml"
    gres_conf: str = "/etc/slurm/gres.conf"
    kubelet: str = "/var/lib/kubelet"
    run: str = "/run/slurmbridge"
    cgroup_root: str = ""
    response: tuple[Literal["env", "cdi", "devices"], ...] = ("env",)
    cdi_kind: str = "nvidia.com/gpu"
    owner_uids: tuple[int, ...] = (0,)
    monitors: tuple[str, ...] = (
        "nvidia-persiste",
        "nv-hostengine",
        "dcgm-exporter",
        "nvidia-smi",
        "slurmbridge",
    )
    look_s: Annotated[float, msgspec.Meta(ge=0.05, le=60)] = 0.5
    quarantine: Literal["none", "gpu", "node"] = "none"
    hooks: Hooks = Hooks()
    bridge: tuple[str, ...] = ()
    bridge_name: str = ""
    tls: Tls | None = None
    listen: str = "127.0.0.1:8082"


class Config(_Section, frozen=True):
    """The top level.

    api_version: version of this format.
    policy: what the site allows and prefers; shared with the extenders.
    pool: which nodes are shared.
    slurm: how to reach slurmctld.
    kube: how to reach the API server.
    link: the port for extenders and the command line.
    admin: the port for health and metrics.
    rules: times of the book of claims.
    eviction: how many pods may be evicted at once.
    freshness: how old a reading of slurmctld may be.
    node_sync: node state between Kubernetes and Slurm.
    node: the agent of a pool node.
    log_level: lowest level that is logged; read at the start only.
    """

    api_version: Literal["slurmbridge.dev/v1"]
    policy: Policy
    pool: Pool = Pool()
    slurm: Slurm = Slurm()
    kube: Kube = Kube()
    link: Link = Link()
    admin: Admin = Admin()
    rules: Rules = Rules()
    eviction: Eviction = Eviction()
    freshness: Freshness = Freshness()
    node_sync: NodeSync = NodeSync()
    node: Node = Node()
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def settings(self, owner_uid: int | None = None) -> Settings:
        """What the core needs of it.

        Args:
            owner_uid: Unix user id of our claims; None: of this process.

        """
        return Settings(
            policy=self.policy,
            slurm_cluster=self.slurm.cluster,
            owner_uid=os.geteuid() if owner_uid is None else owner_uid,
            eviction=self.eviction,
            freshness=self.freshness,
            node_sync=self.node_sync,
            hold_s=self.rules.hold_s,
            linger_s=self.rules.linger_s,
            agents_required=self.rules.agents == "required",
            node_annotation_s=self.rules.node_annotation_s,
            group_s=self.rules.group_s,
            climb_s=self.rules.climb_s,
            group_queue_s=self.rules.group_queue_s,
            gangs_as_one=self.rules.gangs_as_one,
            slurm_node_label=self.pool.slurm_node_label,
            topology_labels=self.pool.topology_labels,
            accelerator_labels=self.pool.accelerator_labels,
            names=tuple(sorted(self.pool.names.items())),
            selector=tuple(sorted(self.pool.selector.items())),
            groups=self.pool.groups,
        )


NEEDS_RESTART: Final = ("slurm", "kube", "link", "admin")
"""Sections that are read at start only; a reload that changes them says so."""


def load(path: str) -> Config:
    """Read and check a file.

    Raises:
        ConfigError: all faults, with their paths.

    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError([Problem("$", f"cannot read {path}: {error.strerror}")]) from error
    return parse(text)


def parse(text: bytes) -> Config:
    """Check a configuration text.

    Raises:
        ConfigError: all faults, with their paths.

    """
    if len(text) > MOST_BYTES:
        raise ConfigError([Problem("$", "larger than 1 MiB")])
    try:
        raw = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader, see below
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        at = f" (line {where.line + 1}, column {where.column + 1})" if where else ""
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError([Problem("$", f"not valid YAML{at}: {what}")]) from error
    if not isinstance(raw, dict):
        raise ConfigError([Problem("$", "expected a mapping with apiVersion and policy")])
    problems: list[Problem] = []
    _check(Config, raw, "$", problems)
    if not problems:
        config = msgspec.convert(raw, Config)
        problems = _check_sense(config)
        if not problems:
            return config
    raise ConfigError(problems)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice: the second would win without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            try:
                twice = key in seen
                seen.add(key)
            except TypeError as error:
                mark = key_node.start_mark
                raise yaml.MarkedYAMLError(None, None, "a key must be a text", mark) from error
            if twice:
                raise yaml.MarkedYAMLError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
        return super().construct_mapping(node, deep)


def _check(kind: Any, raw: Any, path: str, problems: list[Problem]) -> None:
    """Collect the faults of `raw` against a struct type, all of them and not only the first."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(raw, dict):
        fields = {f.encode_name: f for f in msgspec.structs.fields(kind)}
        for key in raw:
            if key not in fields:
                near = ", ".join(sorted(fields))
                problems.append(Problem(f"{path}.{key}", f"unknown key; known are: {near}"))
        for name, field in fields.items():
            if name in raw:
                _check(_inner(field.type), raw[name], f"{path}.{name}", problems)
            elif field.required:
                problems.append(Problem(f"{path}.{name}", "is required"))
        return
    args = getattr(kind, "__args__", ())
    if getattr(kind, "__origin__", None) is tuple and isinstance(raw, list) and args:
        for i, item in enumerate(raw):
            _check(args[0], item, f"{path}[{i}]", problems)
        return
    try:
        msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$")
        problems.append(Problem(path + where.rstrip("`"), text[0].lower() + text[1:]))
    except UnicodeEncodeError:  # YAML escapes of halves of characters
        problems.append(Problem(path, "a text that is no Unicode"))


def _inner(kind: Any) -> Any:
    """The struct in `Struct | None`; anything else as it is."""
    for arg in getattr(kind, "__args__", ()):
        if (
            isinstance(arg, type)
            and issubclass(arg, msgspec.Struct)
            and type(None) in kind.__args__
        ):
            return arg
    return kind


def _check_sense(config: Config) -> list[Problem]:
    """What types cannot say."""
    found: list[Problem] = []
    policy = config.policy
    if not CLUSTER_RE.fullmatch(policy.cluster):
        text = "must be 1 to 40 of a-z, 0-9 and -, and not begin or end with -"
        found.append(Problem("$.policy.cluster", text))
    if policy.partition and not OPTION_RE.fullmatch(policy.partition):
        found.append(Problem("$.policy.partition", "is not a Slurm partition name"))
    if not policy.resources:
        text = "name at least one extended resource, such as nvidia.com/gpu"
        found.append(Problem("$.policy.resources", text))
    for name, gpu_type in policy.resources.items():
        if "/" not in name:
            text = "is no extended resource name: it has no domain"
            found.append(Problem(f"$.policy.resources.{name}", text))
        if gpu_type and not OPTION_RE.fullmatch(gpu_type):
            found.append(Problem(f"$.policy.resources.{name}", "is not a Slurm GRES type"))
    for i, rule in enumerate(policy.identities):
        for word in ("accounts", "qos", "partitions", "reservations"):
            for j, name in enumerate(getattr(rule, word)):
                if not OPTION_RE.fullmatch(name):
                    path = f"$.policy.identities[{i}].{word}[{j}]"
                    found.append(Problem(path, "is not a Slurm name"))
    if policy.granularity is Granularity.NODE and policy.default_minutes > policy.max_minutes:
        found.append(Problem("$.policy.defaultMinutes", "is more than maxMinutes"))
    # A site without agents says nothing of them, whatever its resource is called.
    if config.node != Node() and policy.resources and config.node.resource not in policy.resources:
        found.append(Problem("$.node.resource", "is not one of policy.resources"))
    found += [Problem(f"$.pool.groups{path}", text) for path, text in faults(config.pool.groups)]
    for name, wish in config.pool.names.items():
        try:
            expand(wish)
        except ParseError as error:
            found.append(Problem(f"$.pool.names.{name}", f"is not a Slurm node: {error}"))
    if config.link.node_ca and not (config.link.tls and config.link.clients):
        text = "needs tls, and clients: whom its authority signs must not ask for claims"
        found.append(Problem("$.link.nodeCa", text))
    if config.slurm.poll.min_s > config.slurm.poll.max_s:
        found.append(Problem("$.slurm.poll.minS", "is more than maxS"))
    if config.kube.lease.renew_s * 2 >= config.kube.lease.duration_s:
        text = "must be less than half of durationS, so that one lost renewal does no harm"
        found.append(Problem("$.kube.lease.renewS", text))
    for path, address in (
        ("$.link.listen", config.link.listen),
        ("$.admin.listen", config.admin.listen),
        ("$.node.listen", config.node.listen),
    ):
        if address.startswith("unix:"):
            continue
        _host, _, port = address.rpartition(":")
        if not port.isdigit() or int(port) > 65535:
            found.append(Problem(path, "expected host:port"))
    return found


def changed_sections(old: Config, new: Config) -> list[str]:
    """Names of the sections that differ and that only a restart puts in force."""
    return [s for s in NEEDS_RESTART if getattr(old, s) != getattr(new, s)]


def check_reload(old: Config, new: Config) -> None:
    """Refuse what would tear running claims from their pods.

    Raises:
        ConfigError: the cluster id differs: it is in the name of every claim.

    """
    if new.policy.cluster != old.policy.cluster:
        text = "cannot change while pods run: it is in the name of every claim"
        raise ConfigError([Problem("$.policy.cluster", text)])
