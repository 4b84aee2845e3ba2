"""Against a real NVIDIA driver; on a machine without one it says so and does nothing."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time

import pytest

from slurmbridge.node import slurm_script as script
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
    assert read_map(INVENTORY, str(conf), "here").devices.fault == ""


class NoKubelet:
    async def list(self, deadline_s=1.0):
        return []


CONTEXT = """
import ctypes, sys

cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        sys.exit(f"{name}: CUDA error {code}")


device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(int(sys.argv[1])))
print("ready", flush=True)
sys.stdin.read()
"""
ALLOCATED = 64 << 20
INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""NVML numbers processes as the machine does, which a container of its own namespace cannot read."""


@contextlib.contextmanager
def context_on(gpu):
    """A child process with a CUDA context and some memory on one GPU; its process id."""
    argv = [sys.executable, "-c", CONTEXT, str(ALLOCATED)]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, env=environ, text=True, **pipes) as child:
        try:
            said = child.stdout.readline()
            assert said == "ready\n", child.communicate(timeout=10)[1]
            yield child.pid
        finally:
            child.kill()


def wait(reached, what, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < end, f"{what}: not in {timeout_s:g} s"
        time.sleep(0.1)


@pytest.fixture
def gpu():
    return next(gpu for gpu in INVENTORY.find() if not gpu.mig)


@pytest.fixture
def look(gpu, tmp_path):
    devices = map_devices([GresFile(0, "", gpu.path)], [gpu], file_identity)
    book = Book(str(tmp_path / "node.json"))
    book.gpus = devices.gpus
    book.save()
    return NodeLook({}, lambda: devices, INVENTORY, NoKubelet(), book, time.monotonic)


def test_use_is_told_in_bytes_percent_and_watts(gpu):
    use = INVENTORY.usage()[gpu.uuid]
    assert 0 < use.memory_used < use.memory_total
    assert use.utilisation is None or 0 <= use.utilisation <= 100
    assert use.power_mw is None or use.power_mw > 1000


@pytest.mark.skipif(
    os.readlink("/proc/self/ns/pid") != INITIAL_PID_NAMESPACE,
    reason="this PID namespace is not the machine's: NVML's process ids mean nothing here",
)
def test_a_gpu_context_is_seen_by_process_list_idle_check_and_hold_and_so_is_its_end(
    gpu, look, tmp_path
):
    def seen(pid):
        return pid in INVENTORY.usage()[gpu.uuid].pids

    def idle():
        """As PreStart asks for a pod that is about to start on this GPU."""
        return asyncio.run(look.busy("the-next-pod", [0]))

    def hooks():
        """As the Epilog asks when there is no agent (nvidia-smi)."""
        conf = {**script.DEFAULTS, "state": str(tmp_path / "node.json")}
        return script.contexts_left("0", conf)

    before = INVENTORY.usage()[gpu.uuid]
    with context_on(gpu) as pid:
        wait(lambda: seen(pid), "the process list names it")
        assert INVENTORY.usage()[gpu.uuid].memory_used >= before.memory_used + ALLOCATED
        (user,) = [u for u in asyncio.run(look.users([0])) if u.pid == pid]
        assert (user.index, user.pod, user.job) == (0, "", 0)
        assert idle() != ""
        assert asyncio.run(look.contexts([0])) != ""
        assert hooks() != ""
        if not before.pids:
            assert f"process {pid} (python" in idle()
            assert hooks() == f"process {pid} of no pod has a context on GPU 0"
    wait(lambda: not seen(pid), "the process list forgets it")
    if not before.pids:
        assert idle() == ""
        assert asyncio.run(look.contexts([0])) == ""
        assert hooks() == ""
