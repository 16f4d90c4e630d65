"""The kinds of accelerators, and how a process is limited to some of them.

A mask is an environment variable that a driver reads once, when it is initialised. Every engine of
a host gets the same list, in the order of the local ranks: `cuda:k` is the k-th device of the list.
So other libraries that choose by `LOCAL_RANK` choose the engine's device. This module loads no
framework.

    cuda   NVIDIA. Counted through NVML. Masked by UUIDs, those of MIG instances too.
    rocm   AMD; torch calls its devices `cuda`. Counted in /sys/class/kfd. Never run.
    xpu    Intel. Not counted, so it cannot be leased. Never run.
    mps    Apple silicon: one GPU without a mask; only by `--devices mps`. Never run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import EngineSpentError

OPEN_FILES = Path("/proc/self/fd")
DRIVERS = ("/dev/nvidia-uvm", "/dev/kfd")
"""Files that a process has open after its driver has counted devices.

NVML opens `nvidiactl` too.
"""


@dataclass(frozen=True)
class Kind:
    """One kind of accelerator.

    Attributes:
        name: The kind of a found device (`discovery.Device.kind`).
        device: Torch's device type: `cuda`, `xpu`, `mps`.
        mask: Environment variable that lists the devices a process sees; empty: there is none.
        also: Other variables that are set too, with their values.
        clears: Variables that would mask again, by numbers within the first mask.
        collectives: Backend of torch.distributed for its tensors; empty: gloo, through the host.
    """

    name: str
    device: str
    mask: str = ""
    also: tuple[tuple[str, str], ...] = ()
    clears: tuple[str, ...] = ()
    collectives: str = ""

    @property
    def backend(self) -> str:
        """The backend of a group in which each worker has a device of this kind."""
        return f"cpu:gloo,{self.device}:{self.collectives}" if self.collectives else "gloo"


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "cuda",
            "cuda",
            "CUDA_VISIBLE_DEVICES",
            # Otherwise CUDA counts the fastest GPU first, but NVML and nvidia-smi count by bus.
            also=(("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),),
            collectives="nccl",
        ),
        Kind(
            "rocm",
            "cuda",
            "ROCR_VISIBLE_DEVICES",
            clears=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
            collectives="nccl",  # RCCL under its name
        ),
        Kind("xpu", "xpu", "ZE_AFFINITY_MASK", collectives="xccl"),
        Kind("mps", "mps"),
    )
}
"""By name."""


def apply(
    kind: str, gpus: Sequence[str], environment: MutableMapping[str, str] | None = None
) -> None:
    """Make only these devices visible to this process, in this order; none: no change.

    It applies to drivers that are initialised afterwards.

    Args:
        kind: A name in `KINDS`.
        gpus: Permanent names (UUIDs), in the order of the local ranks.
        environment: By default the process's.
    """
    about = KINDS[kind] if gpus else None
    if about is None or not about.mask:
        return
    values = os.environ if environment is None else environment
    for name in about.clears:
        values.pop(name, None)
    values[about.mask] = ",".join(gpus)
    values.update(about.also)


def fits(
    kind: str,
    gpus: Sequence[str],
    environment: MutableMapping[str, str] | None = None,
    uses: int | None = None,
) -> bool:
    """Whether a process whose devices are initialised can continue as it is.

    It can if each number that it uses would still mean the same device. A cluster's list grows at
    its end. A process does not have to see the GPUs of other workers to communicate with them.

    Args:
        kind, gpus, environment: As in `apply`.
        uses: It computes on this many of the first GPUs (`RunSpec.gpus_used`); by default all.
    """
    if not gpus or not KINDS[kind].mask:
        return True
    held = (os.environ if environment is None else environment).get(KINDS[kind].mask, "")
    first = len(gpus) if uses is None else uses
    return held.split(",")[:first] == list(gpus[:first])


def is_counted() -> bool:
    """Whether a driver of this process has read its mask; after that a change has no effect."""
    with contextlib.suppress(OSError):
        for entry in list(OPEN_FILES.iterdir()):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if os.readlink(entry).startswith(DRIVERS):
                    return True
    return False


def show(kind: str, gpus: Sequence[str], uses: int, *, counted: bool = False) -> None:
    """Make a run's devices visible to this engine, in order; call it before they are used.

    Args:
        kind, gpus: As in `apply`; without GPUs nothing is changed.
        uses: The run computes on this many of the first GPUs (`RunSpec.gpus_used`).
        counted: Whether the framework knows that its devices are initialised.

    Raises:
        EngineSpentError: The devices are initialised, and the run's numbers mean other devices.
    """
    if not gpus or kind not in KINDS or not KINDS[kind].mask:
        return
    if not (counted or is_counted()):
        apply(kind, gpus)
    elif not fits(kind, gpus, uses=uses):
        name = KINDS[kind].mask
        raise EngineSpentError(
            "This engine has already used other GPUs, so it cannot use the GPUs of this run.",
            seen=f"{name}={os.environ.get(name, '')}",
            allowed=",".join(gpus),
            next_step="run %cluster restart",
            code="WB-CLUSTER-050",
        )
