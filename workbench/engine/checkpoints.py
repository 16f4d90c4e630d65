"""Checkpoints of a run on its engines: when, what, and never half of one.

    training     . . step 99 | copy | step 100 . . . . . . . step 199 | copy | . .
    background                       write, flush, rename            write, flush, rename

Training stands still for the copy alone, which is taken between two steps, on all workers between
the same two. A thread of each engine then writes: rank 0 what stands for all (model, optimizer,
scheduler), every rank what it alone has (random states, its own replica). All of it goes into
`step-N.<run>.tmp`; when the last part is there, rank 0 renames the folder to `step-N`. So whatever
is killed at whatever moment, a folder named `step-N` is whole, and the one before it stays until
then. A write that fails (a full disk) is told and costs that checkpoint, not the run
(`checkpoint_writing.py`).
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import checkpoints as layout
from .. import events
from ..errors import FitError, RunError
from .checkpoint_writing import Writer
from .context import require

if TYPE_CHECKING:
    from ..strategies.base import Strategy
    from .context import RunContext

clock = time.perf_counter


class Checkpoints:
    """Checkpoints of the trainings of one cell, on one engine.

    Attributes:
        every: Steps between two; 0 where none are written.
        start: The checkpoint that the run goes on from; None where it begins anew.
        resumed_step: Steps that were done when this run began; 0 where it begins anew.
        stalled_s: How long training stood still for copies.
    """

    def __init__(self, context: RunContext) -> None:
        spec = context.spec
        self.context = context
        self.every = spec.checkpoint_every if spec.checkpoint else 0
        self.start = layout.at(spec.resume) if spec.resume else None
        self.resumed_step = 0
        self.stalled_s = 0.0
        self.asked = False
        self._trainings = 0
        self._strategy: Strategy | None = None
        self._position: Callable[[], Mapping[str, Any]] = dict
        self._kept: tuple[Any, ...] = ()
        self._saved = -1
        self._ends_with_cell = False
        self._writer = Writer(context, Path(spec.checkpoint)) if spec.checkpoint else None

    @functools.cached_property
    def _format(self) -> Any:
        """The framework's own module; imported only by runs that need it."""
        framework = self.context.spec.framework
        return importlib.import_module(f"workbench.engine.{framework}_checkpoints")

    # -- going on ----------------------------------------------------------------------------------

    def enter(
        self,
        strategy: Strategy,
        position: Callable[[], Mapping[str, Any]] = dict,
        kept: tuple[Any, ...] = (),
        *,
        ends_with_cell: bool = False,
    ) -> Mapping[str, Any] | None:
        """Begin a training of the cell; return where it stood if the run goes on inside it.

        An earlier training of the cell is done again: what it left may be needed.

        Args:
            position: Says where in the data training stands.
            kept: Further objects with `state_dict` and `load_state_dict`.
            ends_with_cell: Whether only the end of the cell tells the end of this training.

        Raises:
            FitError: The cell has changed since: the checkpoint is of another place in it.
        """
        self._strategy, self._position, self._kept = strategy, position, kept
        if self.every:
            _ = self._format  # now: the first copy must not wait for an import
        self._ends_with_cell = ends_with_cell
        self._saved = self.context.trained
        number, self._trainings = self._trainings, self._trainings + 1
        if self.start is None or self.start.about.get("training") != number:
            return None
        about = self.start.about
        if about["base"] != self.context.trained:
            raise FitError(
                "The checkpoint is of another cell: the trainings before this one differ.",
                seen=f"{self.context.trained} steps before it, then {about['base']}",
                next_step="go on with the cell as it was: wb.resume runs the one that was saved",
                code="WB-FIT-002",
            )
        self._saved = self.resumed_step = self.start.step
        return about

    def restore(self, *, whole: bool = True) -> None:
        """Give the training the state of the checkpoint it goes on from; on all ranks.

        Args:
            whole: Whether random states are set as well: they must be the last thing before a step.

        Raises:
            FitError: The model, or its optimizer, has another form.
            RunError: The checkpoint cannot be read.
        """
        assert self.start is not None, "there is a checkpoint to go on from"
        assert self._strategy is not None, "enter comes first"
        path, about = Path(self.start.path), self.start.about
        strategy, spec = self._strategy, self.context.spec
        state = self._read(path / "state")
        own = None
        alike = about["world_size"] == spec.world_size and about["strategy"] == spec.strategy
        if alike and (path / f"rank-{spec.rank}").is_dir():
            own = self._read(path / f"rank-{spec.rank}")
        elif alike and "written" in about and (self.context.sync or not spec.rank):
            self.context.emit(events.Warned(rank=spec.rank, text=self._without_own(path)))
        try:
            strategy.load_state(state["strategy"])
            if own is not None and own["strategy"]:
                strategy.load_own_state(own["strategy"])
            for thing, saved in zip(self._kept, state["kept"], strict=True):
                thing.load_state_dict(saved)
        except (KeyError, IndexError, ValueError, TypeError, RuntimeError) as error:
            if type(error).__module__.startswith("workbench."):
                raise
            raise FitError(
                "The checkpoint does not fit what the cell trains.",
                seen=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                allowed="the model, optimizer and scheduler it was taken of",
                next_step="go on with the cell as it was, or begin anew in another folder",
                code="WB-FIT-003",
            ) from error
        if whole and own is not None:
            self._format.set_random_state(own["random"])

    def _without_own(self, path: Path) -> str:
        rank = self.context.spec.rank
        return (
            f"{path / f'rank-{rank}'} is missing: what rank {rank} alone had is lost (its random "
            "states). The run goes on, but does not end as one that was never interrupted."
        )

    def tell(self) -> None:
        """Say once where the run goes on from."""
        spec, start = self.context.spec, self.start
        if start is None or spec.rank:
            return
        then = int(start.about["world_size"])
        workers = (
            "" if then == spec.world_size else f" ({then} workers then, {spec.world_size} now)"
        )
        text = f"Resumed at step {start.step} from {start.path}{workers}."
        self.context.emit(events.Noted(rank=0, text=text))

    def _read(self, folder: Path) -> Any:
        try:
            return self._format.read_state(folder)
        except FitError:
            raise
        except Exception as error:  # damaged in a way that the format's own reader found
            if isinstance(error, RunError):
                raise
            assert self.start is not None, "there is a checkpoint to go on from"
            what = f"{folder.name} cannot be read ({type(error).__name__}: {error})"
            raise layout.refusal(self.start, [what]) from error

    # -- saving ------------------------------------------------------------------------------------

    def is_due(self, done: int | None = None) -> bool:
        """Whether it is time; steps may be done several at a time.

        Args:
            done: Steps done, where the run's rows do not tell.
        """
        if not self.every:
            return False
        done = self.context.trained if done is None else done
        return done != self._saved and (
            self.asked or done // self.every != self._saved // self.every
        )

    def step_done(self) -> bool:
        """Save if it is time; called between steps, on all ranks alike. Returns whether it did."""
        if not self.is_due():
            return False
        self.save()
        return True

    def save(self, done: int | None = None) -> None:
        """Take a copy now and let it be written; nothing where this very step is saved."""
        step = self.context.trained if done is None else done
        if not self.every or step == self._saved or self._strategy is None:
            return
        assert self._writer is not None, "there is a folder where some are written"
        began = clock()
        self._writer.wait()
        strategy, spec = self._strategy, self.context.spec
        self._saved, self.asked = step, False
        if not self.context.sync and spec.rank:
            return
        shared = {
            "strategy": strategy.snapshot(),
            "kept": [self._format.copied(thing.state_dict()) for thing in self._kept],
        }
        own = {"strategy": strategy.own_state(), "random": self._format.random_state()}
        about = self._about(step)
        stall_s = clock() - began
        self.stalled_s += stall_s
        self._writer.begin(self._format, step, shared, own, about, stall_s)

    def _about(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint's manifest says."""
        spec = self.context.spec
        return {
            "version": layout.VERSION,
            "step": step,
            "training": self._trainings - 1,
            "world_size": spec.world_size,
            "strategy": spec.strategy,
            "framework": spec.framework,
            "options": spec.options,
            "run": spec.run_id,
            **self._position(),
        }

    def contents(self) -> tuple[Any, dict[str, Any]] | None:
        """Return what this worker alone can say of a training that failed: state and manifest.

        None between trainings, and before there is anything to say.
        """
        if self._strategy is None:
            return None
        kept = [self._format.copied(thing.state_dict()) for thing in self._kept]
        shared = {"strategy": self._format.copied(self._strategy.state()), "kept": kept}
        return shared, self._about(self.context.trained)

    def write_state(self, folder: Path, state: Any) -> int:
        """Write a state into a new folder; return its bytes."""
        return int(self._format.write_state(folder, state))

    # -- the end -----------------------------------------------------------------------------------

    def conclude(self, *, failed: bool) -> None:
        """Save the end of a training that went well; let a write under way come to its end."""
        writer = self._writer
        if failed:
            if writer is not None:
                writer.leave()
        else:
            if self._ends_with_cell:
                self.save()
            if writer is not None:
                writer.conclude()
        self._strategy, self._kept, self._position = None, (), dict


def checkpoints_of(context: RunContext) -> Checkpoints:
    """Return the checkpoints of the cell under way, made when first asked for."""
    if context.checkpoints is None:
        context.checkpoints = Checkpoints(context)
    found: Checkpoints = context.checkpoints
    return found


def checkpoint() -> None:
    """Ask for a checkpoint at the end of the step under way; call it on every rank alike.

    Raises:
        RunError: There is no run.
        FitError: The line names no folder for checkpoints.
    """
    context = require("wb.checkpoint")
    if not context.spec.checkpoint:
        raise FitError(
            "The run has no folder for checkpoints.",
            next_step="name one on the line: %%distributed mirrored --checkpoint DIR",
            code="WB-FIT-004",
        )
    checkpoints_of(context).asked = True


def resumed_step() -> int:
    """Return the steps that were done before this run went on from a checkpoint; 0 for a new run.

    For loops that bring their own batches: `wb.prepare` passes over those of its loader by itself.
    """
    context = require("wb.resumed_step")
    return checkpoints_of(context).resumed_step
