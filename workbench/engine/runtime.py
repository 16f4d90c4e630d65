"""The actions of an engine around a cell: set up the run, run the cell, clean up.

It knows neither IPython nor a framework: the shell is passed in, and the framework's own file
(`engine/<framework>/support.py`) is loaded by name.

It also makes the report on a cell's end for the kernel. If parameters are on servers, it makes a
worker's links to them, and runs a server.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..devices import reservations
from ..errors import EngineSpentError, RunStopped, WorkbenchError
from ..history import disk
from ..history.disk import RunWriter
from ..shared import events
from ..shared.cluster_env import run_folder
from ..shared.messages import CellOutcome, Copy, OwnLoop
from ..shared.protocol import RunSpec
from ..shared.record import FLAG_KERNEL_CLOCK, FLAG_SKEWED_CLOCK
from . import context as run_context
from .checkpoints import memory_snapshot
from .context import RunContext
from .contract import WeightsTooLargeError, weights_up_to
from .debugging import marks, postmortem, stacks
from .debugging.marks import begins_cell, doing, machinery
from .debugging.tracebacks import advice, plain
from .telemetry import profiler
from .telemetry.departure import Departure, Notice
from .telemetry.membership import Membership
from .telemetry.recorder import Recorder
from .telemetry.step_gate import FaultInjector, Gate
from .training import fit_arguments, user_loops
from .transport import ServerLinks, address, connect_chains, sessions_before
from .transport.connection import LinkError

if TYPE_CHECKING:
    from .interrupt import InterruptWatch
    from .telemetry.control_link import Writer

MAX_WEIGHTS_BYTES = 2 << 30
HUNG = 70
"""The exit code of a worker that hangs in a broken collective (`Membership.quit`)."""
machinery(__name__)


class Shell(Protocol):
    """The needed methods of the interactive shell that runs the cell."""

    namespace: dict[str, Any]

    def execute(self, source: str, number: int) -> BaseException | None:
        """Run the source as cell `number`, show its output; return what it raised."""


class Link(Protocol):
    """The needed methods of the control link (`link.ControlLink`)."""

    kernels_clock: bool

    def attach(self, context: RunContext, writer: Writer | None) -> None:
        """Begin to carry a run's records."""

    def detach(self) -> bool:
        """Send the remaining records of the run and release it; return whether all were sent."""

    def emit(self, event: events.Event) -> None:
        """Send an event of the current run; never waits."""

    def close(self) -> None:
        """Close the link to the kernel."""


@dataclass
class Engine:
    """This process as an engine: its id, its link, the process group it has."""

    id: int
    link: Link
    watch: InterruptWatch
    group: str = ""  # prefix of the process group that exists now; empty: none
    framework: str = "torch"
    environ: dict[str, str | None] = field(default_factory=dict)
    injected: set[str] = field(default_factory=set)  # Workbench's names in the cells' namespace
    departure: Departure = field(default_factory=Departure)


def support(framework: str) -> Any:
    """Return the framework's own module on the engine side, loaded by name."""
    return importlib.import_module(f"workbench.engine.{framework}.support")


@begins_cell
def run_cell(engine: Engine, shell: Shell, request: Mapping[str, Any]) -> CellOutcome:
    """Run one cell on this engine.

    Args:
        request: `spec` (RunSpec), `source`, `number` of the notebook cell, `group` (whether an
            SPMD cell gets a process group), `inject` (whether names are set).
    """
    spec = RunSpec.from_wire(request["spec"])
    reservations.hold(spec.reserved)
    if engine.group and engine.framework != spec.framework:
        support(engine.framework).destroy_group()
        engine.group = ""
    engine.framework = spec.framework
    framework = support(spec.framework)
    if spec.role == "server":
        return _serve(engine, spec, framework)
    injected = _inject(shell.namespace, spec, framework)
    with engine.watch.armed(), _environment(framework.environ(spec)), postmortem.cell():
        try:
            if spec.mode == "run":
                outcome = _train(engine, shell, spec, framework, request, injected)
            else:
                outcome = _spmd(engine, shell, spec, framework, request)
        except KeyboardInterrupt as error:
            outcome = outcome_of(error)
        except Exception as error:
            outcome = outcome_of(error, traceback.format_exc())
        if not outcome.is_well and spec.device != "cpu":
            outcome = _after_failure(engine, spec, framework, outcome)
    engine.injected.update(injected)
    lost = bool(engine.group) and not framework.has_group()  # the cell destroyed it
    lost = lost or bool(spec.group and engine.group != spec.group)  # or it could not stay
    return replace(
        outcome,
        reassigned=tuple(k for k, v in injected.items() if shell.namespace.get(k, v) is not v),
        group_broken=not outcome.is_well or engine.watch.broke_out or lost,
        cut_off=engine.watch.broke_out,
    )


LOST = (
    "The GPU failed, and this engine can no longer use it. The variables of this engine are lost, "
    "and a new engine replaces it. Often the cause is a label or an index out of range. To "
    "see the line that failed, set CUDA_LAUNCH_BLOCKING=1 before you start the cluster."
)


@doing("clearing the device")
def _after_failure(
    engine: Engine, spec: RunSpec, framework: Any, outcome: CellOutcome
) -> CellOutcome:
    """End the cell's remaining work on the device; return what can no longer be used."""
    with engine.watch.shielded():
        if engine.group:  # a collective of it may wait on the device for ever
            framework.destroy_group()
            engine.group = ""
        is_lost = getattr(framework, "device_is_lost", None)
        if is_lost is not None and is_lost(spec):
            return replace(outcome, replace=True, advice=LOST)
    return outcome


def _spmd(
    engine: Engine, shell: Shell, spec: RunSpec, framework: Any, request: Mapping[str, Any]
) -> CellOutcome:
    framework.setup(spec)
    if request.get("group", True):
        _ensure_group(engine, spec, framework)
    return _execute(shell, framework, request)


def _train(
    engine: Engine,
    shell: Shell,
    spec: RunSpec,
    framework: Any,
    request: Mapping[str, Any],
    injected: dict[str, Any],
) -> CellOutcome:
    run = _new_run(engine, spec)
    _attach(engine, run)
    with engine.departure.taking_part(lambda notice: _say_goodbye(run, notice)):
        return _train_in(run, engine, shell, framework, request, injected)


def _say_goodbye(run: RunContext, notice: Notice) -> None:
    run.emit(
        events.ToldToEnd(
            rank=run.membership.place, reason=notice.reason, seconds=notice.seconds,
            host=notice.host,
        )
    )  # fmt: skip


def _train_in(
    run: RunContext,
    engine: Engine,
    shell: Shell,
    framework: Any,
    request: Mapping[str, Any],
    injected: dict[str, Any],
) -> CellOutcome:
    spec = run.spec
    run_context.set_current(run)
    profiler.install(run)
    kept = memory_snapshot.watch(run, framework)
    try:
        framework.setup(spec)
        if not spec.joins:  # a worker that joins later does this with the others at that time
            _ensure_group(engine, spec, framework)
        open_links(run, framework)
        with framework.around(run) as names:
            shell.namespace.update(names)
            injected.update(names)
            outcome = _execute(shell, framework, request)
            outcome = _cell_ended(engine, run, outcome, kept)
        return _tell_end(run, framework, outcome)
    finally:
        _tear_down(engine, run, framework)


def _attach(engine: Engine, run: RunContext) -> None:
    """Let the link send the run's records, and write them to its folder if possible."""
    spec, writer, trouble = run.spec, None, None
    try:
        writes = spec.run_dir and not spec.far
        writer = RunWriter(Path(spec.run_dir), spec.row_rank) if writes else None
    except OSError as error:  # a full disk: the run continues in the kernel's memory
        trouble = error
    engine.link.attach(run, writer)
    if trouble is not None:
        run.emit(disk.unwritten(spec.run_dir, trouble, spec.rank))


def _new_run(engine: Engine, spec: RunSpec) -> RunContext:
    at_home = FLAG_KERNEL_CLOCK if engine.link.kernels_clock else 0
    run = RunContext(
        spec=spec,
        unread=set(spec.values),
        # Clocks of several hosts cannot be compared: waits then follow the min rule.
        recorder=Recorder(
            spec.run,
            spec.rank,
            flags=FLAG_SKEWED_CLOCK | at_home if len(set(spec.hosts)) > 1 else 0,
            row_rank=spec.row_rank,
            first=spec.rows_from,
        ),
        gate=profiler.gate(
            spec, lambda text: engine.link.emit(events.Noted(rank=spec.rank, text=text))
        ),
        faults=FaultInjector(spec.row_rank, spec.faults, spec.replicas),
        emit=engine.link.emit,
        started_s=time.perf_counter(),
        membership=Membership(spec.rank, joins=spec.joins),
        departure=engine.departure,
    )
    place = run.membership.place
    run.membership.tell = lambda phase, generation: engine.link.emit(
        events.Standing(rank=place, generation=generation, phase=phase)
    )
    run.membership.hangs = lambda: stacks.where().state == "waits"
    run.membership.note = lambda text: engine.link.emit(events.Noted(rank=place, text=text))
    run.membership.quit = lambda: os._exit(HUNG)
    run.gate.on_pause = lambda step: engine.link.emit(events.Paused(rank=place, step=step))
    run.gate.on_resume = lambda step: engine.link.emit(events.Resumed(rank=place, step=step))
    return run


def _cell_ended(
    engine: Engine, run: RunContext, outcome: CellOutcome, kept: memory_snapshot.Rescue | None
) -> CellOutcome:
    """Save the final state of the cell, still in the strategy's scope."""
    run.failed = not outcome.is_well
    if run.gate.stopping or outcome.status == "interrupted":
        engine.watch.begin_clearing(whole=not run.failed)
    run.emit(events.CellLeft(rank=run.membership.place, status=outcome.status))
    goes = run.failed or run.gate.leaving
    if goes and run.checkpoints is not None and kept is not None:
        outcome = replace(outcome, kept_step=kept.keep(run.checkpoints))
    if run.checkpoints is not None:
        run.checkpoints.conclude(failed=run.failed)
    if run.copies is not None and not run.failed:
        outcome = replace(outcome, copies=Copy(**run.copies()))
    return outcome


def _tell_end(run: RunContext, framework: Any, outcome: CellOutcome) -> CellOutcome:
    """Write the weights; report the result of the run, in the outcome and to the kernel."""
    try:
        weights = _save_weights(run, framework)
    except WorkbenchError:
        if not run.failed:
            raise
        weights = None  # they went with what the cell failed of, which is told already
    status = "stopped" if outcome.status == "ok" and run.gate.stopping else outcome.status
    outcome = replace(
        outcome,
        # A worker that leaves, or stopped for a leaving one, has done its task.
        status="ok" if status == "stopped" and run.gate.leaving else status,
        trained=run.trained,
        loop=OwnLoop(by=run.taken_over, backwards=run.backwards, updates=run.updates),
        options_read=run.options_read,
        unread=tuple(sorted(run.unread)),
        initial_read=run.initial_read,
        weights=weights,
    )
    run.emit(
        events.RunFinished(
            rank=run.membership.place,
            t_s=time.perf_counter(),
            steps=run.trained,
            stopped=run.gate.stopping,
            paused_s=run.gate.paused_s,
            train_s=run.train_s,
            eval_s=run.eval_s,
            weights=outcome.weights,
            status=outcome.status,
        )
    )
    return outcome


def _serve(engine: Engine, spec: RunSpec, framework: Any) -> CellOutcome:
    """Take part in a run as a server: no cell is run, no process group joined."""
    run = RunContext(
        spec, Recorder(spec.run, spec.rank, capacity=1), Gate(), FaultInjector(spec.rank),
        engine.link.emit, departure=engine.departure,
    )  # fmt: skip
    engine.link.attach(run, None)
    goes = engine.departure.taking_part(lambda notice: _say_goodbye(run, notice))
    try:
        with engine.watch.armed(), goes:
            framework.setup(spec)
            serve(run, framework)
        return CellOutcome(status="ok")
    except KeyboardInterrupt as error:
        return outcome_of(error)
    except Exception as error:
        return outcome_of(error, traceback.format_exc())
    finally:
        engine.link.detach()


def _tear_down(engine: Engine, run: RunContext, framework: Any) -> None:
    """Clean up the engine: wrappers first, then the group (the reverse order deadlocks)."""
    with engine.watch.shielded():
        _undo(engine, run, framework)


@doing("leaving the process group")
def _undo(engine: Engine, run: RunContext, framework: Any) -> None:
    try:
        if run.strategy is not None:
            run.strategy.close()
        for close in reversed(run.closers):
            close()
    finally:
        run.strategy = None
        run.weights = run.copies = None
        run.closers.clear()
        run_context.set_current(None)
        engine.link.detach()
        keeps = bool(run.spec.group) and not (run.failed or engine.watch.broke_out)
        if engine.group and not (keeps and framework.rest_group()):
            framework.destroy_group()
            engine.group = ""
        give_back(framework)


def give_back(framework: Any) -> None:
    """Free device memory that the framework keeps; some frameworks cannot do this."""
    hand = getattr(framework, "give_back", None)
    if hand is not None:
        hand()


def _ensure_group(engine: Engine, spec: RunSpec, framework: Any) -> None:
    if engine.group == spec.group_name:
        return
    # Also where there should be none: joining may have been interrupted half-way.
    framework.destroy_group()
    engine.group = ""
    framework.ensure_group(spec)
    engine.group = spec.group_name


NOT_BROUGHT = (
    "The final weights were not kept, because this engine is on another machine and Workbench "
    "cannot copy files from there. Save the weights in the cell, or start engines by ssh, slurm or "
    "mpi (%cluster start --launcher)."
)


@doing("writing the final weights")
def _save_weights(run: RunContext, framework: Any) -> str | None:
    """Write the final weights next to the run's records; return the file's name.

    None if there are none, or if they could not be written; the run does not fail.
    """
    folder = run_folder(run.spec.run_dir, run.spec.run_id)
    if run.weights is None:
        return None
    if folder is None:
        if run.spec.name:  # otherwise no notebook would keep the weights
            run.emit(events.Noted(rank=run.spec.rank, text=NOT_BROUGHT))
        return None
    arrays: dict[str, Any] = {}
    try:
        with weights_up_to(MAX_WEIGHTS_BYTES):
            arrays = run.weights() or {}
        size_bytes = sum(array.nbytes for array in arrays.values())
    except WeightsTooLargeError as large:
        size_bytes = large.size_bytes
    if not size_bytes:
        return None
    if size_bytes > MAX_WEIGHTS_BYTES:
        run.emit(
            events.Noted(
                rank=run.spec.rank,
                text=f"The final weights ({size_bytes / 1e9:.1f} GB) are too large to be stored "
                "with the run. Save the weights in the cell.",
            )
        )
        return None
    try:
        return str(framework.save_weights(folder, run.spec.rank, arrays))
    except Exception as error:  # a full disk; each writer has errors of its own for it
        disk.remove_weights(folder, run.spec.rank)
        run.emit(disk.unwritten(folder, error, run.spec.rank))
        return None


def _inject(namespace: dict[str, Any], spec: RunSpec, framework: Any) -> dict[str, Any]:
    """Set the engines' names before the cell; return them to notice reassignment later."""
    names = {
        "rank": spec.rank,
        "local_rank": spec.local_rank,
        "world_size": spec.world_size,
        "device": spec.device,
        "wb": importlib.import_module("workbench"),
        **framework.names(spec),
    }
    namespace.update(names)
    return names


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _execute(shell: Shell, framework: Any, request: Mapping[str, Any]) -> CellOutcome:
    """Run the cell; if its error has a well-known cause, show it below the traceback."""
    error = shell.execute(request["source"], request["number"])
    postmortem.keep(error)
    if error is not None:  # others may need what a failed cell has left over: it may be an OOM
        give_back(framework)
    explain = getattr(framework, "explain", None)
    if error is not None and explain is not None:
        with contextlib.suppress(Exception):  # a guess must not hide the error itself
            if text := explain(error):
                sys.stderr.write(f"{text}\n")
    return outcome_of(error)


def _words(error: BaseException) -> str:
    """Return an error's message, with cells named as the notebook names them."""
    number = marks.cell_number(error.filename or "") if isinstance(error, SyntaxError) else None
    if isinstance(error, SyntaxError) and number is not None:
        return f"{error.msg} (Cell In[{number}], line {error.lineno})"
    return marks.fold_text(plain(str(error)))


def outcome_of(error: BaseException | None, traceback: str = "") -> CellOutcome:
    """Return how a cell ended, and for an error its message and advice."""
    if error is None:
        return CellOutcome(status="ok")
    status: Literal["error", "stopped", "interrupted"] = "error"
    if isinstance(error, RunStopped):
        status = "stopped"
    elif isinstance(error, KeyboardInterrupt):
        status = "interrupted"
    ours = isinstance(error, WorkbenchError)  # ours say themselves what helps
    told = not ours and not _asks_another_for_module(error)
    return CellOutcome(
        status=status,
        ename=type(error).__name__,
        evalue=_words(error),
        traceback=traceback,
        replace=isinstance(error, EngineSpentError),
        felt=error.felt if isinstance(error, LinkError) else "",
        advice=advice(f"{type(error).__name__}: {error}") if told else None,
    )


def _asks_another_for_module(error: BaseException) -> bool:
    """Whether `.module` was read of an object that `wb.prepare` has not received."""
    if not isinstance(error, AttributeError) or error.name != "module":
        return False
    return not any(error.obj is model for model in user_loops.prepared)


def open_links(run: RunContext, framework: Any) -> None:
    """Connect a worker to the servers of its run, for as long as the cell runs."""
    spec = run.spec  # servers are found where they were when the run began
    if not (spec.servers and run.entry.links):
        return
    way = str(spec.options.get("link", "auto"))
    chains = run.entry.chains(spec.options)

    def connect(rank: int, generation: int) -> None:
        run.disconnect()
        store, key = framework.open_store(spec), bytes.fromhex(spec.key)
        run.links = connect_chains(
            store, chains, rank, key, way, generation=generation, made=run.dialled,
            session=sessions_before(generation) if run.sync else 0,
        )  # fmt: skip

    run.connect = connect
    run.closers.append(run.disconnect)
    if not spec.joins:  # who is let in later connects then
        connect(spec.rank, 0)


def serve(run: RunContext, framework: Any) -> None:
    """Act as an engine that runs no cell: answer the workers until they are done or gone.

    Raises:
        LinkError: A session could not be opened; a worker's link has the reason.
    """
    spec = run.spec
    strategy = fit_arguments.load_strategy(run)
    if not run.entry.links:  # the framework's own servers know how to meet
        strategy.serve()
        return
    store, host = framework.open_store(spec), address.address_in(spec)
    server, way = spec.rank - spec.world_size, str(spec.options.get("link", "auto"))
    links = ServerLinks(
        run.entry.chains(spec.options), server, spec.world_size, bytes.fromhex(spec.key), way,
        ("together" if run.sync else "singly") if spec.heals else "never",
    )  # fmt: skip
    run.hub, run.copy_hub = links.hub, links.copy_hub
    try:
        links.open(store, host, spec.ports, strategy.keep_copy)
        run.successor = links.successor
        strategy.serve()
        links.settle()
    finally:
        strategy.close()
        links.close()
        run.hub = run.copy_hub = run.successor = None
