"""What is read of a run by everything that stands below it: its plan, its history, how it is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..errors import RunError
    from ..shared.plan import Plan
    from .disk import FarWriter
    from .snapshot import Snapshot
    from .store import RunHistory


class RunData(Protocol):
    """A run as views, explanations and log sinks know it; `Run` is one."""

    plan: Plan
    name: str
    number: int
    folder: Path
    engines: tuple[int, ...]
    members: tuple[int, ...]
    far: FarWriter
    devices: tuple[str, ...]
    history: RunHistory
    error: RunError | None
    began: float
    init_from: str
    resume_from: str
    rows_from: int
    over: threading.Event

    @property
    def state(self) -> Any:
        """Where it is in its life (`events.State`)."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, in whatever way."""

    def snapshot(self) -> Snapshot:
        """Return the run at this moment, for views."""

    def meta(self) -> dict[str, Any]:
        """Return what `run.json` says about it."""

    def note(self, text: str, deaths: Sequence[int] = ()) -> None:
        """Add something the user should know about it."""
