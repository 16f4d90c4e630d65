"""How each engine is, as data, and the last line of its log."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from .gpus import GpuReading

State: TypeAlias = Literal[
    "idle", "cell", "training", "serving", "busy", "waiting", "paused", "starting", "dead"
]

TAIL_BYTES = 4096
"""Most that is read of a log at a time; of what was added only the end matters."""
LINE_CHARACTERS = 200
_MACHINERY = re.compile(r"\[IPEngine[.\d]*\] ")
"""ipyparallel notes every request it handles, which would hide what the user's code says."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
"""Escape sequences of terminals (ECMA-48, CSI) and other control characters."""


@dataclass(frozen=True)
class EngineVitals:
    """One engine at one moment; None is what could not be known.

    Attributes:
        engine: Permanent id.
        rank: Among the workers; None of a server, and of one that is not there.
        device: As in tables: `cpu`, `cuda:0 NVIDIA H200`.
        state: `idle`; in a `cell` without a strategy; `training`; `serving` parameters; `busy` with
            something short; `waiting` for others; `paused` by its user; `starting`; `dead`.
        doing: The same in words: `waiting in all_reduce`, `dead (SIGKILL)`.
        cpu_percent: Of one core, with its children (such as data loaders), since the last sample.
        memory_bytes: Its own, without its children's; `memory_kind` says whether as proportional
            set size (`PSS`) or, where the system has none, as resident set (`RSS`).
        processes: The engine and its children.
        gpu_percent: Share of the last moments in which its GPUs were busy, whoever used them.
        gpu_memory_bytes: What it and its children hold there.
        log_line: The last line of its log, but what ipyparallel notes there.
        uptime_s: Since its process began.
    """

    engine: int
    rank: int | None
    pid: int
    host: str
    device: str
    state: State
    doing: str
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    memory_kind: str = "PSS"
    processes: int | None = None
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None
    log_line: str | None = None
    uptime_s: float | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return it as JSON-ready data; what is not known is null."""
        found = asdict(self)
        for name, value in found.items():
            if isinstance(value, float):
                found[name] = round(value, 3) if math.isfinite(value) else None
        return found


class LastLine:
    """The last line of a log that grows; reads what was added, and of that no more than the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._at = 0
        self._text: str | None = None

    def read(self) -> str | None:
        """Return the last line that says something, without control characters; None: no such.

        A line that is still being written counts. One that does not fit in `TAIL_BYTES` is shown
        by its end.
        """
        try:
            status = self._path.stat()
            if (status.st_ino, status.st_size) == (self._inode, self._at):
                return self._text
            if status.st_ino != self._inode or status.st_size < self._at:
                self._text = None  # replaced or cut
            with self._path.open("rb") as file:
                # From the beginning of the last line on: it may have been incomplete.
                file.seek(max(0, status.st_size - TAIL_BYTES))
                data = file.read(TAIL_BYTES)
        except OSError:
            return self._text
        self._inode, self._at = status.st_ino, status.st_size
        for line in reversed(data.decode(errors="replace").splitlines()):
            clean = _CONTROL.sub("", line).strip()
            if clean and not _MACHINERY.search(clean):
                self._text = clean[-LINE_CHARACTERS:]
                break
        return self._text


def gpu_use(
    gpus: Iterable[GpuReading], device: str, pids: Iterable[int]
) -> tuple[float | None, int | None]:
    """Return how busy an engine's GPUs are (percent, the mean), and the memory it holds there.

    Args:
        device: What it was given: `cuda:0 NVIDIA H200`; its processes may use others too.
        pids: The engine and its children.
    """
    mine = set(pids)
    percents: list[float] = []
    held: int | None = None
    unknown = False
    for gpu in gpus:
        here = [used for pid, used in gpu.memory_bytes.items() if pid in mine]
        unknown |= None in here
        if here:
            held = (held or 0) + sum(used for used in here if used is not None)
        if (here or device.partition(" ")[0] == f"cuda:{gpu.index}") and gpu.percent is not None:
            percents.append(gpu.percent)
    mean = sum(percents) / len(percents) if percents else None
    return mean, None if unknown else held
