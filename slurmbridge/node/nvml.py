"""GPUs of NVIDIA's driver, by NVML (package `nvidia-ml-py`, extra `nvidia`).

Imported only where it is configured. Every call may fail while a driver is being replaced: that is
"not known now", never "no GPUs" and never "idle".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

from slurmbridge.node.device import FoundGpu
from slurmbridge.node.inventory import Usage
from slurmbridge.pool.errors import ConfigError, PeerUnavailable, Problem

PEER: Final = "nvml"
_T = TypeVar("_T")


class NvmlInventory:
    """All GPUs that the driver shows. Not thread-safe: one call at a time.

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

    def find(self) -> list[FoundGpu]:
        """See `Inventory.find`."""
        return self._asked("devices", lambda: [self._gpu(h) for h in self._handles()])

    def usage(self) -> dict[str, Usage]:
        """See `Inventory.usage`."""
        return self._asked(
            "usage",
            lambda: {
                _text(self._nvml.nvmlDeviceGetUUID(h)): self._usage(h) for h in self._handles()
            },
        )

    def close(self) -> None:
        """Let go of the driver."""
        if self._open:
            self._open = False
            self._nvml.nvmlShutdown()

    def _asked(self, op: str, question: Callable[[], _T]) -> _T:
        try:
            if not self._open:
                self._nvml.nvmlInit()
                self._open = True
            return question()
        except self._nvml.NVMLError as error:
            # After a driver's restart only a new start of the library helps.
            self._open = False
            raise PeerUnavailable(PEER, op, str(error)) from error

    def _handles(self) -> list[Any]:
        count = self._nvml.nvmlDeviceGetCount()
        return [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]

    def _gpu(self, handle: Any) -> FoundGpu:
        nvml = self._nvml
        minor = int(nvml.nvmlDeviceGetMinorNumber(handle))
        mig = self._optional(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
        numa = self._optional(lambda: nvml.nvmlDeviceGetNumaNodeId(handle))
        return FoundGpu(
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            minor=minor,
            path=f"/dev/nvidia{minor}",
            model=_text(nvml.nvmlDeviceGetName(handle)),
            numa=-1 if numa is None else int(numa),
            mig=mig == nvml.NVML_DEVICE_MIG_ENABLE,
        )

    def _usage(self, handle: Any) -> Usage:
        nvml = self._nvml
        pids = {p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        pids |= {
            p.pid
            for p in self._optional(lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses(handle))
            or ()
        }
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
            AttributeError,
        ):
            return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
