"""The run in which an engine takes part: the context of strategies, `wb.fit` and `wb.log`.

Its board holds the values that engines of a run exchange without a link between them. A value that
one engine posts (`RunContext.post`) goes over its control link to the kernel, which passes it to
every engine of the run:

    worker 1 -- post("address", "127.0.0.1:40123") --> kernel --> board of each engine

It is for a few small values per run: addresses, "I am ready", "it is over".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import catalog
from ..errors import ClusterError, RunError
from ..shared import events
from .debugging.marks import BOARD, waits_in
from .telemetry.departure import Departure
from .telemetry.membership import Membership

if TYPE_CHECKING:
    from ..shared.protocol import RunSpec
    from .telemetry.recorder import Recorder
    from .telemetry.step_gate import FaultInjector, Gate
    from .transport import Hub, Link


class Rendezvous:
    """Written by the control thread, read by the thread that runs the cell."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heard: dict[str, dict[int, Any]] = {}

    def hear(self, topic: str, rank: int, value: Any) -> None:
        """Store what an engine posted; its latest value counts."""
        with self._changed:
            self._heard.setdefault(topic, {})[rank] = value
            self._changed.notify_all()

    @waits_in(BOARD)
    def wait(
        self,
        topic: str,
        ranks: Iterable[int],
        timeout_s: float | None = None,
        names: Mapping[int, str] | None = None,
    ) -> dict[int, Any]:
        """Wait until all these engines have posted on a topic; return the values by rank.

        Args:
            names: The names of ranks in an error message.

        Raises:
            ClusterError: Not all did within `timeout_s`; the error names the missing ones.
        """
        wanted = list(ranks)
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while missing := [r for r in wanted if r not in self._heard.get(topic, {})]:
                left_s = 0.5 if end_s is None else min(0.5, end_s - time.monotonic())
                if left_s <= 0:
                    raise ClusterError(
                        "Some engines of this run did not answer.",
                        seen=f"no {topic} from "
                        + ", ".join((names or {}).get(rank, str(rank)) for rank in missing),
                        allowed=f"an answer within {timeout_s:g} s",
                        next_step="run %cluster to see which engines are alive, then %cluster "
                        "restart",
                        code="WB-CLUSTER-025",
                    )
                self._changed.wait(left_s)
            heard = self._heard[topic]
            return {rank: heard[rank] for rank in wanted}


Emit = Callable[[events.Event], None]
"""Sends an event to the kernel; never waits."""


@dataclass
class RunContext:
    """One run on one engine.

    Attributes:
        spec: The kernel's request; its rank and world size are those of the present members.
        recorder: Rows of the run.
        gate: Asked for permission before each step.
        faults: Injected delays.
        emit: Sends events.
        trained: Steps done in this run, in any way; 0 at the end of a strategy cell is an error.
        taken_over: The call that took over a user's own loop (`wb.prepare`, `wb.watch`), or empty.
        backwards, updates: Backward passes of such a loop; steps of any optimizer in the cell.
        kept: The objects in `wb.prepare(keep=)`.
        copies: Describes this worker's copy of the model at the end of a user's own loop, if all
            workers' copies must be equal then (`strategies.torch.guard`).
        strategy: The live strategy object, set by `wb.fit` and `wb.prepare`, closed by the runtime.
        step: The current step, for `wb.log`.
        options_read: Whether the line's overrides were used: by `wb.fit`, or by a cell that reads
            `wb.options`.
        unread: Names of `--set` that the cell has not read yet.
        initial_read: Whether a model was given the weights that `--init-from` names.
        failed: Whether the cell ended in an error or was interrupted; known after its end.
        settle: Waits until the device has finished its work, at the end of a phase.
        fetch_s: The time to fetch the current batch, for timers that read clocks later.
        links: To each server of the run, if the strategy has servers.
        dialled: The connections of these links, as soon as each exists.
        connect: Makes the links again, for a rank and a generation of the workers.
        hub: On a server: its links to the workers.
        copy_hub: On a server with a copy of another server's part: the links for the copy.
        successor: On a server whose part has a copy: its link to the copy.
        remote_devices: The shown devices of the workers to which this engine gives steps.
        board: The values that the engines of the run have posted to each other, through the kernel.
        membership: The present workers, if the set of workers can change during training.
        departure: Handles the order to end this process.
        checkpoints: Writes and reads this cell's checkpoints; made when first needed.
        streams: How many streams of samples the cell has given to training so far.
        train_s, eval_s: Wall time of training without evaluation and pauses; of evaluation.
        weights: Called at the end of the run for the final weights; None if nothing was trained.
    """

    spec: RunSpec
    recorder: Recorder
    gate: Gate
    faults: FaultInjector
    emit: Emit
    trained: int = 0
    taken_over: str = ""
    backwards: int = 0
    updates: int = 0
    step: int = 0
    strategy: Any = None
    kept: tuple[Any, ...] = ()
    copies: Callable[[], dict[str, int]] | None = None
    closers: list[Callable[[], None]] = field(default_factory=list)
    weights: Callable[[], dict[str, Any]] | None = None
    started_s: float = 0.0
    options_read: bool = False
    unread: set[str] = field(default_factory=set)
    initial_read: bool = False
    failed: bool = False
    settle: Callable[[], object] = lambda: None
    fetch_s: float = 0.0
    streams: int = 0
    train_s: float = 0.0
    eval_s: float = 0.0
    links: list[Link] = field(default_factory=list)
    dialled: list[Link] = field(default_factory=list)
    connect: Callable[[int, int], None] = lambda rank, generation: None
    hub: Hub | None = None
    copy_hub: Hub | None = None
    successor: Link | None = None
    remote_devices: tuple[str, ...] = ()
    board: Rendezvous = field(default_factory=Rendezvous)
    membership: Membership = field(default_factory=Membership)
    departure: Departure = field(default_factory=Departure)
    checkpoints: Any = None

    def post(self, topic: str, value: Any = True) -> None:
        """Post a value to all engines of the run, including this one."""
        self.emit(events.Posted(rank=self.spec.rank, topic=topic, value=value))

    def log_memory(self, held_bytes: float) -> None:
        """Log the memory that this worker holds between steps; NaN means not known."""
        if held_bytes == held_bytes:
            values = {"memory_bytes": float(held_bytes)}
            self.emit(events.Logged(rank=self.spec.row_rank, step=self.step, values=values))

    def log_rate(self, rate: float) -> None:
        """Log the learning rate of this step as `lr`; the first worker does it for all."""
        if self.membership.place == 0:
            self.emit(events.Logged(rank=0, step=self.step, values={"lr": rate}))

    def disconnect(self) -> None:
        """Close the links to the servers."""
        for link in self.dialled:
            link.close()
        self.dialled.clear()
        self.links = []

    def break_off(self) -> None:
        """End waits for servers; from any thread."""
        for link in list(self.dialled):
            link.break_off()

    def workers_done(self) -> None:
        """On a server: note that no worker will replace a worker that has left; from any thread."""
        for hub in (self.hub, self.copy_hub):
            if hub is not None:
                hub.expect_nobody()

    def server_gone(self, server: int) -> None:
        """End waits for a server, even if its host is silent; its copy takes over."""
        for link in self.links:
            link.cut(server)
        if self.successor is not None:
            self.successor.cut(server)
        chains = self.entry.chains(self.spec.options)
        follows = server < len(chains) and self.spec.rank - self.spec.world_size in chains[server]
        if self.copy_hub is not None and follows:
            self.copy_hub.cut(self.spec.world_size)

    @property
    def sync(self) -> bool:
        """Whether the workers take each step together, under the options chosen."""
        return self.entry.is_sync(self.spec.options)

    @property
    def entry(self) -> catalog.Strategy:
        """The strategy's entry in the catalog."""
        return catalog.lookup(self.spec.strategy, self.spec.framework)


_current: RunContext | None = None


def current() -> RunContext | None:
    """Return the current run of this engine, or None."""
    return _current


def set_current(context: RunContext | None) -> None:
    """Make `context` the current run."""
    global _current
    _current = context


def require(what: str) -> RunContext:
    """Return the current run.

    Raises:
        RunError: There is no run; the error names the magic for the first line of the cell.
    """
    if _current is None:
        raise RunError(
            f"{what} was called outside a training run.",
            allowed=f"a cell under %%distributed STRATEGY ({', '.join(catalog.names())})",
            next_step="put %%distributed mirrored on top of the cell",
            code="WB-RUN-007",
        )
    return _current
