"""`slurmbridge doctor`: is this site's Slurm set up as the bridge needs it, and can we reach it?

Each finding says what is wrong and what to do. It only reads.
"""

from __future__ import annotations

import os

import msgspec

from slurmbridge.clock import SystemClock
from slurmbridge.config import Config
from slurmbridge.kube.access import Access
from slurmbridge.kube.cluster import ClusterPin
from slurmbridge.kube.session import KubeSession
from slurmbridge.pool.errors import ConfigError, PeerError
from slurmbridge.pool.preflight import preflight
from slurmbridge.slurm.command import SlurmCommand
from slurmbridge.slurm.reader import SlurmReader


class Finding(msgspec.Struct, frozen=True):
    """level: `ok`, `warning` or `error`."""

    level: str
    text: str


async def examine(config: Config) -> list[Finding]:
    """Look at both sides; errors first."""
    findings = [*await _slurm(config), *await _kube(config)]
    order = ("error", "warning", "ok")
    return sorted(findings, key=lambda f: order.index(f.level))


async def _slurm(config: Config) -> list[Finding]:
    command = SlurmCommand(config.slurm.conf, config.slurm.commands)
    reader = SlurmReader(command, SystemClock(), timeout_s=config.slurm.poll.timeout_s)
    try:
        snapshot = await reader.snapshot()
    except PeerError as error:
        return [Finding("error", f"Slurm cannot be read: {error}")]
    finally:
        command.close()
    gpus = sum(node.gpu_total for node in snapshot.nodes.values())
    summary = (
        f"Slurm {snapshot.config.version}, cluster {snapshot.config.cluster}: "
        f"{len(snapshot.nodes)} nodes, {gpus} GPUs, read in {snapshot.ended - snapshot.began:.2f} s"
    )
    found = [Finding("ok", summary)]
    for sentence in preflight(snapshot, config.policy.partition, config.policy.default_minutes):
        level, _, text = sentence.partition(" ")
        found.append(Finding(level.rstrip(":").lower(), text))
    owner = snapshot.config.slurm_user
    if os.geteuid() != 0 and owner and f"({os.geteuid()})" not in owner:
        text = (
            f"this runs as uid {os.geteuid()}, SlurmUser is {owner}: only root and SlurmUser may "
            "put their claims before pending jobs and see hidden partitions; set runAsUser"
        )
        found.append(Finding("error", text))
    return found


async def _kube(config: Config) -> list[Finding]:
    clock = SystemClock()
    try:
        access = Access.choose(config.kube.kubeconfig, clock)
        async with KubeSession(access) as session:
            for path in ("/api/v1/pods", "/api/v1/nodes"):
                await session.request("GET", path, params={"limit": "1"})
            await ClusterPin(session, config.kube.cluster_uid).check()
    except ConfigError as error:
        return [Finding("error", f"Kubernetes: {error}")]
    except PeerError as error:
        return [Finding("error", f"Kubernetes cannot be read: {error}")]
    return [Finding("ok", f"Kubernetes at {access.server}: pods and nodes can be read")]
