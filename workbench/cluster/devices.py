"""Which devices there are, and which worker gets which.

GPUs are counted through NVML: a CUDA call in the kernel would take memory on every GPU, and in a
warm parent it would make forking impossible.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..errors import ClusterError, PlanError
from . import limits

Choice: TypeAlias = Literal["cpu"] | tuple[int, ...]

CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
CGROUP_V1 = Path("/sys/fs/cgroup/cpu")


@dataclass(frozen=True)
class Device:
    """One GPU that this process may use.

    Attributes:
        index: Its number as CUDA counts here (after CUDA_VISIBLE_DEVICES), as in `cuda:0`.
        memory_bytes: All of its memory.
        used_bytes: What is in use now, by anybody.
        uuid: Its permanent name.
    """

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    uuid: str


@dataclass(frozen=True)
class Lease:
    """What one worker computes on.

    Attributes:
        device: As torch writes it: `cpu`, `cuda:0`.
        label: For tables: `cpu`, `cuda:0 NVIDIA H200`.
        shared: Whether another worker of the run has the same GPU.
    """

    device: str
    label: str
    shared: bool = False


@dataclass(frozen=True)
class Leases:
    """The devices of a run.

    Attributes:
        leases: By rank.
        backend: `nccl` where every worker has a GPU of its own, else `gloo`: NCCL refuses to share.
        warning: What the user should know, or an empty text.
    """

    leases: tuple[Lease, ...]
    backend: str = "gloo"
    warning: str = ""


def discover() -> list[Device]:
    """Return the GPUs this process may use, in CUDA's order; empty where there is no NVML.

    CUDA_VISIBLE_DEVICES is honoured as CUDA does: numbers or (prefixes of) UUIDs, in their order,
    up to the first that does not exist. The numbers are NVML's (PCI bus) order, which is CUDA's
    with CUDA_DEVICE_ORDER=PCI_BUS_ID and on machines whose GPUs are all alike. GPUs that the
    administrator's limits (`limits.py`) do not permit are left out; the others keep their numbers.
    """
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        found = [_describe(pynvml, i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    allowed = limits.load()
    permitted = {gpu.uuid for gpu in found if allowed.permits(gpu.index, gpu.uuid)}
    visible = _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [gpu for gpu in visible if gpu.uuid in permitted]


def _describe(pynvml: Any, index: int) -> Device:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Device(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        used_bytes=int(memory.used),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # older NVML bindings give bytes


def _visible(found: Sequence[Device], wanted: str | None) -> list[Device]:
    if wanted is None:
        return list(found)
    chosen: list[Device] = []
    for word in (part.strip() for part in wanted.split(",")):
        match = _find(found, word)
        if match is None or any(match.uuid == device.uuid for device in chosen):
            break
        chosen.append(match)
    return [_renumbered(device, index) for index, device in enumerate(chosen)]


def _find(found: Sequence[Device], word: str) -> Device | None:
    if word.isdigit():
        return found[int(word)] if int(word) < len(found) else None
    if not word.startswith("GPU-"):
        return None
    matches = [device for device in found if device.uuid.startswith(word)]
    return matches[0] if len(matches) == 1 else None


def _renumbered(device: Device, index: int) -> Device:
    return Device(index, device.name, device.memory_bytes, device.used_bytes, device.uuid)


def cpu_count() -> int:
    """Return how many cores this process may use: its affinity, and its container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_cores()
    return max(1, cores if quota is None else min(cores, quota))


def _cgroup_cores() -> int | None:
    """Return the whole cores of the cgroup's CPU quota, or None where there is none."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = CGROUP_V2.read_text().split()
        return None if quota == "max" else max(1, math.floor(int(quota) / int(period)))
    with contextlib.suppress(OSError, ValueError):
        limit = int((CGROUP_V1 / "cpu.cfs_quota_us").read_text())
        length = int((CGROUP_V1 / "cpu.cfs_period_us").read_text())
        return None if limit <= 0 else max(1, math.floor(limit / length))
    return None


def threads_per_worker(workers: int, cores: int | None = None) -> int:
    """Return the CPU threads each worker of a run gets: cores // workers, at least 1."""
    return max(1, (cpu_count() if cores is None else cores) // max(1, workers))


def parse_devices(devices: str | Sequence[int], found: Sequence[Device] | None = None) -> Choice:
    """Settle what the user wrote for the life of a cluster: `cpu`, or GPU numbers in rank order.

    Args:
        devices: `auto` (GPUs where there are any), `cpu`, `cuda`, or GPU numbers such as `0,1`.
            `auto` and `cuda` take the least used GPUs first. It is decided once, since the runs
            themselves change what is used, and a worker must find its tensors where they were.
        found: The GPUs at hand; those of `discover` by default.

    Raises:
        PlanError: It was not understood, or names a GPU that does not exist.
        ClusterError: GPUs were asked for and there is none.
    """
    wanted = _words(devices)
    if wanted == "cpu":
        return "cpu"
    gpus = discover() if found is None else found
    if not gpus and wanted == "auto":
        return "cpu"
    if not gpus:
        raise ClusterError(
            "GPUs were asked for, but none was found.",
            seen=devices,
            allowed=f"GPUs that NVML reports, within CUDA_VISIBLE_DEVICES{_limit()}",
            next_step="--devices cpu trains on the CPU; nvidia-smi shows what the driver sees",
            code="WB-CLUSTER-004",
        )
    if isinstance(wanted, str):
        ordered = sorted(gpus, key=lambda gpu: (gpu.used_bytes, gpu.index))
        return tuple(gpu.index for gpu in ordered)
    known = [gpu.index for gpu in gpus]
    for position, index in enumerate(wanted):
        if index not in known or index in wanted[:position]:
            raise PlanError(
                "There is no such GPU, or it was named twice.",
                seen=index,
                allowed=", ".join(map(str, known)) + _limit(),
                next_step="numbers count within CUDA_VISIBLE_DEVICES; leave --devices out for auto",
                code="WB-PLAN-024",
            )
    return wanted


def _limit() -> str:
    """Return who else has a say, for the end of a sentence about what is allowed."""
    source = limits.load().sources.get("devices")
    return f", and the administrator's limit ({source})" if source else ""


def _words(devices: str | Sequence[int]) -> str | tuple[int, ...]:
    if not isinstance(devices, str):
        return tuple(int(index) for index in devices)
    word = devices.strip().lower()
    if word in ("auto", "cpu", "cuda"):
        return word
    parts = [part.strip().removeprefix("cuda:") for part in word.split(",")]
    if all(part.isdigit() for part in parts):
        return tuple(int(part) for part in parts)
    raise PlanError(
        "The devices were not understood.",
        seen=devices,
        allowed="auto, cpu, cuda, or GPU numbers such as 0,1",
        code="WB-PLAN-025",
    )


def lease(
    devices: str | Sequence[int], workers: int, found: Sequence[Device] | None = None
) -> Leases:
    """Decide what each worker of a run computes on.

    With fewer GPUs than workers the GPUs are shared, in turn, and the warning says so.

    Args:
        devices: What `parse_devices` accepts or gave.
        workers: Number of workers.
        found: The GPUs at hand; those of `discover` by default.

    Raises:
        PlanError: `devices` was not understood, or names a GPU that does not exist.
        ClusterError: GPUs were asked for and there is none.
    """
    cpus = Leases((Lease("cpu", "cpu"),) * workers)
    if devices == "cpu":
        return cpus
    gpus = list(discover() if found is None else found)
    choice = parse_devices(devices, gpus)
    if isinstance(choice, str):
        return cpus
    names = {gpu.index: gpu.name for gpu in gpus}
    leases = []
    for rank in range(workers):
        index = choice[rank % len(choice)]
        sharers = len(range(rank % len(choice), workers, len(choice)))
        leases.append(Lease(f"cuda:{index}", f"cuda:{index} {names[index]}", sharers > 1))
    warning = _warning(workers, len(choice))
    return Leases(tuple(leases), "gloo" if warning else "nccl", warning)


def _warning(workers: int, gpus: int) -> str:
    if workers <= gpus:
        return ""
    return (
        f"{workers} workers share {gpus} GPU{'s' if gpus > 1 else ''}: they take turns, so their "
        "step times say little about real parallel training, and gloo is used instead of NCCL."
    )
