"""The interface of a run for modules below it: its plan, its history, its state."""

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
    """A run as views, explanations and log targets use it; `Run` is one."""

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
        """The state of the run (`events.State`)."""

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, with or without an error."""

    def snapshot(self) -> Snapshot:
        """Return the run at this moment, for views."""

    def meta(self) -> dict[str, Any]:
        """Return the content of `run.json` about the run."""

    def note(self, text: str, deaths: Sequence[int] = ()) -> None:
        """Add a note for the user about the run."""
