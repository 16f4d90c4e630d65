"""The state that a worker keeps in memory when another worker dies; the run can continue from it.

If every worker has the whole model and the optimizer's state, a worker's death loses nothing. The
survivors' current step has failed in the middle of its all-reduce, so their parameters are those
after the last complete step. They keep a copy when the cell ends, and report its step. The kernel
lets the worker with the latest step write its copy as a checkpoint, from which all begin again.

A worker that was interrupted while it changed its parameters has parameters that are partly old and
partly new, so it keeps nothing (`update_began` and `update_ended` tell).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import RunError
from ...shared.checkpoints import MANIFEST
from .files import rename_folder, write_text

if TYPE_CHECKING:
    from ..context import RunContext
    from .checkpoints import Checkpoints


class Rescue:
    """Watches one cell's updates, and keeps the complete state when it fails."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._began = self._ended = -1  # the step whose update did

    def update_began(self) -> None:
        """The optimizer begins to change the parameters."""
        self._began = self._context.trained

    def update_ended(self) -> None:
        """The optimizer has changed them all."""
        self._ended = self._context.trained

    @property
    def whole(self) -> bool:
        """Whether the parameters are those after `trained` steps."""
        return self._began != self._context.trained

    def keep(self, checkpoints: Checkpoints) -> int:
        """Keep a copy of the training's state; return its step, or -1 if there is none."""
        _kept.clear()
        contents = checkpoints.contents() if self.whole else None
        if contents is None:
            return -1
        shared, about = contents
        _kept.update(shared=shared, about=about, write=checkpoints.write_state)
        return int(about["step"])


_kept: dict[str, Any] = {}


def write(folder: str) -> str:
    """Write the kept state as a checkpoint into a folder; return its path.

    Raises:
        RunError: Nothing was kept.
    """
    if not _kept:
        raise RunError("This engine has not kept the state of the failed run.", code="WB-RUN-027")
    about, write_state = _kept["about"], _kept["write"]
    final = Path(folder) / f"step-{about['step']}"
    temporary = final.with_name(f"{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_state(temporary / "state", _kept["shared"])
    write_text(temporary / MANIFEST, json.dumps(about))
    rename_folder(temporary, final)
    _kept.clear()
    return str(final)


def forget() -> None:
    """Release the kept state, because another cell begins."""
    _kept.clear()


def watch(context: RunContext, framework: Any) -> Rescue | None:
    """Return the object that keeps this cell's state, if the run may continue from it."""
    forget()
    hooks: Callable[[Rescue], Callable[[], None]] | None = getattr(framework, "on_updates", None)
    if not context.spec.rescue or hooks is None:
        return None
    rescue = Rescue(context)
    context.closers.append(hooks(rescue))
    return rescue
