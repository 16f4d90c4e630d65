"""Which devices there are.

GPUs are counted through NVML: a CUDA call in the kernel would take memory on every GPU, and in a
warm parent it would make forking impossible.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import limits


@dataclass(frozen=True)
class Device:
    """One GPU that this process may use.

    Attributes:
        index: Its number as CUDA counts here (after CUDA_VISIBLE_DEVICES), as in `cuda:0`.
        memory_bytes: All of its memory.
        used_bytes: What is in use now, by anybody.
        uuid: Its permanent name.
        number: As NVML and nvidia-smi count, whatever CUDA_VISIBLE_DEVICES says; -1: not known.
        kind: A name in `mask.KINDS`.
    """

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    uuid: str
    number: int = -1
    kind: str = "cuda"


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
        number=index,
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
    return replace(device, index=index)
