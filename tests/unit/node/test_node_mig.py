"""GPUs in MIG mode: each MIG device is a GPU of its own, of the type that gres.conf gives it."""

import importlib
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from slurmbridge.node import nvml
from slurmbridge.node.device import map_devices
from slurmbridge.node.gresconf import read_gres_conf
from slurmbridge.pool.errors import PeerUnavailable

CONF = """\
NodeName=gpu001 Name=gpu Type=1g.10gb MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap21,/dev/nvidia-caps/nvidia-cap22
NodeName=gpu001 Name=gpu Type=3g.40gb MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap30,/dev/nvidia-caps/nvidia-cap31
NodeName=gpu001 Name=gpu Type=h100 File=/dev/nvidia1
"""
MINORS = """\
config 1
monitor 2
gpu0/gi7/access 30
gpu0/gi7/ci0/access 31
gpu0/gi1/access 21
gpu0/gi1/ci0/access 22
"""


class Handle:
    """A device of the fake driver."""

    def __init__(self, uuid, minor=0, mig=0, parts=(), gi=0, ci=0):
        self.uuid, self.minor, self.mig, self.parts, self.gi, self.ci = (
            uuid,
            minor,
            mig,
            parts,
            gi,
            ci,
        )


class NVMLError(Exception):
    """Root of the driver's errors."""


class NotFound(NVMLError):
    """A place of the table that is empty."""


class NotSupported(NVMLError):
    """Not of this device."""


class Mismatch(Exception):
    """The package asks for what this driver does not have; not one of the driver's errors."""


def part_of(handle, place):
    if handle.parts[place] is None:
        raise NotFound
    return handle.parts[place]


def running(handle):
    if handle.parts:
        raise NotSupported("processes of a GPU in MIG mode are those of its parts")
    return [types.SimpleNamespace(pid=100 + handle.gi)]


def unsupported(*_):
    raise NotSupported


GPUS = [
    Handle("GPU-a", 0, mig=1, parts=(Handle("MIG-x", gi=7), None, Handle("MIG-y", gi=1))),
    Handle("GPU-b", 1),
]
DRIVER = types.SimpleNamespace(
    NVMLError=NVMLError,
    NVMLError_NotFound=NotFound,
    NVMLError_NotSupported=NotSupported,
    NVMLError_FunctionNotFound=NotSupported,
    NVMLError_InvalidArgument=NotSupported,
    NVMLLibraryMismatchError=Mismatch,
    NVML_DEVICE_MIG_ENABLE=1,
    nvmlInit=lambda: None,
    nvmlDeviceGetCount=lambda: len(GPUS),
    nvmlDeviceGetHandleByIndex=lambda i: GPUS[i],
    nvmlDeviceGetMinorNumber=lambda h: h.minor,
    nvmlDeviceGetUUID=lambda h: h.uuid,
    nvmlDeviceGetName=lambda h: "H100",
    nvmlDeviceGetMigMode=lambda h: (h.mig, h.mig),
    nvmlDeviceGetNumaNodeId=unsupported,
    nvmlDeviceGetMaxMigDeviceCount=lambda h: len(h.parts),
    nvmlDeviceGetMigDeviceHandleByIndex=part_of,
    nvmlDeviceGetGpuInstanceId=lambda h: h.gi,
    nvmlDeviceGetComputeInstanceId=lambda h: h.ci,
    nvmlDeviceGetComputeRunningProcesses=running,
    nvmlDeviceGetGraphicsRunningProcesses=unsupported,
    nvmlDeviceGetMPSComputeRunningProcesses=unsupported,
    nvmlDeviceGetUtilizationRates=unsupported,
    nvmlDeviceGetMemoryInfo=lambda h: types.SimpleNamespace(used=1, total=2),
    nvmlDeviceGetPowerUsage=unsupported,
)


@pytest.fixture
def inventory(monkeypatch, tmp_path):
    (tmp_path / "mig-minors").write_text(MINORS)
    monkeypatch.setitem(sys.modules, "pynvml", DRIVER)
    minors = nvml.read_mig_minors(tmp_path / "mig-minors")
    monkeypatch.setattr(nvml, "read_mig_minors", lambda: minors)
    return nvml.NvmlInventory()


def test_mig_devices_are_joined_with_gres_conf_by_the_file_of_their_compute_instance(inventory):
    devices = map_devices(read_gres_conf(CONF, "gpu001"), inventory.find())
    assert devices.fault == ""
    assert [(g.index, g.uuid, g.type, g.minor) for g in devices.gpus] == [
        (0, "MIG-y", "1g.10gb", 0),
        (1, "MIG-x", "3g.40gb", 0),
        (2, "GPU-b", "h100", 1),
    ]
    assert devices.gpus[0].files == (
        "/dev/nvidia0",
        "/dev/nvidia-caps/nvidia-cap21",
        "/dev/nvidia-caps/nvidia-cap22",
    )
    assert devices.gpus[2].files == ()


def test_a_gpu_in_mig_mode_that_gres_conf_takes_whole_closes_the_node(inventory):
    conf = "Name=gpu File=/dev/nvidia[0-1]"
    devices = map_devices(read_gres_conf(conf, "gpu001"), inventory.find())
    assert "/dev/nvidia0 (index 0) is in MIG mode, gres.conf takes it whole" in devices.fault


def test_a_mig_device_that_gres_conf_does_not_name_closes_the_node(inventory):
    conf = "\n".join(CONF.splitlines()[1:])
    devices = map_devices(read_gres_conf(conf, "gpu001"), inventory.find())
    assert "nvidia-cap22 (MIG-y) is not in gres.conf" in devices.fault


def test_use_is_read_of_each_part_and_not_of_the_gpu_in_mig_mode(inventory):
    usage = inventory.usage()
    assert {uuid: use.pids for uuid, use in usage.items()} == {
        "MIG-x": (107,),
        "MIG-y": (101,),
        "GPU-b": (100,),
    }
    assert usage["MIG-x"].utilisation is None
    assert usage["MIG-x"].memory_total == 2


def test_clients_of_an_mps_server_use_the_gpu_too(inventory, monkeypatch):
    client = types.SimpleNamespace(pid=777)
    monkeypatch.setattr(DRIVER, "nvmlDeviceGetMPSComputeRunningProcesses", lambda h: [client])
    assert inventory.usage()["GPU-b"].pids == (100, 777)


def test_a_driver_that_is_older_than_the_package_is_not_taken_for_idle(inventory, monkeypatch):
    def too_new(_):
        raise Mismatch("use a versioned function")

    monkeypatch.setattr(DRIVER, "nvmlDeviceGetGraphicsRunningProcesses", too_new)
    assert inventory.usage()["GPU-b"].pids == (100,)
    monkeypatch.setattr(DRIVER, "nvmlDeviceGetComputeRunningProcesses", too_new)
    with pytest.raises(PeerUnavailable, match="too old for nvidia-ml-py"):
        inventory.usage()


def test_every_name_of_the_played_driver_is_one_of_the_real_package():
    real = importlib.import_module("pynvml")
    assert [name for name in vars(DRIVER) if not hasattr(real, name)] == []


def test_no_list_of_minors_means_that_no_file_is_known(tmp_path):
    assert nvml.read_mig_minors(tmp_path / "none") == {}


def test_the_order_of_mig_lines_is_that_of_the_indices():
    read = read_gres_conf(CONF, "gpu001")
    assert [(g.index, g.type, g.path) for g in read] == [
        (0, "1g.10gb", "/dev/nvidia-caps/nvidia-cap22"),
        (1, "3g.40gb", "/dev/nvidia-caps/nvidia-cap31"),
        (2, "h100", "/dev/nvidia1"),
    ]


def test_questions_to_the_driver_never_overlap(inventory, monkeypatch):
    inside, overlaps = [], []

    def slow():
        overlaps.extend(inside)
        inside.append("count")
        threading.Event().wait(0.002)
        inside.pop()
        return len(GPUS)

    monkeypatch.setattr(DRIVER, "nvmlDeviceGetCount", slow)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(one) for one in (inventory.find, inventory.usage) * 6]
        assert all(one.result() for one in asked)
    assert overlaps == []
