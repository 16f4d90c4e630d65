"""What GPUs say of themselves, and an engine's share of it."""

from __future__ import annotations

from types import SimpleNamespace

from workbench.cluster.vitals import GpuReading, Gpus, gpu_use
from workbench.devices.discovery import Device


class NvmlError(Exception):
    pass


class Nvml:
    """NVML with two GPUs; the second one does not tell how busy it is, as under MIG."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self.opened = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid == "GPU-gone":
            raise NvmlError(uuid)
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        if handle == "GPU-b":
            raise NvmlError("not supported")
        return SimpleNamespace(gpu=40, memory=10)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=3 << 30, total=8 << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        known = SimpleNamespace(pid=10, usedGpuMemory=1 << 30)
        return [known] if handle == "GPU-a" else [SimpleNamespace(pid=20, usedGpuMemory=None)]


def gpu(index: int, uuid: str) -> Device:
    return Device(index, "NVIDIA H200", 8 << 30, 0, uuid)


def test_gpus_are_read_and_what_the_driver_does_not_say_stays_open() -> None:
    nvml = Nvml()
    gpus = Gpus(lambda: [gpu(1, "GPU-b"), gpu(0, "GPU-a"), gpu(2, "GPU-gone")], nvml)
    first, second = gpus.read()
    assert first == GpuReading(0, 40.0, 3 << 30, 8 << 30, {10: 1 << 30}, "GPU-a")
    assert (second.index, second.percent, second.memory_bytes) == (1, None, {20: None})
    gpus.read()
    assert nvml.opened == 1
    gpus.close()
    assert nvml.opened == 0


def test_without_a_gpu_nothing_is_opened() -> None:
    nvml = Nvml()
    assert Gpus(list, nvml).read() == []
    assert nvml.opened == 0


def test_an_engine_is_told_its_own_share_of_a_gpu() -> None:
    a = GpuReading(0, 40.0, 3, 8, {10: 5, 11: 2, 99: 1}, "GPU-a")
    b = GpuReading(1, 80.0, 3, 8, {}, "GPU-b")
    assert gpu_use([a, b], "GPU-a", [10, 11]) == (40.0, 7)
    assert gpu_use([a, b], "GPU-b", [10]) == (60.0, 5)  # it uses another one too
    assert gpu_use([a, b], "GPU-b", [12]) == (80.0, None)  # pids of a container
    assert gpu_use([a, b], "", [12]) == (None, None)
    assert gpu_use([GpuReading(0, None, None, None, {10: None})], "GPU-c", [10]) == (None, None)
