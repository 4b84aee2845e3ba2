"""Prometheus metrics of one extender process; docs/metrics.md tells what to make of them.

kube-scheduler has no latency metric per extender, so ours are the only ones. No label holds a pod
or a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from slurmbridge.pool.reason import Reason

PREFIX: Final = "slurmbridge_extender_"
LATENCY_S: Final = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
VERBS: Final = ("filter", "prioritize", "preempt", "bind")


class Metrics:
    """Counters and histograms, each series made at the start so that none appears late."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            f"{PREFIX}request_seconds",
            "Time inside the server by verb, from the request's headers to its answer.",
            ("verb",),
            registry=registry,
            buckets=LATENCY_S,
        )
        self._requests = Counter(
            f"{PREFIX}requests",
            "Requests by verb and outcome (passed, refused, error, bound, overloaded, ...).",
            ("verb", "outcome"),
            registry=registry,
        )
        self._verdicts = Counter(
            f"{PREFIX}verdicts",
            "Nodes that were refused to pods by filter, by reason.",
            ("reason",),
            registry=registry,
        )
        self.active = Gauge(
            f"{PREFIX}requests_active", "Requests being read or answered.", registry=registry
        )
        for verb in VERBS:
            self._seconds.labels(verb)
        for reason in Reason:
            self._verdicts.labels(reason)

    def answered(self, verb: str, outcome: str, seconds: float) -> None:
        """One request is done."""
        self._seconds.labels(verb).observe(seconds)
        self._requests.labels(verb, outcome).inc()

    def refused(self, reasons: Mapping[Reason, int]) -> None:
        """What a filter answer has refused."""
        for reason, count in reasons.items():
            self._verdicts.labels(reason).inc(count)


class SightCollector(Collector):
    """Gauges read when scraped. A value that is not known is left out, never 0.

    Args:
        read: gauge name without prefix -> (help text, value).

    """

    def __init__(self, read: Callable[[], Mapping[str, tuple[str, float | None]]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Make all gauges."""
        for name, (text, value) in self._read().items():
            family = GaugeMetricFamily(f"{PREFIX}{name}", text)
            if value is not None:
                family.add_metric([], value)
            yield family
