"""Shows active cells and runs: asks for snapshots and draws them at most 5 times a second."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import RunError, WorkbenchError
from ..execution.outcome import outcome_notes
from ..execution.paused import attend, unattended
from ..execution.run import Run
from ..execution.stop import settle
from ..session.keeping import Keeping, idle_words
from ..views import text
from ..views.blocks import Blocks
from ..views.live.live import NoView, make_view
from .awake import keep_awake

if TYPE_CHECKING:
    from ..execution.task import Task
    from ..session.access import ClusterAccess

log = logging.getLogger("workbench.session")
INTERRUPTED = frozenset({"WB-RUN-069", "WB-RUN-088"})
"""Error codes of a run that its user has interrupted."""
FRAME_S = 0.2
FIRST_S = 0.6
"""A cell that ends within this time shows its complete output once; tests of notebooks compare it.
"""


class _Pump:
    """Calls `draw` on a separate thread until it is closed; measures the cost of drawing."""

    def __init__(self, draw: Callable[[], None]) -> None:
        self._draw = draw
        self._end = threading.Event()
        self._began = time.perf_counter()
        self._cpu_s = 0.0
        self._thread = threading.Thread(target=self._main, name="workbench-view", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        while not self._end.wait(FRAME_S):
            before = time.thread_time()
            try:
                self._draw()
            except Exception:  # what follows may be drawn again
                log.exception("A frame of the live view could not be drawn")
            self._cpu_s += time.thread_time() - before

    @property
    def cpu_share(self) -> float:
        """Share of one core spent drawing so far."""
        return self._cpu_s / max(1e-9, time.perf_counter() - self._began)

    def end(self) -> None:
        """End the thread after the current frame."""
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)


def check_view(plot: str) -> None:
    """Raise PlanError if runs cannot be shown in this way here."""
    make_view(plot, lambda name, fields: None, "")


def tell(task: Task | None, error: RunError | None) -> None:
    """Report in the output that a cell in the background has failed.

    Nothing is reported if a rank's traceback already shows the error.
    """
    if task is not None and error is not None and not task.explained:
        task.board.say_with_it(str(error))


def _show_outputs(outputs: Blocks, task: Task, *, final: bool) -> None:
    """Show the output of a cell; if that fails, its end is shown as plain text."""
    try:
        outputs.update(task.board, final=final)
    except Exception as error:  # the cell continues, and ends as without a view
        log.exception("Outputs could not be drawn")
        if final:
            with contextlib.suppress(Exception):
                sys.stderr.write(
                    f"note: the view failed ({error!r}), so the output is shown as plain text\n"
                )
                sys.stdout.write(task.board.text() + "\n")


def _draw_late(task: Task, outputs: Blocks) -> None:
    """Continue to show output after the cell's end; a thread of the user can still print."""
    waiting = threading.Event()

    def draw() -> None:
        waiting.clear()
        _show_outputs(outputs, task, final=True)

    def late() -> None:
        if not waiting.is_set():
            waiting.set()
            timer = threading.Timer(FRAME_S, draw)
            timer.daemon = True
            timer.start()

    task.on_late = late


class RunView:
    """A run's live dashboard below its cell; an error in it adds a note and does not end the run.

    Args:
        brief: Whether only one line remains at the end.
    """

    def __init__(self, run: Run, plot: str, *, brief: bool = False) -> None:
        self.run = run
        self._outputs = Blocks()
        self._view = make_view(plot, self._command, run.name, brief=brief)
        self._shown("begin")
        self._pump = _Pump(self._draw)

    def _command(self, name: str, fields: dict[str, Any]) -> None:
        actions: dict[str, Callable[[], None]] = {
            "stop": self.run.stop,
            "pause": self.run.pause,
            "resume": self.run.resume,
            "step": self.run.step,
            "scale": lambda: self._scale(fields.get("workers")),
        }
        if name in actions:
            actions[name]()

    def _scale(self, workers: Any) -> None:
        """Change the run's number of workers in the background; new engines can be needed."""

        def scale() -> None:
            try:
                self.run.scale(workers, wait=False)
            except WorkbenchError as error:
                self.run.note(str(error))

        threading.Thread(target=scale, name="workbench-scale", daemon=True).start()

    def _shown(self, what: str) -> bool:
        """Let the view `begin`, `update` or `end`; after its first error the view is not used."""
        try:
            getattr(self._view, what)(self.run.snapshot())
        except Exception as error:
            log.exception("The view of run %r failed", self.run.name)
            self._view = NoView()
            self.run.note(
                f"The run's view failed, but the run continues: {type(error).__name__}: {error}"
            )
            return False
        return True

    def _draw(self) -> None:
        self.run.drawn(self._pump.cpu_share)
        self._shown("update")
        task = self.run.task
        if task is not None and task.changed.is_set():
            task.changed.clear()
            _show_outputs(self._outputs, task, final=False)

    def _finish(self) -> None:
        try:
            self._pump.end()
            if not self._shown("end"):
                with contextlib.suppress(Exception):
                    sys.stdout.write(text.report(self.run.snapshot()) + "\n")
        finally:  # also if an interrupt arrives during drawing
            if self.run.task is not None:
                _show_outputs(self._outputs, self.run.task, final=True)
                _draw_late(self.run.task, self._outputs)

    def wait(self) -> Run:
        """Wait until the run is over; an interrupt stops the run and marks the cell as an error.

        Raises:
            RunError: The run failed or was interrupted.
        """
        try:
            self.run.wait()
        except KeyboardInterrupt:
            self.run.stop()
            settle(self.run.over, self.run.interrupt)
            raise RunError(
                f"Interrupted: run {self.run.name!r} was stopped after "
                f"{self.run.history.totals.steps} steps.",
                next_step="the run's history is in wb.runs",
                code="WB-RUN-088",
            ) from None
        except RunError as error:
            here = copy.copy(error)  # the run keeps the complete error for later readers
            here.shown = self.run.task is not None and self.run.task.explained
            raise here from None
        finally:
            self._finish()
        return self.run

    def follow(self) -> None:
        """Return at once; the view continues in the background."""
        keep_awake(self.run.over.wait)
        threading.Thread(target=self._follow, name="workbench-follow", daemon=True).start()

    def _follow(self) -> None:
        self.run.over.wait()
        tell(self.run.task, self.run.error)
        self._finish()


class CellView:
    """The output blocks of a cell without a strategy."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._outputs = Blocks()

    def _draw(self, final: bool = False) -> None:
        if self.task.changed.is_set() or final:
            self.task.changed.clear()
            _show_outputs(self._outputs, self.task, final=final)

    def wait(self) -> Task:
        """Wait until the cell is over on all its engines.

        Raises:
            RunError: A rank failed, or the cell was interrupted.
        """
        try:
            self._loop()
        except KeyboardInterrupt:
            self.task.interrupt()
            settle(self.task.over, self.task.interrupt)
        finally:
            unattended()
            self._finish()
        error = self.task.failure()
        if error is not None:
            error.shown = self.task.explained
            raise error
        return self.task

    def _loop(self) -> None:
        # The rate limit must not delay a short cell: wait for its end, and draw only meanwhile.
        attend()
        if self.task.over.wait(FIRST_S):
            return
        self.task.when_long()
        while not self.task.over.wait(FRAME_S):
            self._draw()
            attend(self._draw)

    def follow(self) -> None:
        """Return at once; outputs still appear below the cell."""
        keep_awake(self.task.over.wait)
        threading.Thread(target=self._follow, name="workbench-follow", daemon=True).start()

    def _follow(self) -> None:
        self._loop()
        tell(self.task, self.task.failure())
        self._finish()

    def _finish(self) -> None:
        for engine, outcome in self.task.outcomes.items():
            for note in outcome_notes({engine: outcome}):
                self.task.board.message(engine, "stream", {"name": "stderr", "text": f"{note}\n"})
        self._draw(final=True)
        _draw_late(self.task, self._outputs)


def show_attached(cluster: ClusterAccess) -> Run | None:
    """Show the work of a cluster that was taken over; return its run, if there is one."""
    busy = cluster.busy
    if isinstance(busy, Run):
        RunView(busy, "auto").follow()
        return busy
    if busy is not None:
        CellView(busy).follow()
    return None


def kept_words(keeping: Keeping) -> str:
    """Print how to find a kept cluster again, and when it ends."""
    name, idle_s = keeping.id, keeping.idle_timeout_s
    end = "never ends by itself"
    if math.isfinite(idle_s):
        end = f"also ends when it is idle for {idle_words(idle_s)}"
    return (
        f"the cluster is kept as {name}: to use the cluster again, also in another notebook, run "
        f"`%cluster attach {name}`\n"
        f"to end the cluster, run `%cluster stop` or `workbench stop {name}`; the cluster {end}"
    )
