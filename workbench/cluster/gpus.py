"""What GPUs do, read through NVML: how busy each is, and the memory of each process.

NVML is asked, never CUDA, for the reason that `devices.py` gives. Functions as in
https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .devices import Device, discover


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment.

    Attributes:
        index: As in `cuda:0`.
        percent: Share of the last moments in which some kernel ran, 0..100, whoever's; None where
            the driver does not say (MIG).
        used_bytes, total_bytes: Memory, whoever's.
        memory_bytes: By pid; None where the driver does not say. Empty in a container whose pids
            are not the driver's.
    """

    index: int
    percent: float | None
    used_bytes: int | None
    total_bytes: int | None
    memory_bytes: Mapping[int, int | None] = field(default_factory=dict)


class Gpus:
    """Reads the GPUs that this process may use; opened at the first reading.

    Args:
        find: Which there are.
        nvml: The bindings (`pynvml`); replaced in tests.
    """

    def __init__(self, find: Callable[[], list[Device]] = discover, nvml: Any = None) -> None:
        self._find, self._nvml = find, nvml
        self._handles: dict[int, Any] | None = None

    def read(self) -> list[GpuReading]:
        """Return a reading per GPU, ordered by index; empty where there is none."""
        if self._handles is None:
            self._handles = self._open()
        return [self._one(index, handle) for index, handle in sorted(self._handles.items())]

    def close(self) -> None:
        """Let go of NVML; the next reading opens it again."""
        if self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        self._handles = None

    def _open(self) -> dict[int, Any]:
        found = self._find()
        if not found:
            return {}
        if self._nvml is None:
            import pynvml

            self._nvml = pynvml
        nvml, handles = self._nvml, {}
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return {}
        for gpu in found:
            with contextlib.suppress(nvml.NVMLError):
                handles[gpu.index] = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        return handles

    def _one(self, index: int, handle: Any) -> GpuReading:
        nvml = self._nvml
        busy = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        by_pid: dict[int, int | None] = {}
        for process in self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
            used = process.usedGpuMemory
            by_pid[int(process.pid)] = None if used is None else int(used)
        return GpuReading(
            index,
            None if busy is None else float(busy.gpu),
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
            by_pid,
        )

    def _ask(self, question: Callable[[Any], Any], handle: Any) -> Any:
        """Return NVML's answer; None where this GPU or driver has none."""
        try:
            return question(handle)
        except self._nvml.NVMLError:
            return None
