"""Metrics of one node: a join key from each GPU to its owner, the agent's own health.

`slurmbridge_node_gpu_owner` is 1 and carries who owns a GPU; joined on `uuid` with DCGM exporter's
series it gives utilisation and memory by job, user, account, pod and namespace. Without DCGM the
agent's own NVML series do. Values are made at each scrape from what the agent knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slurmbridge.node.book import BookEntry, NativeJob
from slurmbridge.node.device import DeviceMap
from slurmbridge.node.inventory import Usage
from slurmbridge.pool.noderecord import NodeFinding

OWNER: tuple[str, ...] = (
    "gpu",
    "uuid",
    "minor",
    "kind",
    "job",
    "user",
    "account",
    "partition",
    "namespace",
    "pod",
    "pod_uid",
)


class NodeFigures(msgspec.Struct, frozen=True):
    """What the series are made of; ages in seconds."""

    devices: DeviceMap
    pods: tuple[BookEntry, ...] = ()
    native: tuple[NativeJob, ...] = ()
    usage: dict[str, Usage] = {}
    findings: tuple[NodeFinding, ...] = ()
    registered: bool = False
    registrations: int = 0
    register_s: float = 0.0
    held: int = 0
    look_age_s: float = 0.0
    look_s: float = 0.0
    link_up: bool = False
    plugin: dict[str, int] = {}
    hooks: dict[str, int] = {}


class NodeCollector(Collector):
    """Gives the series of the moment."""

    def __init__(self, figures: Callable[[], NodeFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        f = self._figures()
        yield self._owners(f)
        yield from self._usage(f)
        for name, text, value in (
            ("registered", "Whether the kubelet listens to our devices now.", f.registered),
            (
                "closed",
                "Whether the node takes no pods (see its log for why).",
                bool(f.devices.fault),
            ),
            ("gpus", "GPUs in the map.", len(f.devices.gpus)),
            ("register_seconds", "Kubelet seen to taken by it, last time.", f.register_s),
            ("held_claims", "Claims whose end the Epilog holds up now.", f.held),
            ("look_age_seconds", "Age of the last look at the node.", f.look_age_s),
            ("look_seconds", "How long the last look took.", f.look_s),
            ("bridge_connected", "Whether the bridge takes our reports.", f.link_up),
        ):
            yield GaugeMetricFamily(f"slurmbridge_node_{name}", text, value=float(value))
        yield CounterMetricFamily(
            "slurmbridge_node_registrations", "Registrations with the kubelet.", f.registrations
        )
        findings = GaugeMetricFamily(
            "slurmbridge_node_findings", "What does not fit now, by kind.", labels=("kind",)
        )
        for kind in sorted({one.kind for one in f.findings}):
            findings.add_metric((kind,), sum(one.kind == kind for one in f.findings))
        yield findings
        for name, text, counts in (
            ("plugin_answers", "Answers to the kubelet, by outcome.", f.plugin),
            ("hook_questions", "Questions of Epilog and Prolog, by kind.", f.hooks),
        ):
            family = CounterMetricFamily(f"slurmbridge_node_{name}", text, labels=("what",))
            for what, count in sorted(counts.items()):
                family.add_metric((what,), count)
            yield family

    @staticmethod
    def _owners(f: NodeFigures) -> Metric:
        family = GaugeMetricFamily(
            "slurmbridge_node_gpu_owner", "1: who owns the GPU; join on uuid.", labels=OWNER
        )
        for gpu in f.devices.gpus:
            names = (str(gpu.index), gpu.uuid, str(gpu.minor))
            for entry in f.pods:
                if gpu.index in entry.gpus:
                    namespace, _, name = entry.ref.partition("/")
                    job = str(entry.job_id or "")
                    labels = (*names, "pod", job, "", "", "", namespace, name, entry.uid)
                    family.add_metric(labels, 1.0)
            for native in f.native:
                if gpu.index in native.gpus:
                    who = (native.user, native.account, native.partition)
                    family.add_metric((*names, "job", str(native.job_id), *who, "", "", ""), 1.0)
        return family

    @staticmethod
    def _usage(f: NodeFigures) -> Iterator[Metric]:
        for name, text, read in (
            ("utilisation_ratio", "Share of time with a kernel running.", _ratio),
            ("memory_used_bytes", "Memory in use.", lambda u: u.memory_used),
            ("memory_total_bytes", "Memory.", lambda u: u.memory_total),
            ("power_watts", "Power drawn.", _watts),
        ):
            family = GaugeMetricFamily(
                f"slurmbridge_node_gpu_{name}", text, labels=("gpu", "uuid", "minor")
            )
            for gpu in f.devices.gpus:
                use = f.usage.get(gpu.uuid)
                value = None if use is None else read(use)
                if value is not None:
                    family.add_metric((str(gpu.index), gpu.uuid, str(gpu.minor)), float(value))
            if family.samples:
                yield family


def _ratio(use: Usage) -> float | None:
    return None if use.utilisation is None else use.utilisation / 100


def _watts(use: Usage) -> float | None:
    return None if use.power_mw is None else use.power_mw / 1000
