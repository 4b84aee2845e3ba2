"""Series per GPU: who owns it, and its use by the agent's own reading of the driver."""

from prometheus_client import CollectorRegistry, generate_latest

from slurmbridge.node.book import BookEntry, NativeJob
from slurmbridge.node.device import DeviceMap, Gpu
from slurmbridge.node.inventory import Usage
from slurmbridge.node.metrics import NodeCollector, NodeFigures

DEVICES = DeviceMap(gpus=tuple(Gpu(i, f"GPU-{i}", 7 - i, f"/dev/nvidia{7 - i}") for i in range(3)))
POD = BookEntry("u-1", "team/train-0", 14, {0})
JOB = NativeJob(12, "alice", "ml", "main", (1,))


def series(**figures):
    registry = CollectorRegistry()
    registry.register(NodeCollector(lambda: NodeFigures(devices=DEVICES, **figures)))
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if line.startswith("slurmbridge_node_gpu_"))


def test_each_gpu_has_the_names_of_its_owner():
    assert series(pods=(POD,), native=(JOB,)) == [
        (
            'slurmbridge_node_gpu_owner{account="",gpu="0",job="14",kind="pod",minor="7",'
            'namespace="team",partition="",pod="train-0",pod_uid="u-1",user="",uuid="GPU-0"} 1.0'
        ),
        (
            'slurmbridge_node_gpu_owner{account="ml",gpu="1",job="12",kind="job",minor="6",'
            'namespace="",partition="main",pod="",pod_uid="",user="alice",uuid="GPU-1"} 1.0'
        ),
    ]


def test_use_is_told_in_base_units_and_what_is_not_known_is_absent():
    known = Usage(utilisation=50, memory_used=1 << 30, memory_total=4 << 30, power_mw=400_500)
    found = series(usage={"GPU-0": known, "GPU-1": Usage(memory_used=0)})
    labels = '{gpu="0",minor="7",uuid="GPU-0"}'
    assert found == sorted(
        [
            f"slurmbridge_node_gpu_utilisation_ratio{labels} 0.5",
            f"slurmbridge_node_gpu_memory_used_bytes{labels} 1.073741824e+09",
            'slurmbridge_node_gpu_memory_used_bytes{gpu="1",minor="6",uuid="GPU-1"} 0.0',
            f"slurmbridge_node_gpu_memory_total_bytes{labels} 4.294967296e+09",
            f"slurmbridge_node_gpu_power_watts{labels} 400.5",
        ]
    )
    assert series() == []
