"""docs/extender.md names every reason, metric and limit as the code has them."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from extender.bind import BINDING_S, CLAIM_S
from extender.metrics import Metrics
from extender.server import Bounds
from extender.sight import Limits
from slurmbridge.pool.reason import Reason

TEXT = (Path(__file__).parents[3] / "docs" / "extender.md").read_text()


def test_every_reason_is_there():
    assert [] == [reason for reason in Reason if f"`{reason}`" not in TEXT]


def test_every_metric_is_there():
    registry = CollectorRegistry()
    Metrics(registry)
    names = {family.name.removeprefix("slurmbridge_extender_") for family in registry.collect()}
    assert set() == {name for name in names if f"`{name}" not in TEXT}


def test_limits_and_times_are_those_of_the_code():
    bounds, limits = Bounds(), Limits()
    for said in (
        f"{bounds.requests} requests and {bounds.binds} binds",
        f"{bounds.body_bytes >> 20} MiB a request",
        f"{bounds.held_bytes >> 20} MiB of requests",
        f"`--stale-s` ({limits.stale:g})",
        f"`--blind-s` ({limits.blind:g})",
        f"claim {CLAIM_S:g} s and Binding {BINDING_S:g} s",
    ):
        assert said in TEXT
