"""Checkpoints of a run on its engines: their time, content and completeness.

    training     . . step 99 | copy | step 100 . . . . . . . step 199 | copy | . .
    background                       write, flush, rename            write, flush, rename

Training only pauses for the copy, which is taken between the same two steps on all workers. A
thread of each engine then writes it. Rank 0 writes the common part (model, optimizer, scheduler),
every rank its own part (random states, its own replica). All of it goes into `step-N.<run>.tmp`.
When the last part is there, rank 0 renames the folder to `step-N`. So a folder named `step-N` is
complete, even if any process is killed at any moment, and the checkpoint before it stays until
then. If a write fails (a full disk), the failure is reported, and only that checkpoint is lost.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import FitError, RunError
from ...shared import checkpoints, events
from ..context import require
from .files import rename_folder, write_text

if TYPE_CHECKING:
    from ..context import RunContext
    from ..contract import Strategy

clock = time.perf_counter


class Checkpoints:
    """Checkpoints of the trainings of one cell, on one engine.

    Attributes:
        every: Steps between two; 0 if none are written.
        start: The checkpoint that the run continues from; None for a new run.
        resumed_step: Steps that were done when this run began; 0 for a new run.
        stalled_s: How long training paused for copies.
    """

    def __init__(self, context: RunContext) -> None:
        spec = context.spec
        self.context = context
        self.every = spec.checkpoint_every if spec.checkpoint else 0
        self.start = checkpoints.at(spec.resume) if spec.resume else None
        self.resumed_step = 0
        self.stalled_s = 0.0
        self.asked = False
        self._trainings = 0
        self._strategy: Strategy | None = None
        self._position: Callable[[], Mapping[str, Any]] = dict
        self._kept: tuple[Any, ...] = ()
        self._saved = -1
        self._ends_with_cell = False
        # A worker that joins later writes with the others from then on (`regrouped`).
        writes = spec.checkpoint and not context.membership.waits
        self._writer = Writer(context, Path(spec.checkpoint)) if writes else None

    @functools.cached_property
    def _format(self) -> Any:
        """The framework's own module; imported only by runs that need it."""
        return format_of(self.context)

    # -- going on ----------------------------------------------------------------------------------

    def enter(
        self,
        strategy: Strategy,
        position: Callable[[], Mapping[str, Any]] = dict,
        kept: tuple[Any, ...] = (),
        *,
        ends_with_cell: bool = False,
    ) -> Mapping[str, Any] | None:
        """Begin a training of the cell; return its position if the run continues inside it.

        Earlier trainings of the cell are repeated, because later ones may need their results.

        Args:
            position: Returns the position in the data.
            kept: Other objects with `state_dict` and `load_state_dict`.
            ends_with_cell: Whether this training ends only when the cell ends.

        Raises:
            FitError: The cell has changed: the checkpoint belongs to another place in it.
        """
        self._strategy, self._position, self._kept = strategy, position, kept
        if self.every:
            _ = self._format  # imported now, so that the first copy does not wait for an import
        self._ends_with_cell = ends_with_cell
        self._saved = self.context.trained
        number, self._trainings = self._trainings, self._trainings + 1
        if self.start is None or self.start.about.get("training") != number:
            return None
        about = self.start.about
        if about["base"] != self.context.trained:
            raise FitError(
                "A different cell wrote the checkpoint. In that cell, the trainings before this "
                "one took a different number of steps.",
                seen=f"steps before this training: {self.context.trained} in this cell, "
                f"{about['base']} in the cell that wrote the checkpoint",
                next_step="use wb.resume(DIR), which runs the cell that wrote the checkpoint",
                code="WB-FIT-002",
            )
        self._saved = self.resumed_step = self.start.step
        return about

    def restore(self, *, whole: bool = True) -> None:
        """Load the state of the checkpoint that the training continues from; on all ranks.

        Args:
            whole: Whether random states are set too; this must be the last action before a step.

        Raises:
            FitError: The model or its optimizer has a different form.
            RunError: The checkpoint cannot be read.
        """
        assert self.start is not None, "internal error: no checkpoint to continue from"
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
                "The checkpoint does not fit the model, optimizer or scheduler of the cell.",
                seen=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                allowed="the model, optimizer and scheduler with which the checkpoint was saved",
                next_step="run the unchanged cell that saved the checkpoint, or start a new run "
                "with another --checkpoint DIR",
                code="WB-FIT-003",
            ) from error
        if whole and own is not None:
            self._format.set_random_state(own["random"], spec.device)

    def _without_own(self, path: Path) -> str:
        rank = self.context.spec.rank
        return (
            f"{path / f'rank-{rank}'} is missing, so rank {rank}'s own state is lost (for example, "
            "the states of its random number generators). The run continues, but its result can "
            "differ from that of an uninterrupted run."
        )

    def tell(self, end_step: int | None = None) -> None:
        """Report once from where the run continues.

        Args:
            end_step: The step at which the training ends, if that is known.
        """
        spec, start = self.context.spec, self.start
        if start is None or spec.rank:
            return
        then = int(start.about["world_size"])
        workers = (
            ""
            if then == spec.world_size
            else f" (number of workers: {then} before, {spec.world_size} now)"
        )
        text = f"Resumed at step {start.step} from {spec.resume_name or start.path}{workers}."
        if end_step is not None and start.step >= end_step:
            text += (
                f" This wb.fit ends at step {end_step}, so no step is left. To train longer, call "
                "wb.resume with a larger `steps` or `epochs`."
            )
        self.context.emit(events.Noted(rank=0, text=text))

    def _read(self, folder: Path) -> Any:
        try:
            return self._format.read_state(folder)
        except FitError:
            raise
        except Exception as error:  # damage that the format's own reader found
            if isinstance(error, RunError):
                raise
            assert self.start is not None, "internal error: no checkpoint to continue from"
            what = f"{folder.name} cannot be read ({type(error).__name__}: {error})"
            raise checkpoints.refusal(self.start, [what]) from error

    def regrouped(self, saved: int) -> None:
        """Write with the present members from now on; cancel a write in progress.

        Args:
            saved: The latest saved step of all members.
        """
        self._saved = saved
        self.give_up()
        if self.context.spec.checkpoint:
            self._writer = Writer(self.context, Path(self.context.spec.checkpoint))

    def give_up(self) -> None:
        """End a write in progress without waiting for the others' parts."""
        if self._writer is not None:
            self._writer.give_up()

    @property
    def saved(self) -> int:
        """The last saved step."""
        return self._saved

    # -- saving ------------------------------------------------------------------------------------

    def is_due(self, done: int | None = None) -> bool:
        """Whether it is time to save; a call can do several steps.

        Args:
            done: Steps done, if the run's rows do not show it.
        """
        if not self.every:
            return False
        done = self.context.trained if done is None else done
        # A worker that catches up passes steps at which the others have saved.
        return done > self._saved and (self.asked or done // self.every > self._saved // self.every)

    def step_done(self) -> bool:
        """Save if it is time; called between steps, on all ranks. Return whether it saved."""
        return self.is_due() and self.save()

    def save(self, done: int | None = None) -> bool:
        """Take a copy now and write it; return whether this step was not saved before."""
        step = self.context.trained if done is None else done
        if not self.every or step == self._saved or self._strategy is None:
            return False
        assert self._writer is not None, "internal error: no folder for checkpoints"
        began = clock()
        self._writer.wait()
        strategy, spec = self._strategy, self.context.spec
        before, self._saved, self.asked = self._saved, step, False
        if not self.context.sync and spec.rank:
            return True
        try:
            snapshot = strategy.snapshot()
        except BaseException:  # it is taken when the workers that take part reach this step
            self._saved = before
            raise
        shared = {
            "strategy": snapshot,
            "kept": [self._format.copied(thing.state_dict()) for thing in self._kept],
        }
        random = self._format.random_state(spec.device)
        own = {"strategy": strategy.own_state(), "random": random}
        about = self._about(step)
        stall_s = clock() - began
        self.stalled_s += stall_s
        self._writer.begin(self._format, step, shared, own, about, stall_s)
        return True

    def _about(self, step: int) -> dict[str, Any]:
        """Return the content for a checkpoint's manifest."""
        spec = self.context.spec
        return {
            "version": checkpoints.VERSION,
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
        """Return this worker's state and manifest of a training that failed.

        None between trainings, and before there is a state to keep.
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
        """Save the end of a training that succeeded; finish a write in progress."""
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


def format_of(context: RunContext) -> Any:
    """Return the module that stores a state of the run's framework."""
    return importlib.import_module(f"workbench.engine.{context.spec.framework}.checkpoints")


def checkpoints_of(context: RunContext) -> Checkpoints:
    """Return the checkpoints of the current cell, made when first needed."""
    if context.checkpoints is None:
        context.checkpoints = Checkpoints(context)
    found: Checkpoints = context.checkpoints
    return found


def checkpoint() -> None:
    """Request a checkpoint at the end of the current step. Call this function on every rank.

    Raises:
        RunError: There is no run.
        FitError: The run has no folder for checkpoints: `--checkpoint DIR` was not given.
    """
    context = require("wb.checkpoint")
    if not context.spec.checkpoint:
        raise FitError(
            "The run has no folder for checkpoints.",
            next_step="add --checkpoint DIR to the cell's first line, as in %%distributed mirrored "
            "--checkpoint DIR",
            code="WB-FIT-004",
        )
    checkpoints_of(context).asked = True


def resumed_step() -> int:
    """Return how many steps were done before the run resumed from a checkpoint; 0 for a new run.

    Use this function in loops that make their own batches. The loader of `wb.prepare` skips the
    batches of these steps automatically.
    """
    context = require("wb.resumed_step")
    return checkpoints_of(context).resumed_step


POLL_S = 0.02
PARTS_S = 120.0
"""How long rank 0 waits for the others' parts after its own are written."""
LEAVE_S = 2.0
"""How long the end of a failed cell waits for a write in progress."""


class Writer:
    """Writes the checkpoints of one cell on one engine, one at a time.

    Args:
        folder: The folder of checkpoints; incomplete checkpoints left by crashes are removed.
    """

    def __init__(self, context: RunContext, folder: Path) -> None:
        spec = context.spec
        self.context = context
        self._folder = folder
        self._token = checkpoints.token(spec.prefix, spec.run_id)
        # Workers that take each step together write one part each; other workers write none.
        self._parts = spec.world_size // spec.replicas if context.sync else 1
        self._thread: threading.Thread | None = None
        self._leaving = threading.Event()
        self._missed: list[int] = []  # missed steps since the last written checkpoint
        self._told: set[object] = set()  # reasons, since then
        if spec.rank == 0:
            checkpoints.sweep(folder, lambda _, token: token != self._token)

    def begin(
        self,
        format_: Any,
        step: int,
        shared: Any,
        own: Any,
        about: Mapping[str, Any],
        stall_s: float,
    ) -> None:
        """Write in the background; the write before must have ended (`wait`).

        Args:
            format_: The framework's module of checkpoints, which has `write_state`.
            shared: The common part for all ranks; rank 0 writes it.
            own: This rank's own part.
            about: The manifest.
            stall_s: How long training paused for the copy.
        """
        self._thread = threading.Thread(
            target=self._write,
            args=(format_, step, shared, own, about, stall_s),
            name=f"workbench-checkpoint-{self.context.spec.rank}",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the write in progress, because there is memory for only one copy."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def conclude(self) -> None:
        """End a training: wait for the write in progress, and report missed checkpoints."""
        self.wait()
        if len(self._missed) > 1 and self.context.spec.rank == 0:
            self._warn(f"{self._how_many()} could not be written; {self._stands()}.")
        self._missed.clear()
        self._told.clear()

    def give_up(self) -> None:
        """End a write in progress without waiting for the others."""
        self._leaving.set()

    def leave(self) -> None:
        """End a failed cell: a write in progress has `LEAVE_S`, and does not wait for others."""
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(LEAVE_S)

    def _write(
        self,
        format_: Any,
        step: int,
        shared: Any,
        own: Any,
        about: Mapping[str, Any],
        stall_s: float,
    ) -> None:
        """Write this engine's parts; rank 0 makes a checkpoint of them."""
        began, rank = clock(), self.context.spec.rank
        temporary = self._folder / f"step-{step}.{self._token}.tmp"
        if rank == 0:  # others may have written to an abandoned checkpoint
            checkpoints.sweep(self._folder, lambda old, token: token == self._token and old < step)
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            part, name = temporary / f".rank-{rank}", f"rank-{rank}"
            size_bytes = format_.write_state(part, own)
            files = checkpoints.of_folder(part, f"{name}/")
            if rank:
                (temporary / f"{name}.json").write_text(json.dumps(files))
            rename_folder(part, temporary / name)
            if rank == 0:
                size_bytes += format_.write_state(temporary / "state", shared)
                files |= checkpoints.of_folder(temporary / "state", "state/")
                self._await_parts(temporary)
                files |= self._others_sums(temporary)
                about = {**about, "size_bytes": size_bytes, "written": time.time(), "files": files}
                write_text(temporary / checkpoints.MANIFEST, json.dumps(checkpoints.sealed(about)))
                self._publish(temporary, step)
                self._tell_success(step)
                self.context.emit(
                    events.CheckpointWritten(
                        rank=0, step=step, path=str(self._folder / f"step-{step}"),
                        seconds=clock() - began + stall_s, stall_s=stall_s, size_bytes=size_bytes,
                    )
                )  # fmt: skip
        except Exception as error:  # told, and training goes on
            self._give_up(temporary, step, error)

    def _await_parts(self, temporary: Path) -> None:
        """Wait until every engine has written its part."""
        end_s = clock() + PARTS_S
        missing = [temporary / f"rank-{r}" for r in self._ranks()]
        while missing := [part for part in missing if not part.is_dir()]:
            if not temporary.is_dir() or (temporary / "failed").exists():
                raise RunError(
                    "another worker could not write its part of the checkpoint",
                    code="WB-RUN-005",
                )
            if clock() > end_s or self._leaving.is_set():
                raise RunError(
                    f"{missing[0].name} did not write its part of the checkpoint within "
                    f"{PARTS_S:g} s",
                    code="WB-RUN-006",
                )
            self._leaving.wait(POLL_S)

    def _others_sums(self, temporary: Path) -> checkpoints.Sums:
        """Return the checksums that the other engines have written next to their parts."""
        found: checkpoints.Sums = {}
        for path in [temporary / f"rank-{r}.json" for r in self._ranks()[1:]]:
            found |= json.loads(path.read_text())
            path.unlink()
        return found

    def _ranks(self) -> range:
        spec = self.context.spec
        return range(0, self._parts * spec.replicas, spec.replicas)

    def _publish(self, temporary: Path, step: int) -> None:
        """Give the checkpoint its name; keep the newest."""
        final = self._folder / f"step-{step}"
        if final.exists():  # this step was reached before
            if checkpoints.is_whole(final):
                shutil.rmtree(temporary, ignore_errors=True)
                return
            self._remove(final)
        rename_folder(temporary, final)
        for old in checkpoints.found(self._folder)[: -checkpoints.KEEP]:
            with contextlib.suppress(OSError):
                self._remove(Path(old.path))

    def _remove(self, whole: Path) -> None:
        """Remove a checkpoint.

        If the process is killed meanwhile, the rest has no checkpoint's name.
        """
        doomed = Path(f"{whole}.{self._token}.old.tmp")
        whole.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _give_up(self, temporary: Path, step: int, error: Exception) -> None:
        """Remove incomplete files; report what happened and which checkpoint is still valid."""
        rank = self.context.spec.rank
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        # the folder belongs to rank 0, which may be writing there and must be told in any case
        else:
            shutil.rmtree(temporary / f".rank-{rank}", ignore_errors=True)
            with contextlib.suppress(OSError):
                temporary.mkdir(exist_ok=True)
                (temporary / "failed").touch()
        if self._leaving.is_set():
            return
        self._missed.append(step)
        reason = type(error), getattr(error, "errno", None)
        if reason in self._told:
            return  # a line for each try would hide all other output
        self._told.add(reason)
        self._warn(
            f"The checkpoint at step {step} could not be written; {self._stands()}. "
            f"Training and saving continue. The cause: {_words(error)}"
        )

    def _tell_success(self, step: int) -> None:
        """Report that checkpoints are written again, if several were missed."""
        if len(self._missed) > 1:
            self._warn(
                f"Since step {step}, Workbench can write checkpoints again. Before this step, "
                f"{self._how_many()} could not be written."
            )
        self._missed.clear()
        self._told.clear()

    def _how_many(self) -> str:
        missed = self._missed
        return f"{len(missed)} checkpoints (steps {missed[0]} to {missed[-1]})"

    def _stands(self) -> str:
        last = checkpoints.latest(self._folder)
        return (
            f"the last complete checkpoint is from step {last.step}"
            if last
            else "there is no earlier checkpoint"
        )

    def _warn(self, text: str) -> None:
        self.context.emit(events.Warned(rank=self.context.spec.rank, text=text))


def _words(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
