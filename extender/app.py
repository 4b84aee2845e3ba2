"""Puts the extender together: link -> sight -> server, binder -> API server; starts and stops it.

No globals: everything that touches the world is passed in, so that tests run this very object with
a view as a value, and the benchmark with a real link.
"""

from __future__ import annotations

from collections.abc import Mapping
from ssl import SSLContext
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry

from extender.bind import AsksForGpus, Binder, Claims, PostBinding
from extender.filter import Freshness
from extender.inflight import InFlight
from extender.metrics import Metrics, SightCollector
from extender.server import Bounds, ExtenderServer
from extender.sight import Limits, Sight, Source
from slurmbridge.admin import AdminServer
from slurmbridge.clock import Clock
from slurmbridge.log import get_logger

_log = get_logger(__name__)

STOP_S = 5.0
"""Longest time for binds under way to end when the process stops."""


class Link(Source, Claims, Protocol):
    """The client of the link."""


class Listen(msgspec.Struct, frozen=True):
    """Host ("" all addresses) and port (0 any free one)."""

    host: str
    port: int


class Extender:
    """One extender process.

    Args:
        link: views and claims.
        post: posts Bindings. asks_for_gpus: looks at a pod.
        clock: for ages, latencies and deadlines.
        token: short random text for cause ids.
        limits: ages of the view. bounds: how much at once.

    """

    def __init__(
        self,
        link: Link,
        post: PostBinding,
        asks_for_gpus: AsksForGpus,
        clock: Clock,
        *,
        token: str,
        limits: Limits | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self._link = link
        registry = CollectorRegistry()
        inflight = InFlight()
        self._inflight = inflight
        self.sight = Sight(link, inflight, clock, limits or Limits())
        self._binder = Binder(link, post, asks_for_gpus, inflight, clock)
        self.server = ExtenderServer(
            self.sight,
            self._binder,
            inflight,
            Metrics(registry),
            clock,
            bounds=bounds or Bounds(),
            token=token,
        )
        registry.register(SightCollector(self._gauges))
        self.admin = AdminServer(
            live=lambda: {"loop": ""}, ready=self._ready, snapshot=self._snapshot, registry=registry
        )

    async def start(self, listen: Listen, admin: Listen, tls: SSLContext | None = None) -> None:
        """Listen on both ports.

        Raises:
            ConfigError: an address cannot be used.

        """
        await self.admin.start(admin.host, admin.port)
        await self.server.start(listen.host, listen.port, tls)
        _log.info("serving", port=self.server.port, admin_port=self.admin.port, tls=tls is not None)

    async def stop(self) -> None:
        """Take no more requests, let binds under way end, close."""
        await self.server.stop()
        await self._binder.close(STOP_S)
        await self.admin.stop()

    def _ready(self) -> Mapping[str, str]:
        freshness = self.sight.freshness()
        known = self._link.policy is not None
        return {
            "view": "no view, or too old" if freshness is Freshness.BLIND else "",
            "policy": "" if known else "no policy yet",
        }

    def _snapshot(self) -> bytes:
        return msgspec.json.encode(self.sight.facts(), order="deterministic")

    def _gauges(self) -> Mapping[str, tuple[str, float | None]]:
        view = self._link.view
        return {
            "view_age_seconds": (
                "Age of the reading of slurmctld behind the view; absent without a view.",
                self._link.age_s(),
            ),
            "view_generation": (
                "Generation of the view; begins anew with each leader.",
                None if view is None else float(view.generation),
            ),
            "view_nodes": ("Pool nodes in the view.", 0.0 if view is None else len(view.nodes)),
            "in_flight": (
                "Binds whose claim the view does not show yet.",
                float(len(self._inflight)),
            ),
        }
