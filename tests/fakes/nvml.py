"""A driver that is none: what of NVML (`pynvml`) Workbench uses, for GPUs that a test describes.

    fake = FakeNvml([Gpu(used_gib=5), Gpu(errors={"nvmlDeviceGetMemoryInfo": "NotSupported"})])
    fake.install(monkeypatch)          # in this process, as the module `pynvml`
    fake.environment(os.environ)       # for processes that are started with it

Errors are told by name, per GPU and function, as NVML's: NotSupported, GpuIsLost, NoPermission,
DriverNotLoaded. Functions fail while NVML is not initialised, as the real ones do.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.devices.leases import DevicePool

GIB = 1 << 30
DESCRIPTION = "FAKE_NVML"
ON_PATH = Path(__file__).with_name("on_path")
ERRORS = {
    "Uninitialized": (1, "Uninitialized"),
    "InvalidArgument": (2, "Invalid Argument"),
    "NotSupported": (3, "Not Supported"),
    "NoPermission": (4, "Insufficient Permissions"),
    "NotFound": (6, "Not Found"),
    "DriverNotLoaded": (9, "Driver Not Loaded"),
    "LibraryNotFound": (12, "NVML Shared Library Not Found"),
    "GpuIsLost": (15, "GPU is lost"),
    "Unknown": (999, "Unknown Error"),
}
MODES = {"default": 0, "prohibited": 2, "exclusive": 3}


class NVMLError(Exception):
    """As pynvml's: its value is a number, its text the driver's words."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return next((text for number, text in ERRORS.values() if number == self.value), "?")


def error(name: str) -> NVMLError:
    return NVMLError(ERRORS[name][0])


@dataclass
class Gpu:
    """One GPU, or one MIG instance of it.

    Attributes:
        uuid: Empty: made from its place.
        errors: Names of ERRORS by NVML function.
        mig: Its instances; None: MIG is off.
        processes: Pids and bytes; None bytes: the driver does not say.
    """

    name: str = "NVIDIA H100"
    uuid: str = ""
    total_gib: float = 80
    used_gib: float = 0
    errors: dict[str, str] = field(default_factory=dict)
    mig: list[Gpu] | None = None
    mode: str = "default"
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    capability: tuple[int, int] = (9, 0)
    busy_percent: int = 0
    place: int = 0
    parent: int = -1

    @staticmethod
    def of(told: Mapping[str, Any]) -> Gpu:
        known = dict(told)
        if known.get("mig") is not None:
            known["mig"] = [Gpu.of(one) for one in known["mig"]]
        for name in ("processes", "capability"):
            if name in known:
                known[name] = known[name] if name == "processes" else tuple(known[name])
        return Gpu(**known)


class FakeNvml:
    """Stands for the module `pynvml`.

    Attributes:
        open: How often it is initialised and not yet shut down.
        asked: Names of the functions that were called.
    """

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_DEVICE_MIG_DISABLE, NVML_DEVICE_MIG_ENABLE = 0, 1
    NVML_COMPUTEMODE_DEFAULT, NVML_COMPUTEMODE_PROHIBITED = 0, 2
    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3

    def __init__(
        self,
        gpus: Iterable[Gpu] = (),
        *,
        broken: str = "",
        driver: str = "570.86.15",
        cuda: int = 12080,
    ) -> None:
        self.gpus, self.broken, self.driver, self.cuda = list(gpus), broken, driver, cuda
        self.open = 0
        self.asked: list[str] = []
        for place, gpu in enumerate(self.gpus):
            gpu.place, gpu.uuid = place, gpu.uuid or f"GPU-{place}{place}{place}-x"
            for number, part in enumerate(gpu.mig or ()):
                part.place, part.parent = number, place
                part.uuid = part.uuid or f"MIG-{place}{number}-x"

    def install(self, monkeypatch: Any) -> FakeNvml:
        monkeypatch.setitem(sys.modules, "pynvml", self)
        return self

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return an environment in which Python finds this driver."""
        told = {"gpus": [asdict(gpu) for gpu in self.gpus], "broken": self.broken}
        told |= {"driver": self.driver, "cuda": self.cuda}
        paths = [str(ON_PATH), *filter(None, [base.get("PYTHONPATH")])]
        return {**base, DESCRIPTION: json.dumps(told), "PYTHONPATH": os.pathsep.join(paths)}

    @staticmethod
    def from_environment() -> FakeNvml:
        told = json.loads(os.environ.get(DESCRIPTION, "{}"))
        return FakeNvml([Gpu.of(gpu) for gpu in told.pop("gpus", ())], **told)

    # -- what every function does -------------------------------------------------------------

    def _ask(self, function: str, gpu: Gpu | None = None) -> None:
        self.asked.append(function)
        if not self.open:
            raise error("Uninitialized")
        if gpu is not None and function in gpu.errors:
            raise error(gpu.errors[function])

    # -- the system ---------------------------------------------------------------------------

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise error(self.broken)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._ask("nvmlShutdown")
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        self._ask("nvmlSystemGetDriverVersion")
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        self._ask("nvmlSystemGetCudaDriverVersion_v2")
        return self.cuda

    nvmlSystemGetCudaDriverVersion = nvmlSystemGetCudaDriverVersion_v2  # noqa: N815

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._ask("nvmlDeviceGetCount")
        return len(self.gpus)

    # -- handles ------------------------------------------------------------------------------

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        if not 0 <= index < len(self.gpus):
            raise error("InvalidArgument")
        self._ask("nvmlDeviceGetHandleByIndex", self.gpus[index])
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:  # noqa: N802
        self._ask("nvmlDeviceGetHandleByUUID")
        for gpu in self.gpus:
            for one in (gpu, *(gpu.mig or ())):
                if one.uuid == (uuid.decode() if isinstance(uuid, bytes) else uuid):
                    self._ask("nvmlDeviceGetHandleByUUID", one)
                    return one
        raise error("NotFound")

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:  # noqa: N802
        self._ask("nvmlDeviceGetMigMode", gpu)
        return [int(gpu.mig is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:  # noqa: N802
        self._ask("nvmlDeviceGetMaxMigDeviceCount", gpu)
        return 7 if gpu.mig is not None else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Gpu:  # noqa: N802
        self._ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu)
        if index >= len(gpu.mig or ()):
            raise error("NotFound")
        assert gpu.mig is not None
        return gpu.mig[index]

    # -- one GPU ------------------------------------------------------------------------------

    def nvmlDeviceGetName(self, gpu: Gpu) -> bytes:  # noqa: N802
        self._ask("nvmlDeviceGetName", gpu)
        return gpu.name.encode()  # as older bindings do

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:  # noqa: N802
        self._ask("nvmlDeviceGetUUID", gpu)
        return gpu.uuid

    def nvmlDeviceGetIndex(self, gpu: Gpu) -> int:  # noqa: N802
        self._ask("nvmlDeviceGetIndex", gpu)
        return gpu.place

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> SimpleNamespace:  # noqa: N802
        self._ask("nvmlDeviceGetMemoryInfo", gpu)
        total, used = int(gpu.total_gib * GIB), int(gpu.used_gib * GIB)
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[SimpleNamespace]:  # noqa: N802
        self._ask("nvmlDeviceGetComputeRunningProcesses", gpu)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes]

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> SimpleNamespace:  # noqa: N802
        self._ask("nvmlDeviceGetUtilizationRates", gpu)
        return SimpleNamespace(gpu=gpu.busy_percent, memory=0)

    def nvmlDeviceGetComputeMode(self, gpu: Gpu) -> int:  # noqa: N802
        self._ask("nvmlDeviceGetComputeMode", gpu)
        return MODES[gpu.mode]

    def nvmlDeviceGetCudaComputeCapability(self, gpu: Gpu) -> tuple[int, int]:  # noqa: N802
        self._ask("nvmlDeviceGetCudaComputeCapability", gpu)
        return gpu.capability

    def nvmlDeviceGetPciInfo(self, gpu: Gpu) -> SimpleNamespace:  # noqa: N802
        self._ask("nvmlDeviceGetPciInfo", gpu)
        return SimpleNamespace(busId=f"00000000:{gpu.place + 1:02X}:00.0")

    def nvmlDeviceGetEccMode(self, gpu: Gpu) -> list[int]:  # noqa: N802
        self._ask("nvmlDeviceGetEccMode", gpu)
        return [1, 1]


_pools: list[DevicePool] = []


def pool_of(*asked: Any, **about: Any) -> DevicePool:
    """Return a pool of devices that gives back what it holds at the end of `only_fakes`."""
    from workbench.devices.leases import DevicePool

    _pools.append(DevicePool(*asked, **about))
    return _pools[-1]


@contextlib.contextmanager
def only_fakes(monkeypatch: Any, tmp_path: Path) -> Iterator[None]:
    """Hide this machine's GPUs, limits, reservations, and for what torch is built."""
    from workbench.devices import discovery, leases, reservations

    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "WORKBENCH_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(discovery, "DEV", tmp_path / "dev")
    monkeypatch.setattr(discovery, "KFD", tmp_path / "kfd")
    monkeypatch.setattr(discovery, "torch_build", lambda: discovery.Build("2.9", cuda="12.8"))
    monkeypatch.setenv(reservations.VARIABLE, str(tmp_path / "gpus"))
    monkeypatch.setattr(leases, "_said", set())
    try:
        yield
    finally:
        while _pools:
            _pools.pop().free()
