"""Which worker gets which device."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ..errors import ClusterError, PlanError
from . import limits
from .discovery import Device, discover
from .mask import KINDS

Choice: TypeAlias = Literal["cpu"] | tuple[int, ...]

CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
CGROUP_V1 = Path("/sys/fs/cgroup/cpu")


@dataclass(frozen=True)
class Lease:
    """What one worker computes on.

    Attributes:
        device: As torch writes it in the engine: `cpu`, `cuda:0`. The number is the local rank of a
            worker with a GPU of its own: engines see the leased GPUs only (`mask.py`).
        label: For tables: `cpu`, `cuda:0 NVIDIA H200`.
        gpu: Permanent name (UUID) of the GPU; empty for a CPU.
        sharers: How many workers of the run compute on this GPU, this one included.
    """

    device: str
    label: str
    gpu: str = ""
    sharers: int = 1


@dataclass(frozen=True)
class Leases:
    """The devices of a run.

    Attributes:
        leases: By rank.
        backend: Where every worker has a GPU of its own, `cpu:gloo,cuda:nccl`: tensors of both
            kinds of memory travel. Else `gloo`, since NCCL refuses to share.
        warning: What the user should know, or an empty text.
        gpus: The GPUs that engines of this host see, in the order of their numbers there.
        kind: What they are, a name in `mask.KINDS`; empty where there is none.
    """

    leases: tuple[Lease, ...]
    backend: str = "gloo"
    warning: str = ""
    gpus: tuple[str, ...] = ()
    kind: str = ""


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
    by_index = {gpu.index: gpu for gpu in gpus}
    chosen = [by_index[index] for index in choice[:workers]]
    kind = KINDS[chosen[0].kind]
    leases = []
    for rank in range(workers):
        place = rank % len(chosen)
        sharers = len(range(place, workers, len(chosen)))
        name, gpu = f"{kind.device}:{place}", chosen[place]
        leases.append(Lease(name, f"{name} {gpu.name}", gpu.uuid, sharers))
    warning = _warning(workers, len(chosen))
    uuids = tuple(gpu.uuid for gpu in chosen)
    return Leases(tuple(leases), "gloo" if warning else kind.backend, warning, uuids, kind.name)


def _warning(workers: int, gpus: int) -> str:
    if workers <= gpus:
        return ""
    return (
        f"{workers} workers share {gpus} GPU{'s' if gpus > 1 else ''}: they take turns, so their "
        "step times say little about real parallel training, and gloo is used instead of NCCL."
    )
