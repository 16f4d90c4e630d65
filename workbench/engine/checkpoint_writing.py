"""Checkpoints on their way to the disk: one engine's parts, and rank 0's folder of all.

Nothing here stands in training's way: a thread writes (`checkpoints.py` says what, and when).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import checkpoints as layout
from .. import checksums, events
from ..errors import RunError
from .durable import rename_folder, write_text

if TYPE_CHECKING:
    from .context import RunContext

clock = time.perf_counter
POLL_S = 0.02
PARTS_S = 120.0
"""How long rank 0 waits for the others' parts once its own are written."""
LEAVE_S = 2.0
"""How long the end of a cell that failed waits for a write under way."""


class Writer:
    """Writes the checkpoints of one cell on one engine, one at a time.

    Args:
        folder: Where checkpoints lie; what crashes left half-written there is taken away.
    """

    def __init__(self, context: RunContext, folder: Path) -> None:
        spec = context.spec
        self.context = context
        self._folder = folder
        self._token = layout.token(spec.prefix, spec.run_id)
        # Workers that take each step together bring a part each; others are left where they are.
        self._parts = spec.world_size // spec.replicas if context.sync else 1
        self._thread: threading.Thread | None = None
        self._leaving = threading.Event()
        self._missed: list[int] = []  # steps, since the last that was written
        self._told: set[object] = set()  # reasons, since then
        if spec.rank == 0:
            layout.sweep(folder, lambda _, token: token != self._token)

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
            shared: What stands for all ranks; rank 0's is written.
            own: What this rank alone has.
            about: The manifest.
            stall_s: How long training stood still for the copy.
        """
        self._thread = threading.Thread(
            target=self._write,
            args=(format_, step, shared, own, about, stall_s),
            name=f"workbench-checkpoint-{self.context.spec.rank}",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the write under way: there is memory for one copy."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def conclude(self) -> None:
        """End of a training: wait for the write under way, and say what was missed lately."""
        self.wait()
        if len(self._missed) > 1 and self.context.spec.rank == 0:
            self._warn(f"{self._how_many()} could not be written; {self._stands()}.")
        self._missed.clear()
        self._told.clear()

    def leave(self) -> None:
        """End of a cell that failed: a write under way has `LEAVE_S`, and waits for nobody."""
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
        if rank == 0:  # others may have written to a checkpoint after it was given up
            layout.sweep(self._folder, lambda old, token: token == self._token and old < step)
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            part, name = temporary / f".rank-{rank}", f"rank-{rank}"
            size_bytes = format_.write_state(part, own)
            files = checksums.of_folder(part, f"{name}/")
            if rank:
                (temporary / f"{name}.json").write_text(json.dumps(files))
            rename_folder(part, temporary / name)
            if rank == 0:
                size_bytes += format_.write_state(temporary / "state", shared)
                files |= checksums.of_folder(temporary / "state", "state/")
                self._await_parts(temporary)
                files |= self._others_sums(temporary)
                about = {**about, "size_bytes": size_bytes, "written": time.time(), "files": files}
                write_text(temporary / layout.MANIFEST, json.dumps(checksums.sealed(about)))
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
                raise RunError("another worker could not write its part", code="WB-RUN-005")
            if clock() > end_s or self._leaving.is_set():
                raise RunError(f"the part of {missing[0].name} did not come", code="WB-RUN-006")
            self._leaving.wait(POLL_S)

    def _others_sums(self, temporary: Path) -> checksums.Sums:
        """Return the checksums that the other engines have left beside their parts."""
        found: checksums.Sums = {}
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
            if layout.is_whole(final):
                shutil.rmtree(temporary, ignore_errors=True)
                return
            self._remove(final)
        rename_folder(temporary, final)
        for old in layout.found(self._folder)[: -layout.KEEP]:
            with contextlib.suppress(OSError):
                self._remove(Path(old.path))

    def _remove(self, whole: Path) -> None:
        """Take a checkpoint away; killed in the middle, no half of it is called one."""
        doomed = Path(f"{whole}.{self._token}.old.tmp")
        whole.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _give_up(self, temporary: Path, step: int, error: Exception) -> None:
        """Leave nothing half-written; say what happened and what still stands."""
        rank = self.context.spec.rank
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        else:  # the folder is rank 0's: it may be writing there, and must hear of this in any case
            shutil.rmtree(temporary / f".rank-{rank}", ignore_errors=True)
            with contextlib.suppress(OSError):
                temporary.mkdir(exist_ok=True)
                (temporary / "failed").touch()
        if self._leaving.is_set():
            return
        self._missed.append(step)
        reason = type(error), getattr(error, "errno", None)
        if reason in self._told:
            return  # one line for each try would bury everything else
        self._told.add(reason)
        self._warn(
            f"The checkpoint at step {step} could not be written; {self._stands()}, training goes "
            f"on, and the next one is tried. {_words(error)}"
        )

    def _tell_success(self, step: int) -> None:
        """Say that checkpoints are written again, where several were missed."""
        if len(self._missed) > 1:
            self._warn(
                f"Checkpoints are written again, from step {step} on; {self._how_many()} could "
                "not be written."
            )
        self._missed.clear()
        self._told.clear()

    def _how_many(self) -> str:
        missed = self._missed
        return f"{len(missed)} checkpoints (steps {missed[0]} to {missed[-1]})"

    def _stands(self) -> str:
        last = layout.latest(self._folder)
        return f"step {last.step} is the last good one" if last else "there is none before it"

    def _warn(self, text: str) -> None:
        self.context.emit(events.Warned(rank=self.context.spec.rank, text=text))


def _words(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
