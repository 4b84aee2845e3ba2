from __future__ import annotations

from pathlib import Path

from tests.support.slurm_config import (
    NodeGroup,
    Places,
    SlurmConfig,
    gres_conf,
    slurm_conf,
    slurmdbd_conf,
)

PLACES = Places(Path("/c"), 7000, "alice")


def lines(config: SlurmConfig) -> list[str]:
    return slurm_conf(config, PLACES).splitlines()


def test_each_node_has_its_own_port_after_those_of_the_daemons() -> None:
    groups = (NodeGroup(2), NodeGroup(3, prefix="cpu", gpus=0, cpus=8, memory_mb=1000))
    nodes = [line for line in lines(SlurmConfig(groups=groups)) if line.startswith("NodeName=")]
    assert "NodeName=gpu[001-002]" in nodes[0]
    assert "Port=[7003-7004] CPUs=64 RealMemory=512000 Gres=gpu:a100:8 " in nodes[0]
    assert "Port=[7005-7007] CPUs=8 RealMemory=1000 State=UNKNOWN" in nodes[1]


def test_an_extra_setting_replaces_ours_and_an_extra_line_is_added() -> None:
    reservation = "PartitionName=night Nodes=ALL MaxTime=60"
    got = lines(SlurmConfig(extra=("KillWait=30", reservation)))
    assert [line for line in got if line.startswith("KillWait")] == ["KillWait=30"]
    assert got[-1] == reservation


def test_gpus_are_files_or_only_counted() -> None:
    numbered = gres_conf(SlurmConfig(nodes=2), PLACES)
    assert "NodeName=gpu[001-002] Name=gpu Type=a100 File=/c/dev/nvidia[0-7]\n" in numbered
    counted = gres_conf(SlurmConfig(nodes=2, numbered=False, gpu_type=""), PLACES)
    assert "NodeName=gpu[001-002] Name=gpu Count=8\n" in counted


def test_topology_and_scripts_are_only_set_when_given() -> None:
    plain = "\n".join(lines(SlurmConfig()))
    assert "Topology" not in plain
    assert "Epilog" not in plain
    full = lines(SlurmConfig(topology="SwitchName=s Nodes=gpu001\n", epilog="/e"))
    assert {"TopologyPlugin=topology/tree", "Epilog=/e"} <= set(full)


def test_limits_are_kept_where_accounting_is_asked_for() -> None:
    assert "AccountingStorageEnforce" not in "\n".join(lines(SlurmConfig()))
    full = lines(SlurmConfig(accounting=True))
    assert {"AccountingStoragePort=7002", "AccountingStorageEnforce=limits,qos,safe"} <= set(full)
    assert "DbdPort=7002\n" in slurmdbd_conf(PLACES)


def test_wide_clusters_have_wide_node_names() -> None:
    assert NodeGroup(1000).names[0] == "gpu0001"
    assert NodeGroup(1000).hostlist == "gpu[0001-1000]"
