"""Runs cells in this process as an engine does, for tests of strategies: no kernel, no notebook.

    spec = RunSpec(mode="run", rank=0, world_size=1, ranks=(0,), run=1, strategy="one_device",
                   store=("127.0.0.1", port), prefix="run1/", run_dir=folder)
    with EngineHarness() as engine:
        report = engine.run(spec, source)

All of it is `runtime.run_cell`, as an engine calls it. Only two things are replaced: the shell
(plain `exec` for IPython) and the control link (a list for a socket to the kernel).
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..shared import events as shared_events
from ..shared.protocol import RunSpec, records_from
from .context import RunContext
from .interrupt import InterruptWatch
from .runtime import Engine, run_cell, support

if TYPE_CHECKING:
    from ..shared.messages import CellOutcome
    from .telemetry.control_link import Writer

Observer = Callable[[RunContext], object]


class PlainShell:
    """A shell without IPython (`runtime.Shell`): it compiles, executes, and returns the error.

    Attributes:
        namespace: The names that cells find and leave.
        error: The last cell's error, with its traceback as text; empty if there was none.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.error = ""

    def execute(self, source: str, number: int) -> BaseException | None:
        """Run the source as cell `number`; return what it raised."""
        file = f"<ipython-input-{number}-harness>"  # tracebacks and debuggers know cells by this
        lines = source.splitlines(keepends=True)
        linecache.cache[file] = (len(source), None, lines, file)  # autograph reads the source
        self.error = ""
        try:
            exec(compile(source, file, "exec"), self.namespace)
        except BaseException as error:
            self.error = _spell(error)
            return error
        return None


class CollectingLink:
    """A control link (`runtime.Link`) that keeps a run's messages.

    Args:
        post: Sends this engine's posts to the others of the run; None: there are no others.

    Attributes:
        begun: Called with the run before anything of it is set up.
        ended: Called with the run when its cell has succeeded, while the strategy still exists.
        events, rows, trained, train_s, eval_s: The run's messages, counted and measured.
        kernels_clock: No other clock is compared with this process's.
    """

    kernels_clock = True

    def __init__(self, post: Callable[[dict[str, Any]], object] | None = None) -> None:
        self._post = post
        self.begun: Observer | None = None
        self.ended: Observer | None = None
        self._run: RunContext | None = None
        self._writer: Writer | None = None
        self._early: list[tuple[str, int, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.rows = b""
        self.trained = 0
        self.train_s = self.eval_s = 0.0

    def attach(self, context: RunContext, writer: Writer | None) -> None:
        """Begin to carry a run's records."""
        self._run, self._writer = context, writer
        for said in self._early:
            context.board.hear(*said)
        self._early.clear()
        if self.begun is not None:
            self.begun(context)

    def detach(self) -> bool:
        """Keep what is left of the run and release it."""
        run, writer = self._run, self._writer
        self._run = self._writer = None
        if run is not None:
            self.rows = run.recorder.drain(1 << 20, final=True)
            self.trained, self.train_s, self.eval_s = run.trained, run.train_s, run.eval_s
        if writer is not None:
            writer.append_records(self.rows)
            for name, fields in self.events:
                writer.append_event(name, fields)
            writer.close()
        return True

    def emit(self, event: shared_events.Event) -> None:
        """Keep an event; one for the other engines is passed on."""
        if isinstance(event, shared_events.Posted) and self._post is not None:
            self._post(event.to_wire())
            return
        self.events.append((event.name, event.to_wire()))
        ended_well = isinstance(event, shared_events.CellLeft) and event.status == "ok"
        if ended_well and self.ended is not None and self._run is not None:
            self.ended(self._run)

    def close(self) -> None:
        """Do nothing: there is no kernel."""

    def hear(self, topic: str, rank: int, value: Any) -> None:
        """Give the run another engine's post, even if that is ahead of this one."""
        if self._run is None:
            self._early.append((topic, rank, value))
        else:
            self._run.board.hear(topic, rank, value)


@dataclass
class CellReport:
    """The results of a cell on one engine.

    Attributes:
        outcome: What `run_cell` returned.
        error: The error with its traceback; empty if there was none.
        rows: `record.RECORD` rows in the order of steps, those of a step's replicas by rank.
        events: Names and fields, as the kernel would have heard them.
        trained, train_s, eval_s: As in `RunContext`.
    """

    outcome: CellOutcome
    error: str
    rows: Any
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    trained: int = 0
    train_s: float = 0.0
    eval_s: float = 0.0


class EngineHarness:
    """This process as an engine; made in the main thread, for one run or many.

    A context manager: its watchdog of interrupts is a thread, which `close` ends.
    """

    def __init__(self) -> None:
        self._watch = InterruptWatch(self._break_out)
        self._engine = Engine(0, CollectingLink(), self._watch)
        self._cells = 0

    def __enter__(self) -> EngineHarness:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what belongs to the engine; it can run no cell any more."""
        self._watch.close()

    def run(
        self,
        spec: RunSpec,
        source: str = "",
        namespace: dict[str, Any] | None = None,
        link: CollectingLink | None = None,
    ) -> CellReport:
        """Run a cell, or take part in a run as a server if the spec says so.

        Args:
            namespace: The cell's names besides the engine's; it keeps what the cell sets.
            link: Where the run's messages go; by default one that only keeps them.
        """
        self._engine.link = link = link or CollectingLink()
        shell = PlainShell({"__name__": "__main__"} if namespace is None else namespace)
        self._cells += 1
        request = {"spec": spec.to_wire(), "source": source, "number": self._cells}
        outcome = run_cell(self._engine, shell, request)
        error = shell.error
        if not error and not outcome.is_well:
            error = f"{outcome.words}\n{outcome.traceback}"
        return CellReport(
            outcome=outcome,
            error=error,
            rows=records_from(link.rows).copy(),
            events=link.events,
            trained=link.trained,
            train_s=link.train_s,
            eval_s=link.eval_s,
        )

    def _break_out(self, harder: bool) -> None:
        support(self._engine.framework).break_collectives(store=harder)


def _spell(error: BaseException) -> str:
    trace = "".join(traceback.format_exception(error))
    return f"{type(error).__name__}: {error}\n{trace}"
