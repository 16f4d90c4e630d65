"""What the kernel is told of a cell's end on this engine."""

from __future__ import annotations

from typing import Any

from ..errors import EngineSpentError, RunStopped, WorkbenchError
from . import places
from .advice import advice, plain
from .links.wire import LinkError


def _words(error: BaseException) -> str:
    """Return an error's message, with cells named as the notebook names them."""
    number = places.cell_number(error.filename or "") if isinstance(error, SyntaxError) else None
    if isinstance(error, SyntaxError) and number is not None:
        return f"{error.msg} (Cell In[{number}], line {error.lineno})"
    return places.fold_text(plain(str(error)))


def outcome_of(error: BaseException | None) -> dict[str, Any]:
    """Return `status`, and of an error its words and what may help against it."""
    if error is None:
        return {"status": "ok"}
    status = "error"
    if isinstance(error, RunStopped):
        status = "stopped"
    elif isinstance(error, KeyboardInterrupt):
        status = "interrupted"
    outcome: dict[str, Any] = {
        "status": status,
        "ename": type(error).__name__,
        "evalue": _words(error),
    }
    if isinstance(error, EngineSpentError):
        outcome["replace"] = True
    if isinstance(error, LinkError) and error.felt:
        outcome["felt"] = error.felt
    if not isinstance(error, WorkbenchError):  # ours say it themselves
        outcome["advice"] = advice(f"{type(error).__name__}: {error}")
    return outcome
