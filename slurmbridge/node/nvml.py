"""GPUs of NVIDIA's driver, by NVML (package `nvidia-ml-py`, extra `nvidia`).

Imported only where it is configured. Every call may fail while a driver is being replaced: that is
"not known now", never "no GPUs" and never "idle".
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from slurmbridge.node.device import FoundGpu
from slurmbridge.node.inventory import Usage
from slurmbridge.pool.errors import ConfigError, PeerUnavailable, Problem

PEER: Final = "nvml"
CAP: Final = "/dev/nvidia-caps/nvidia-cap{}"
MIG_MINORS: Final = Path("/proc/driver/nvidia-caps/mig-minors")
"""Lines `gpu0/gi1/ci0/access 22`: which capability file is for which instance of which GPU."""
_T = TypeVar("_T")


class NvmlInventory:
    """All GPUs that the driver shows; for any number of threads, one question at a time.

    The library is started anew after an error: no other thread may be inside it then.

    Raises:
        ConfigError: the package is not installed.

    """

    def __init__(self) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            text = "install slurmbridge[nvidia], or give a file of devices"
            raise ConfigError([Problem("$.node.devices", text)]) from error
        self._open = False
        self._lock = threading.Lock()

    def find(self) -> list[FoundGpu]:
        """See `Inventory.find`."""
        return self._asked("devices", self._find)

    def usage(self) -> dict[str, Usage]:
        """See `Inventory.usage`."""
        return self._asked(
            "usage",
            lambda: {
                _text(self._nvml.nvmlDeviceGetUUID(h)): self._usage(h)
                for whole in self._handles()
                for h in (self._parts(whole) if self._is_split(whole) else [whole])
            },
        )

    def close(self) -> None:
        """Let go of the driver."""
        with self._lock:
            if self._open:
                self._open = False
                self._nvml.nvmlShutdown()

    def _asked(self, op: str, question: Callable[[], _T]) -> _T:
        with self._lock:
            try:
                if not self._open:
                    self._nvml.nvmlInit()
                    self._open = True
                return question()
            except self._nvml.NVMLError as error:
                # After a driver's restart only a new start of the library helps.
                self._open = False
                raise PeerUnavailable(PEER, op, str(error)) from error
            except self._nvml.NVMLLibraryMismatchError as error:
                # Not an NVMLError: the driver is older than the package, and lacks what is asked.
                text = f"this driver is too old for nvidia-ml-py: {error}"
                raise PeerUnavailable(PEER, op, text) from error

    def _handles(self) -> list[Any]:
        count = self._nvml.nvmlDeviceGetCount()
        return [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]

    def _find(self) -> list[FoundGpu]:
        found: list[FoundGpu] = []
        for handle in self._handles():
            whole = self._gpu(handle)
            found.append(whole)
            if whole.mig:
                minors = read_mig_minors()
                found += [self._part(part, whole, minors) for part in self._parts(handle)]
        return found

    def _is_split(self, handle: Any) -> bool:
        nvml = self._nvml
        mode = self._optional(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
        return mode is not None and bool(mode == nvml.NVML_DEVICE_MIG_ENABLE)

    def _parts(self, handle: Any) -> list[Any]:
        """Handles of a GPU's MIG devices; places of the table may be empty."""
        nvml = self._nvml
        found = []
        for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
            except nvml.NVMLError_NotFound:
                continue
        return found

    def _part(self, handle: Any, whole: FoundGpu, minors: Mapping[str, int]) -> FoundGpu:
        nvml = self._nvml
        instance = f"gpu{whole.minor}/gi{nvml.nvmlDeviceGetGpuInstanceId(handle)}"
        compute = f"{instance}/ci{nvml.nvmlDeviceGetComputeInstanceId(handle)}"
        caps = [CAP.format(minors.get(f"{name}/access", -1)) for name in (instance, compute)]
        return FoundGpu(
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            minor=whole.minor,
            path=caps[-1],
            model=_text(nvml.nvmlDeviceGetName(handle)),
            numa=whole.numa,
            files=(whole.path, *caps),
        )

    def _gpu(self, handle: Any) -> FoundGpu:
        nvml = self._nvml
        minor = int(nvml.nvmlDeviceGetMinorNumber(handle))
        numa = self._optional(lambda: nvml.nvmlDeviceGetNumaNodeId(handle))
        return FoundGpu(
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            minor=minor,
            path=f"/dev/nvidia{minor}",
            model=_text(nvml.nvmlDeviceGetName(handle)),
            numa=-1 if numa is None else int(numa),
            mig=self._is_split(handle),
        )

    def _usage(self, handle: Any) -> Usage:
        nvml = self._nvml
        pids = {p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        for more in (
            lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
            # Clients of an MPS server: the list above has only the server.
            lambda: nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle),
        ):
            pids |= {p.pid for p in self._optional(more) or ()}
        rates = self._optional(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        memory = self._optional(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        return Usage(
            pids=tuple(sorted(pids)),
            utilisation=None if rates is None else int(rates.gpu),
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            power_mw=self._optional(lambda: int(nvml.nvmlDeviceGetPowerUsage(handle))),
        )

    def _optional(self, question: Callable[[], _T]) -> _T | None:
        """The answer, or None where this GPU or driver does not have it."""
        try:
            return question()
        except (
            self._nvml.NVMLError_NotSupported,
            self._nvml.NVMLError_FunctionNotFound,
            # Some questions do not take a MIG device.
            self._nvml.NVMLError_InvalidArgument,
            self._nvml.NVMLLibraryMismatchError,
            AttributeError,
        ):
            return None


def read_mig_minors(path: Path = MIG_MINORS) -> dict[str, int]:
    """Minor numbers of capability files by name; {} where the driver has none."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = [line.split() for line in lines]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
