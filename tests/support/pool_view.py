"""Builders of views and asks: only what a test says differs from a plain 8-GPU node."""

from __future__ import annotations

from slurmbridge.pool.claim import Ask
from slurmbridge.pool.record import GpuCount, GpuRequest
from slurmbridge.pool.view import HeldClaim, NodeView, View, Window

NOW = 1_800_000_000.0


def make_node(name="n1", *, free=8, total=8, kind="", **fields):
    """A node with GPUs of one type (`kind`), or of several: free={"a100": 2}, total={...}."""

    def counts(given):
        given = given if isinstance(given, dict) else {kind: given}
        return tuple(GpuCount(t, n) for t, n in given.items())

    fields = {"cpus_free": 64, "memory_free_mib": 500_000} | fields
    return NodeView(
        kube_node=name, slurm_node=name, total=counts(total), free=counts(free), **fields
    )


def make_view(*nodes, held=(), generation=1, as_of=NOW, interval_s=1.0, term="t1"):
    return View(
        term=term,
        generation=generation,
        as_of=as_of,
        interval_s=interval_s,
        nodes={n.kube_node: n for n in nodes},
        held={uid: HeldClaim(uid, node, job) for uid, node, job in held},
    )


def make_ask(gpus=1, kind="", **fields):
    fields = {"cpus": 4, "memory_mib": 1000, "minutes": 60, "rolling": False} | fields
    return Ask(gpu=GpuRequest(gpus, kind), **fields)


def window(start_min, end_min=None, name="maint", now=NOW):
    """A reservation from `start_min` to `end_min` minutes after now."""
    return Window(name, now + 60 * start_min, None if end_min is None else now + 60 * end_min)
