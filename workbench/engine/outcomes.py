"""What the kernel is told of a cell's end on this engine."""

from __future__ import annotations

from typing import Literal

from ..errors import EngineSpentError, RunStopped, WorkbenchError
from ..messages import CellOutcome
from . import places
from .advice import advice, plain
from .links.wire import LinkError


def _words(error: BaseException) -> str:
    """Return an error's message, with cells named as the notebook names them."""
    number = places.cell_number(error.filename or "") if isinstance(error, SyntaxError) else None
    if isinstance(error, SyntaxError) and number is not None:
        return f"{error.msg} (Cell In[{number}], line {error.lineno})"
    return places.fold_text(plain(str(error)))


def outcome_of(error: BaseException | None, traceback: str = "") -> CellOutcome:
    """Return how a cell ended, and of an error its words and what may help against it."""
    if error is None:
        return CellOutcome(status="ok")
    status: Literal["error", "stopped", "interrupted"] = "error"
    if isinstance(error, RunStopped):
        status = "stopped"
    elif isinstance(error, KeyboardInterrupt):
        status = "interrupted"
    ours = isinstance(error, WorkbenchError)  # ours say themselves what helps
    return CellOutcome(
        status=status,
        ename=type(error).__name__,
        evalue=_words(error),
        traceback=traceback,
        replace=isinstance(error, EngineSpentError),
        felt=error.felt if isinstance(error, LinkError) else "",
        advice=None if ours else advice(f"{type(error).__name__}: {error}"),
    )
