"""Finds the devices of this machine, and notes what it could not find out.

NVIDIA's are counted through NVML, device by device. If a device does not answer, only this value or
this device is missing. A GPU in MIG mode counts as its instances. AMD's GPUs are counted in the
system kernel's list. `Survey.notes` says which devices are left out, and why the CPU is used on a
machine with GPUs.

Functions as in https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import limits

PROVED_ON: tuple[str, ...] = ()
"""Names, as in the driver, of the GPUs on which `workbench doctor --gpu-test` has passed."""

DEV = Path("/dev")
KFD = Path("/sys/class/kfd/kfd/topology/nodes")
DRM = Path("/sys/class/drm")
_GPU_IS_LOST = 15
_SIGNS = (
    ("nvidia[0-9]*", "cuda"),
    ("nvmap", "cuda"),  # Jetson
    ("dxg", "cuda"),  # WSL2
    ("kfd", "rocm"),
)
"""Device files that a driver creates, and the build of torch that can use them."""


@dataclass(frozen=True)
class Device:
    """One GPU, or one MIG instance, that this process may use.

    Attributes:
        index: Its number for `--devices`: within CUDA_VISIBLE_DEVICES, by bus.
        memory_bytes: The total memory; None if the driver does not report it.
        used_bytes: The memory in use now, by all processes.
        uuid: Its permanent name; if the driver has none, its number by bus.
        number: Its number in NVML and nvidia-smi, which ignore CUDA_VISIBLE_DEVICES; -1: not known.
            For a MIG instance, the number of its GPU.
        kind: A name in `mask.KINDS`.
        part: For a MIG instance, its number on the GPU; otherwise -1. `parent` is that GPU's name.
        pids: Processes that compute on it, if the driver reports them.
        exclusive: Whether only one process at a time can use it (compute mode EXCLUSIVE_PROCESS).
    """

    index: int
    name: str
    memory_bytes: int | None
    used_bytes: int | None
    uuid: str
    number: int = -1
    kind: str = "cuda"
    part: int = -1
    parent: str = ""
    pids: tuple[int, ...] = ()
    exclusive: bool = False

    @property
    def place(self) -> str:
        """The name by `nvidia-smi`'s numbers: `GPU 2`, `GPU 2 MIG 1`."""
        number = self.number if self.number >= 0 else self.index
        return f"GPU {number}" + (f" MIG {self.part}" if self.part >= 0 else "")


@dataclass(frozen=True)
class Survey:
    """The devices that were found.

    Attributes:
        notes: Sentences for the user: devices that are left out, and why.
    """

    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()


def discover() -> list[Device]:
    """Return the devices that this process may use; `survey` also says what was left out."""
    return list(survey().devices)


def survey(framework: str = "") -> Survey:
    """Return the devices that this process may use, and notes about the others.

    CUDA_VISIBLE_DEVICES is honoured as CUDA does: numbers, or (prefixes of) UUIDs of GPUs and MIG
    instances, in their order, up to the first that does not exist. Devices that the administrator's
    limits (`limits.py`) do not permit are left out; the others keep their numbers.

    Args:
        framework: Devices that the installed version of this framework cannot use are left out.
    """
    devices: list[Device] = []
    notes: list[str] = []
    for find in FINDERS.values():
        found, said = find(framework)
        devices += [replace(one, index=one.index + len(devices)) for one in found]
        notes += said
    return Survey(tuple(devices), tuple(notes))


# -- NVIDIA --------------------------------------------------------------------------------------


def _nvidia(framework: str) -> tuple[list[Device], list[str]]:
    notes: list[str] = []
    found: list[Device] = []
    with _nvml() as (nvml, why):
        if nvml is not None:
            reader = _Reader(nvml)
            found, why = reader.all()
            notes += reader.notes
            if found and (unfit := _unfit(framework, reader.cuda())):
                return [], [*notes, unfit]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not found:
        return [], notes or _signs("cuda", framework, why)
    allowed = limits.load()
    permitted = {
        gpu.uuid
        for gpu in found
        if any(allowed.permits(gpu.number, name) for name in (gpu.uuid, gpu.parent or gpu.uuid))
    }
    visible = _visible(found, wanted, notes)
    return [gpu for gpu in visible if gpu.uuid in permitted], notes


@contextlib.contextmanager
def _nvml() -> Iterator[tuple[Any, str]]:
    """Yield NVML's bindings, initialised; or None, and the reason."""
    try:
        import pynvml
    except ImportError as error:
        yield None, str(error)
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield None, f"NVML says {str(error)!r}"
        return
    try:
        yield pynvml, ""
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


class _Reader:
    """Asks NVML about one device after the other."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self.notes: list[str] = []

    def all(self) -> tuple[list[Device], str]:
        """Return every device, in the order of the bus; and the reason if there is none."""
        try:
            count = int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            return [], f"NVML says {str(error)!r}"
        found: list[Device] = []
        for number in range(count):
            try:
                found += self._one(number)
            except self._nvml.NVMLError as error:  # noqa: PERF203
                self.notes.append(f"GPU {number} is not used: NVML says {str(error)!r}.")
        if not all(one.uuid for one in found):  # CUDA takes numbers too, but not both kinds
            found = [replace(one, uuid=str(one.number)) for one in found if one.part < 0]
        return [replace(one, index=i) for i, one in enumerate(found)], "NVML lists no GPU"

    def cuda(self) -> tuple[int, int] | None:
        """Return the newest CUDA that the driver supports."""
        version = self._ask("nvmlSystemGetCudaDriverVersion_v2")
        return None if version is None else (int(version) // 1000, int(version) % 1000 // 10)

    def _one(self, number: int) -> list[Device]:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(number)
        mode = self._ask("nvmlDeviceGetComputeMode", handle)
        if mode == self._nvml.NVML_COMPUTEMODE_PROHIBITED:
            self.notes.append(
                f"GPU {number} is not used: its compute mode is PROHIBITED. An administrator can "
                f"change this with nvidia-smi -i {number} -c 0."
            )
            return []
        mig = self._ask("nvmlDeviceGetMigMode", handle)
        if mig is not None and mig[0]:
            return self._instances(number, handle)
        exclusive = mode == self._nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
        return [replace(self._describe(handle), number=number, exclusive=exclusive)]

    def _instances(self, number: int, gpu: Any) -> list[Device]:
        found, why = [], (
            "it has no MIG instance. In this mode, only MIG instances can compute. An "
            "administrator can create instances (nvidia-smi mig -cgi) or end the mode "
            "(nvidia-smi -mig 0)"
        )  # fmt: skip
        parent = _text(self._nvml.nvmlDeviceGetUUID(gpu))
        for part in range(int(self._ask("nvmlDeviceGetMaxMigDeviceCount", gpu) or 7)):
            try:
                handle = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, part)
                one = self._describe(handle)
                found.append(replace(one, number=number, part=part, parent=parent))
            except self._nvml.NVMLError as error:  # noqa: PERF203
                if error.value == self._nvml.NVML_ERROR_NO_PERMISSION:
                    why = f"its MIG instances cannot be read: NVML says {str(error)!r}"
        if not found:
            self.notes.append(f"GPU {number} is not used: it is in MIG mode, but {why}.")
        return found

    def _describe(self, handle: Any) -> Device:
        uuid = _text(self._ask("nvmlDeviceGetUUID", handle) or "")
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        return Device(
            index=0,
            name=_text(self._ask("nvmlDeviceGetName", handle) or "NVIDIA GPU"),
            memory_bytes=None if memory is None else int(memory.total),
            used_bytes=None if memory is None else int(memory.used),
            uuid=uuid,
            pids=tuple(int(process.pid) for process in processes),
        )

    def _ask(self, function: str, *given: Any) -> Any:
        """Return NVML's answer; None if this GPU, driver or binding has none.

        Raises:
            NVMLError: The GPU is lost.
        """
        try:
            return getattr(self._nvml, function)(*given)
        except AttributeError:
            return None
        except self._nvml.NVMLError as error:
            if error.value == _GPU_IS_LOST:
                raise
            return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # older NVML bindings give bytes


def _visible(found: Sequence[Device], wanted: str | None, notes: list[str]) -> list[Device]:
    """Return the GPUs that CUDA sees; PyTorch reads the variable in the same way.

    CUDA stops at a name that does not exist. If a GPU is named twice, CUDA sees none
    (`torch.cuda._parse_visible_devices`).
    """
    if wanted is None:
        return list(found)
    chosen: list[Device] = []
    for word in (part.strip() for part in wanted.split(",")):
        fresh = _named(found, word)
        known = {device.uuid for device in chosen}
        if any(one.uuid in known for one in fresh):
            notes.append(
                f"CUDA_VISIBLE_DEVICES={wanted} contains {word} twice. Then CUDA sees no GPU. "
                "Write each GPU only once."
            )
            return []
        if not fresh:
            if word not in ("", "-1", "NoDevFiles"):
                notes.append(
                    f"CUDA_VISIBLE_DEVICES contains {word}, which does not exist. CUDA sees only "
                    f"the GPUs that are listed before {word} ({len(chosen)} of {len(found)} GPUs)."
                )
            break
        chosen += fresh
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    numbers = re.fullmatch(r"[\d,\s]*", wanted) and chosen
    if numbers and not by_bus and len({one.name for one in found}) > 1:
        notes.append(
            f"Workbench reads the numbers in CUDA_VISIBLE_DEVICES={wanted} as positions on the "
            "PCI bus, as nvidia-smi does. But CUDA gives the number 0 to the fastest GPU. "
            "This machine has GPUs of different types, so Workbench and CUDA can mean different "
            "GPUs by the same number. "
            "Set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that CUDA uses Workbench's numbers."
        )
    return [replace(device, index=index) for index, device in enumerate(chosen)]


def _named(found: Sequence[Device], word: str) -> list[Device]:
    """Return the GPU that a word of CUDA_VISIBLE_DEVICES means; in MIG mode all its instances.

    A process can use only one instance; each engine sees its own instance.
    """
    if word.isdecimal():
        return [one for one in found if one.number == int(word)]
    if not word.startswith(("GPU-", "MIG-")):
        return []
    matches = [device for device in found if device.uuid.startswith(word)]
    return matches if len(matches) == 1 else []


# -- AMD and Apple: from their vendors' documentation, never run -----------------------------------


def _amd(framework: str) -> tuple[list[Device], list[str]]:
    """Count AMD's GPUs in the kernel driver's list of nodes; those without SIMD units are CPUs."""
    found: list[Device] = []
    for folder in sorted(KFD.glob("*"), key=lambda path: int(path.name)):
        about = _properties(folder / "properties")
        if not about.get("simd_count"):
            continue
        card = DRM / f"renderD{about.get('drm_render_minor', 0)}" / "device"
        index = len(found)
        # By its number if it has no unique name: ROCR_VISIBLE_DEVICES accepts both.
        named = f"GPU-{about['unique_id']:016x}" if about.get("unique_id") else str(index)
        found.append(
            Device(
                index,
                _line(card / "product_name") or "AMD GPU",
                _number(card / "mem_info_vram_total"),
                _number(card / "mem_info_vram_used"),
                named,
                number=index,
                kind="rocm",
            )
        )
    if found and framework == "torch" and (build := torch_build()) and not build.hip:
        gpus = f"{len(found)} AMD GPU{'s are' if len(found) > 1 else ' is'}"
        return [], [
            f"{gpus} not used, because torch {build.version} is built without ROCm. "
            "pytorch.org/get-started shows the command that installs a torch with ROCm."
        ]
    if not found:
        return [], _signs("rocm", framework, f"{KFD} lists no GPU")
    masks = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    allowed = limits.load()
    for wanted in (os.environ[name] for name in masks if name in os.environ):
        words = [word.strip() for word in wanted.split(",")]
        found = [one for word in words for one in found if word in (str(one.index), one.uuid)]
        found = [replace(one, index=index) for index, one in enumerate(found)]
    return [one for one in found if allowed.permits(one.number, one.uuid)], []


def _properties(path: Path) -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            with contextlib.suppress(ValueError):
                found[name] = int(value)
    return found


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _line(path)
    return int(text) if text.isdecimal() else None


def _apple(framework: str) -> tuple[list[Device], list[str]]:
    if sys.platform != "darwin" or platform.machine() != "arm64" or framework == "tensorflow":
        return [], []
    return [Device(0, "Apple GPU", None, None, "mps", number=0, kind="mps")], []


FINDERS: dict[str, Callable[[str], tuple[list[Device], list[str]]]] = {
    "cuda": _nvidia,
    "rocm": _amd,
    "mps": _apple,
}
"""A function of the framework that finds the devices of a kind and notes which it left out."""


# -- what is installed ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Build:
    """The versions that torch was built for; empty: torch was not built for them."""

    version: str
    cuda: str = ""
    hip: str = ""


@lru_cache(maxsize=1)
def torch_build() -> Build | None:
    """Return for which versions the installed torch was built, without importing it.

    None: no torch.
    """
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        text = Path(spec.origin).with_name("version.py").read_text("utf-8")
    except (OSError, ValueError, ImportError):
        return None
    said = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.M))
    return Build(said.get("__version__", ""), said.get("cuda", ""), said.get("hip", ""))


def _unfit(framework: str, driver: tuple[int, int] | None) -> str:
    """Return why the installed framework cannot use NVIDIA's GPUs; empty: no reason is known."""
    build = torch_build() if framework == "torch" else None
    if build is None:
        return ""
    if not build.cuda:
        return (
            f"The GPUs are not used, because torch {build.version} is built without CUDA. "
            "pytorch.org/get-started shows the command that installs a torch with CUDA."
        )
    major = build.cuda.partition(".")[0]
    if driver is not None and major.isdecimal() and driver[0] < int(major):
        return (
            f"The GPUs are not used: torch {build.version} needs CUDA {build.cuda}, but the "
            f"driver supports CUDA only up to {driver[0]}.{driver[1]}. Install a newer driver, "
            f"or a torch built for CUDA {driver[0]}."
        )
    return ""


def _signs(kind: str, framework: str, why: str) -> list[str]:
    """Return the note for a driver that has made device files although no GPU was found."""
    build = torch_build() if framework != "tensorflow" else None
    for pattern, uses in _SIGNS:
        files = sorted(DEV.glob(pattern)) if uses == kind else []
        sure = pattern.startswith("nvidia") or build is None
        if files and (sure or (build and (build.cuda if kind == "cuda" else build.hip))):
            return [
                f"{files[0]} exists, but no GPU was found: {why}. So workers compute on the CPU. "
                "Run nvidia-smi (for AMD: rocm-smi) to see what the driver finds."
            ]
    return []
