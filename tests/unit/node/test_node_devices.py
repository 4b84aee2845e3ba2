"""gres.conf and the driver, joined: an index is only known where both sides agree."""

import pytest

from slurmbridge.node.device import FoundGpu, map_devices
from slurmbridge.node.gresconf import GresFile, read_gres_conf
from slurmbridge.pool.errors import ParseError

READ = {
    "one line with a range": (
        "NodeName=gpu[001-004] Name=gpu Type=a100 File=/dev/nvidia[0-2]",
        [(0, "a100", "/dev/nvidia0"), (1, "a100", "/dev/nvidia1"), (2, "a100", "/dev/nvidia2")],
    ),
    "the order is the one written, not sorted": (
        "Name=gpu File=/dev/nvidia[2-3,0-1]",
        [(0, "", "/dev/nvidia2"), (1, "", "/dev/nvidia3"), (2, "", "/dev/nvidia0"), (3, "", "/dev/nvidia1")],
    ),
    "several lines count on": (
        "AutoDetect=off\nName=gpu Type=h100 File=/dev/nvidia6\nName=gpu Type=a100 File=/dev/nvidia0,/dev/nvidia5",
        [(0, "h100", "/dev/nvidia6"), (1, "a100", "/dev/nvidia0"), (2, "a100", "/dev/nvidia5")],
    ),
    "lines of other nodes and other GRES are passed over": (
        (
            "NodeName=cpu[1-9] Name=gpu Count=4\nNodeName=gpu001 Name=shard Count=8\n"
            "NodeName=gpu001 Name=gpu File=/dev/nvidia0 Cores=0-15  # first socket"
        ),
        [(0, "", "/dev/nvidia0")],
    ),
    "a line that goes on": (
        "NodeName=gpu001 Name=gpu \\\n  Type=a100 File=/dev/nvidia0",
        [(0, "a100", "/dev/nvidia0")],
    ),
    "keys in any case": ("nodename=gpu001 NAME=gpu FILE=/dev/nvidia0", [(0, "", "/dev/nvidia0")]),
    "AutoDetect off on the node's own line": (
        "AutoDetect=nvml\nNodeName=gpu001 AutoDetect=off Name=gpu File=/dev/nvidia0",
        [(0, "", "/dev/nvidia0")],
    ),
    "AutoDetect of another node": (
        "NodeName=gpu002 AutoDetect=nvml Name=gpu\nNodeName=gpu001 Name=gpu File=/dev/nvidia0",
        [(0, "", "/dev/nvidia0")],
    ),
    "none here": ("NodeName=gpu009 Name=gpu File=/dev/nvidia0", []),
}  # fmt: skip

REFUSED = {
    "a count alone": ("Name=gpu Count=8", "without File="),
    "AutoDetect alone": ("AutoDetect=nvml", "write AutoDetect=off and File= lines"),
    "AutoDetect beside files": ("AutoDetect=nvml\nName=gpu File=/dev/nvidia0", "write AutoDetect=off"),
    "AutoDetect on the node's own line": (
        "AutoDetect=off\nNodeName=gpu001 Name=gpu AutoDetect=nvml File=/dev/nvidia0",
        "AutoDetect leaves the order",
    ),
    "a file twice": ("Name=gpu File=/dev/nvidia0\nName=gpu File=/dev/nvidia[0-1]", "twice"),
    "an include that cannot be followed": ("include more.conf", "include"),
    "a hostlist that is none": ("NodeName=gpu[001 Name=gpu File=/dev/nvidia0", "host list"),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_gres_conf_gives_the_files_in_the_order_of_their_indices(case):
    text, expected = READ[case]
    assert [(g.index, g.type, g.path) for g in read_gres_conf(text, "gpu001")] == expected


@pytest.mark.parametrize("case", REFUSED)
def test_what_leaves_the_order_open_is_refused(case):
    text, why = REFUSED[case]
    with pytest.raises(ParseError, match=why):
        read_gres_conf(text, "gpu001")


def test_an_include_is_followed():
    files = {"gpus.conf": "Name=gpu File=/dev/nvidia[0-1]"}
    assert len(read_gres_conf("Include gpus.conf", "gpu001", files.__getitem__)) == 2


def gres(*paths):
    return [GresFile(i, "a100", p) for i, p in enumerate(paths)]


def found(*minors, **more):
    return [FoundGpu(f"GPU-{m}", m, f"/dev/nvidia{m}", **more) for m in minors]


def test_the_map_follows_the_files_not_the_order_of_the_driver():
    devices = map_devices(gres("/dev/nvidia2", "/dev/nvidia0"), found(0, 2))
    assert devices.fault == ""
    assert devices.uuids([0]) == ["GPU-2"]
    assert devices.uuids([1, 0]) == ["GPU-2", "GPU-0"]
    assert devices.indices(["GPU-0", "other"]) == [1]


FAULTS = {
    "Slurm knows one more": (gres("/dev/nvidia0", "/dev/nvidia1"), found(0), "nvidia1 of gres.conf"),
    "the driver knows one more": (gres("/dev/nvidia0"), found(0, 1), "nvidia1 (GPU-1) is not in"),
    "MIG mode on": (gres("/dev/nvidia0"), found(0, mig=True), "MIG mode"),
    "no driver": (gres("/dev/nvidia0"), [], "no GPU was found"),
    "no gres.conf line": ([], found(0), "names no GPU"),
    "one UUID twice": (gres("/dev/nvidia0"), [*found(0), FoundGpu("GPU-0", 1, "/dev/nvidia1")], "twice"),
    "an id that the kubelet refuses": (gres("/dev/x"), [FoundGpu("G" * 64, 0, "/dev/x")], "63"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_where_the_sides_differ_there_is_no_map_but_a_reason(case):
    files, gpus, why = FAULTS[case]
    devices = map_devices(files, gpus)
    assert devices.gpus == ()
    assert why in devices.fault
