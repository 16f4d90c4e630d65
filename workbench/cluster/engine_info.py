"""What the kernel knows of an engine, and who is told what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..messages import Up
from .deaths import Ending

_KNOWN = ("uuid", "pid", "host", "python", "device")


@dataclass
class EngineInfo:
    """One engine as the kernel sees it.

    Attributes:
        id: Permanent; never given to another engine of this cluster but its replacement.
        state: idle, busy, dead.
        exit: How it ended; None while it lives.
        frameworks: What it has imported.
    """

    id: int
    uuid: str
    pid: int = 0
    host: str = ""
    python: str = ""
    device: str = "cpu"
    state: str = "idle"
    exit: Ending | None = None
    frameworks: set[str] = field(default_factory=set)
    began: float = 0.0  # its start time, which tells it from a later process with the same pid


@dataclass(frozen=True)
class Listeners:
    """Who is told what; each is called on a background thread and must return quickly."""

    message: Callable[[int, Up], None]
    death: Callable[[EngineInfo], None]
    helper: Callable[[str], None] = lambda text: None
    """Told, in words, when a process of the cluster that is no engine ended."""


NOBODY = Listeners(message=lambda engine, message: None, death=lambda engine: None)
"""Who hears of engines that belong to no cluster yet, or to none any more."""


def described(info: EngineInfo) -> dict[str, Any]:
    """Return what another kernel must know of an engine, for `recalled`."""
    return {
        **{name: getattr(info, name) for name in _KNOWN},
        "frameworks": sorted(info.frameworks),
        "create_time": info.began,
    }


def recalled(engine: int, about: Mapping[str, Any]) -> EngineInfo:
    """Return an engine as another kernel has described it."""
    known = {key: value for key, value in about.items() if key in _KNOWN}
    info = EngineInfo(engine, **known, frameworks=set(about["frameworks"]))
    info.began = float(about["create_time"])
    return info
