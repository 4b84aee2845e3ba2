"""Prometheus metrics of the bridge. docs/metrics.md is made from the help texts here.

Gauges are read from the state when they are scraped; no label holds a pod or a node, so the number
of series does not grow with the cluster.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from slurmbridge.core import agents, completing, explain, publish
from slurmbridge.core.groupcount import GroupCount
from slurmbridge.core.machine import Machine
from slurmbridge.core.shares import over
from slurmbridge.core.state import Phase
from slurmbridge.pool.ledger import GpuState
from slurmbridge.pool.noderecord import KINDS

LATENCY_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics:
    """All counters and histograms of one bridge process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"slurmbridge_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(
                f"slurmbridge_{name}_seconds", text, labels, registry=registry, buckets=LATENCY_S
            )

        self.polls = counter(
            "polls_total", "Readings of slurmctld by result (ok, failed).", "result"
        )
        self.poll_cost = histogram("poll_cost", "slurmctld's time that one reading took.")
        self.poll_wall = histogram("poll_wall", "Wall time of one reading of slurmctld.")
        self.claims = counter(
            "claims_total",
            "Answers to claims asked, by reason (granted, busy, unavailable, ...).",
            "reason",
        )
        self.claim_latency = histogram("claim", "From a claim asked to its answer.")
        self.actions = counter(
            "actions_total",
            "Actions carried out, by kind and result (ok, failed).",
            "kind",
            "result",
        )
        self.action_latency = histogram("action", "Time of one action, by kind.", "kind")
        self.evictions = counter("evictions_total", "Pods evicted because their claim was gone.")
        self.wakes = counter("wakes_total", "Refused pods that were woken because they now fit.")
        self.reports = counter("agent_reports_total", "Reports of node agents taken over.")
        self.reloads = counter(
            "config_reloads_total", "Configuration reloads by result (ok, bad).", "result"
        )


class PoolCollector(Collector):
    """Gauges of the pool, read from the machine when scraped.

    Args:
        machine: gives the machine of the current leadership, or None.
        queue: gives the number of events that wait.

    """

    def __init__(self, machine: Callable[[], Machine | None], queue: Callable[[], int]) -> None:
        self._machine = machine
        self._queue = queue

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Make all gauges."""
        machine = self._machine()
        leader = GaugeMetricFamily("slurmbridge_leader", "1 on the replica that leads.")
        leader.add_metric([], float(machine is not None))
        yield leader
        waiting = GaugeMetricFamily("slurmbridge_events_waiting", "Events not handled yet.")
        waiting.add_metric([], float(self._queue()))
        yield waiting
        if machine is None:
            return
        state = machine.state
        publish.refresh(state)
        gpus, phases = explain.gpus_by_state(state), explain.claims_by_phase(state)
        ledgers = (state.ledgers.get(name) for name in state.kube_of)
        conflicts = sum(len(ledger.conflicts) for ledger in ledgers if ledger is not None)
        yield _by_label("slurmbridge_gpus", "GPUs of the pool by state.", "state", gpus, GpuState)
        yield _by_label("slurmbridge_claims", "Claims by phase.", "phase", phases, Phase)
        yield _by_label(
            "slurmbridge_agents",
            "Pool nodes by what their agents are: ready, closed (no pods), silent, absent.",
            "state",
            agents.count(state),
            agents.STATES,
        )
        yield _by_label(
            "slurmbridge_agent_findings",
            "What the audits of the node agents find now, by kind.",
            "kind",
            agents.findings(state),
            KINDS,
        )
        yield from _groups(state.shares.groups.values())
        age = state.age_s if state.snapshot is not None else -1.0
        for name, text, value in (
            ("slurmbridge_nodes", "Nodes of the pool.", len(state.slurm_of)),
            (
                "slurmbridge_nodes_blocked",
                "Nodes of the pool that take no new pods.",
                sum(1 for v in state.views.values() if v.blocked or not v.agent),
            ),
            (
                "slurmbridge_pods_waiting",
                "Pods with pool GPUs that are not bound.",
                sum(1 for p in state.pods.values() if not p.node and not p.is_over),
            ),
            ("slurmbridge_slurm_age_seconds", "Age of the last reading of slurmctld.", age),
            ("slurmbridge_poll_interval_seconds", "Current poll interval.", state.interval_s),
            ("slurmbridge_conflicts", "GPUs that two owners seem to have.", conflicts),
            (
                "slurmbridge_agents_needed",
                "1 where nodes take pods only with a live agent.",
                float(agents.are_needed(state)),
            ),
            (
                "slurmbridge_breaker_open",
                "1 while mass loss of claims has stopped evictions.",
                float(state.breaker_since is not None),
            ),
            (
                "slurmbridge_nodes_drained_by_us",
                "Slurm nodes that are drained because of their Kubernetes node.",
                len(state.nodes.ours),
            ),
            (
                "slurmbridge_node_drains_held",
                "Drains that are held back because too many nodes are not Ready at once.",
                len(state.nodes.held),
            ),
            (
                "slurmbridge_completing_seconds",
                "For how long the oldest of the jobs COMPLETING on pool nodes has been over.",
                completing.longest_s(state),
            ),
            (
                "slurmbridge_set_aside",
                "Objects that are set aside, since the bridge has failed over each.",
                len(state.aside.found),
            ),
            ("slurmbridge_view_generation", "Generation of the view.", state.generation),
        ):
            gauge = GaugeMetricFamily(name, text)
            gauge.add_metric([], float(value))
            yield gauge


def _groups(groups: Iterable[GroupCount]) -> Iterable[GaugeMetricFamily]:
    gpus = GaugeMetricFamily(
        "slurmbridge_group_gpus",
        "GPUs of a node group: all, those of pods and of native jobs, and what pods may hold.",
        labels=["group", "what"],
    )
    side = GaugeMetricFamily(
        "slurmbridge_group_over",
        "1 while a side holds more of a node group than it should.",
        labels=["group", "side"],
    )
    for count in groups:
        name = count.group.name
        for what, value in (
            ("all", count.total),
            ("pods", count.pods),
            ("native", count.native),
            ("pods_most", count.most),
        ):
            gpus.add_metric([name, what], float(value))
        for word in ("kubernetes", "slurm"):
            side.add_metric([name, word], float(word in over(count)))
    yield from (gpus, side)


def _by_label(
    name: str, text: str, label: str, counts: Count[str], words: Iterable[object]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for word in words:
        family.add_metric([str(word)], float(counts.get(str(word), 0)))
    return family
