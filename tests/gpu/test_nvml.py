"""Against a real NVIDIA driver; on a machine without one it says so and does nothing."""

import asyncio
import os
import time

import pytest

from slurmbridge.node.book import Book
from slurmbridge.node.device import map_devices
from slurmbridge.node.gresconf import GresFile
from slurmbridge.node.inventory import read_map
from slurmbridge.node.look import NodeLook
from slurmbridge.node.nvml import NvmlInventory
from slurmbridge.node.slurm_script import file_identity
from slurmbridge.pool.errors import ConfigError, PeerUnavailable


def driver():
    try:
        inventory = NvmlInventory()
        inventory.find()
    except (ConfigError, PeerUnavailable) as error:
        return None, str(error)
    return inventory, ""


INVENTORY, WHY = driver()
pytestmark = pytest.mark.skipif(INVENTORY is None, reason=f"no NVIDIA driver here: {WHY}")


def test_discovery_names_every_gpu_with_uuid_minor_and_device_file():
    gpus = INVENTORY.find()
    assert gpus
    for gpu in gpus:
        assert gpu.uuid.startswith("GPU-")
        assert gpu.path == f"/dev/nvidia{gpu.minor}"
        assert file_identity(gpu.path) is not None


def test_the_map_joins_gres_conf_and_driver(tmp_path):
    gpus = [gpu for gpu in INVENTORY.find() if not gpu.mig]
    files = [GresFile(i, "", gpu.path) for i, gpu in enumerate(reversed(gpus))]
    devices = map_devices(files, gpus, file_identity)
    assert devices.fault == ""
    assert devices.uuids([0]) == [gpus[-1].uuid]
    conf = tmp_path / "gres.conf"
    conf.write_text("Name=gpu File=" + ",".join(gpu.path for gpu in gpus) + "\n")
    assert read_map(INVENTORY, str(conf), "here").fault == ""


class NoKubelet:
    async def list(self, deadline_s=1.0):
        return []


def test_a_process_that_opens_a_gpu_is_seen_and_makes_it_busy(tmp_path):
    gpu = next(gpu for gpu in INVENTORY.find() if not gpu.mig)
    devices = map_devices([GresFile(0, "", gpu.path)], [gpu], file_identity)
    look = NodeLook(
        {}, lambda: devices, INVENTORY, NoKubelet(), Book(str(tmp_path / "b")), time.monotonic
    )
    use = INVENTORY.usage()[gpu.uuid]
    assert use.memory_total > 0
    others = [pid for pid in use.pids if pid != os.getpid()]
    busy = asyncio.run(look.busy("", [0]))
    assert bool(busy) == bool(others)
