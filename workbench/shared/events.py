"""The events of a run, its states, and the timing of a Stop. Pure, for both sides.

Each event has a class. Engines send events to the kernel, and the kernel adds its own.

An event is sent and stored as its name and its fields (`to_wire`). `read` builds the event from
them; an unknown name is refused. Unknown fields of another version are left out, and missing
fields get their defaults.

A run's life is a state machine: events in, the next state out.

The following table shows the timing when a run is stopped or a cell is interrupted:

    Stop
    at once              the kernel asks every worker for its step; if workers take steps
    separately, it tells each to stop after its current step
    ANSWER_S             a worker has not answered: all are interrupted
    REACH_S              the agreed step is not reached (about two steps, within these bounds): the
                         same
    CLEAR_S              all have left the cell, but some have not cleaned up: the same

    Interrupt
    at once              SIGINT to every engine of the cell
    GRACE_S              the same to the others if one rank has failed and they continued
    BREAK_OUT_S          an engine's main thread waits in C++: its connections are shut down; after
    the same time again its store's too
    AGAIN_S              sent again after each such time: a cell may catch it and continue
    KILL_S               the engine is ended (SIGKILL)
    KILL_ON_DEVICE_S     the same where it computes on a GPU, whose queue of kernels may be long
      CLEARING_S         an engine that is ending does not react to interrupts
      GROUP_GONE_S       a process group that does not end is broken; it is abandoned after the same
      time again
    HEARD_S              no process reported that engine's end: the cell ends anyway
    SETTLE_S             the notebook's cell returns, even if something is unfinished
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal

from ..errors import RunError


class Topic(str, Enum):
    """The subject of a note or warning, for code that acts on it; no code parses the text."""

    ALLREDUCE_CHOSEN = "allreduce_chosen"
    """`value`: the all-reduce that `auto` took."""
    TRAINED_BEFORE = "trained_before"
    """An earlier run had trained the model, which makes comparisons unfair."""
    LOSS_LOST = "loss_lost"
    """`value`: the first step whose loss is not a number."""
    OWN_NORMS = "own_norms"
    """Each worker's BatchNorm normalises over its own share, so the result is not one device's."""
    NOT_ON_DISK = "not_on_disk"
    """`value`: why a part of the run could not be written."""
    DAMAGED = "damaged"
    """The folder that the run was read from lacks rows, events or weights; `value`: which."""

    @classmethod
    def of(cls, word: object) -> Topic | None:
        """Return the topic with this name; None if this version does not know it."""
        return next((topic for topic in cls if topic.value == word), None)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened once.

    Attributes:
        name: Its name in messages and on disk.
        of_kernel: Whether the kernel adds it to a run's history; engines must not send such an
            event.
    """

    name: ClassVar[str] = ""
    of_kernel: ClassVar[bool] = False

    def to_wire(self) -> dict[str, Any]:
        """Return its fields; fields with the default None are left out if they are None."""
        return {
            one.name: value
            for one in dataclasses.fields(self)
            if (value := getattr(self, one.name)) is not None or one.default is not None
        }


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """Training begins on a rank; `batch_size` is the global one, `parameters` a number.

    `host` is added by the kernel of engines on other machines.
    """

    name: ClassVar[str] = "run_started"
    rank: int = 0
    t_s: float = 0.0
    total_steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    local_batch: int | None = None
    parameters: int | None = None
    device: str | None = None
    threads: int | None = None
    host: str | None = None
    epoch_samples: int | None = None


@dataclass(frozen=True, kw_only=True)
class EpochBegan(Event):
    """An epoch began at a step."""

    name: ClassVar[str] = "epoch"
    rank: int = 0
    epoch: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """The model was evaluated: metrics by name."""

    name: ClassVar[str] = "eval"
    step: int = 0
    epoch: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Logged(Event):
    """Numbers that were passed to `wb.log`, by name."""

    name: ClassVar[str] = "log"
    rank: int = 0
    step: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Noted(Event):
    """A note for the user, shown once.

    Attributes:
        topic, value: The subject, if code acts on the note (`Topic`). deaths: Engines whose deaths
            it describes completely.
    """

    name: ClassVar[str] = "note"
    rank: int | None = None
    text: str = ""
    topic: str | None = None
    value: Any = None
    deaths: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Warned(Noted):
    """A warning for the user, with the same fields as a note."""

    name: ClassVar[str] = "warning"


@dataclass(frozen=True, kw_only=True)
class WasCut(Event):
    """How a pipeline's model was cut.

    Attributes:
        stages: Rows of stage, rank, layers, parameters, microbatch_s, handed_bytes.
        pipelines: The number of pipelines.
        ideal_bubble: The schedule's share of idle time with equal stages.
    """

    name: ClassVar[str] = "split"
    rank: int = 0
    stages: Sequence[Mapping[str, Any]] = ()
    schedule: str = ""
    microbatches: int = 1
    microbatch_samples: int = 0
    pipelines: int = 1
    ideal_bubble: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ServerHolds(Event):
    """The memory that a server holds.

    Attributes:
        copies_bytes: The bytes of its copies of other servers' parts.
        gradients: The bytes of memory for the workers' pushes.
    """

    name: ClassVar[str] = "server"
    rank: int = 0
    server: int = 0
    parameters_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    gradients_bytes: float = 0.0
    copies_bytes: float = 0.0
    gradients: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(Event):
    """A checkpoint is complete on disk.

    Attributes:
        seconds: From the copy to the complete checkpoint on disk.
        stall_s: How long training stood still for the copy.
    """

    name: ClassVar[str] = "checkpoint"
    rank: int = 0
    step: int = 0
    path: str = ""
    seconds: float = 0.0
    stall_s: float = 0.0
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Unmeasured(Event):
    """Columns that this run cannot fill, with the reason.

    Attributes:
        reason: The common reason, if an older version lists only the columns.
    """

    name: ClassVar[str] = "unmeasured"
    columns: Mapping[str, str] | Sequence[str] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Paused(Event):
    """A rank is paused after a step."""

    name: ClassVar[str] = "paused"
    rank: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """A rank continues."""

    name: ClassVar[str] = "resumed"
    rank: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class CellLeft(Event):
    """A rank's cell has ended; weights and cleanup follow."""

    name: ClassVar[str] = "cell_left"
    rank: int = 0
    status: str = ""


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """A rank has finished the run; `weights` is a file's name."""

    name: ClassVar[str] = "run_finished"
    rank: int = 0
    t_s: float = 0.0
    steps: int = 0
    stopped: bool = False
    paused_s: float = 0.0
    train_s: float = 0.0
    eval_s: float = 0.0
    weights: str | None = None
    status: str = ""


@dataclass(frozen=True, kw_only=True)
class Posted(Event):
    """Something for all engines of the run, which the kernel passes on (`engine/context.py`)."""

    name: ClassVar[str] = "post"
    rank: int = 0
    topic: str = ""
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class Standing(Event):
    """The state of a worker's training, which decides whether it can be regrouped.

    Attributes:
        rank: Its rank in the run's tables.
        generation: The generation of the `Regroup` that this answers; 0: none.
        phase: `in`: the worker trains from now on and can be regrouped. `apart`: it trains but
            cannot be regrouped; `why` has the reason. `ready`: it waits to join. `cut`: it lost the
            connection to another worker, and waits for the kernel to say which.
    """

    name: ClassVar[str] = "standing"
    rank: int = 0
    generation: int = 0
    phase: Literal["before", "in", "apart", "ready", "cut", "past"] = "before"
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Regrouped(Event):
    """A worker continues with the members of a generation.

    Attributes:
        rank: Its rank in the run's tables.
        step: The first that they take together.
        seconds: How long this worker stood still.
    """

    name: ClassVar[str] = "regrouped"
    rank: int = 0
    generation: int = 0
    step: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ToldToEnd(Event):
    """An engine was told to end, and waits for permission.

    Attributes:
        reason: Who told it, or why: `SIGTERM`.
        seconds: The remaining time, if known.
        host: Whether its whole host ends.
    """

    name: ClassVar[str] = "told_to_end"
    rank: int = 0
    reason: str = ""
    seconds: float | None = None
    host: bool = False


@dataclass(frozen=True, kw_only=True)
class Healed(Event):
    """The others continue without the workers that died; nothing was lost.

    Attributes:
        ranks: The ranks of the workers that died.
        step: The first step without these workers.
        seconds: The longest time that another worker paused.
        workers: The number of workers that continue.
    """

    name: ClassVar[str] = "healed"
    of_kernel: ClassVar[bool] = True
    ranks: Sequence[int] = ()
    step: int = 0
    seconds: float = 0.0
    workers: int = 0


@dataclass(frozen=True, kw_only=True)
class Joined(Healed):
    """Workers join at a step; the others waited for this number of seconds."""

    name: ClassVar[str] = "joined"


@dataclass(frozen=True, kw_only=True)
class Left(Healed):
    """The others continue without workers that left for `reason` and did not fail.

    `ranks` is empty where a server left.
    """

    name: ClassVar[str] = "left"
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Shed(Healed):
    """Shares change at a step because a worker was slow for a long time, or is no longer slow.

    Attributes:
        ranks: The workers with less than an equal share now; none: all shares are equal again.
        seconds: How long the others stood still, at most.
        shares: Samples that each worker takes of a batch, in the order of their ranks.
        ratio: The slowest worker's time for its share, as a multiple of the others' time, before
            the change.
        slow_s: How long it had been this slow.
        before_s, after_s: The time of a step before and after; the latter when it is known
            (`Gained`).
    """

    name: ClassVar[str] = "shed"
    shares: Sequence[int] = ()
    ratio: float = 1.0
    slow_s: float = 0.0
    before_s: float | None = None
    after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Replaced(Healed):
    """New engines have replaced workers that were slow for a long time, from a step on.

    Attributes:
        ratio, slow_s, before_s, after_s: As in `Shed`.
    """

    name: ClassVar[str] = "replaced"
    ratio: float = 1.0
    slow_s: float = 0.0
    before_s: float | None = None
    after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Gained(Event):
    """The effect of `Shed` or `Replaced` from `step` on: the time of a step before and after."""

    name: ClassVar[str] = "gained"
    of_kernel: ClassVar[bool] = True
    step: int = 0
    before_s: float = 0.0
    after_s: float = 0.0


SHARES = "shares"
"""Topic on which the kernel requests a change of shares, announces the shares, or cancels it."""


@dataclass(frozen=True, kw_only=True)
class Dealing(Event):
    """Answers a question on `SHARES`, by its number: the step that this worker has begun.

    Attributes:
        step: The worker begins the next step only after it has received the shares; -2: they cannot
            change.
    """

    name: ClassVar[str] = "dealing"
    rank: int = 0
    number: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineDied(Event):
    """An engine of the run has ended; `rank` is None if it had no rank."""

    name: ClassVar[str] = "death"
    of_kernel: ClassVar[bool] = True
    text: str = ""
    engine: int = -1
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Injected(Event):
    """The faults that apply from now on, as text."""

    name: ClassVar[str] = "inject"
    of_kernel: ClassVar[bool] = True
    faults: Sequence[str] = ()


def _all(kind: type[Event]) -> list[type[Event]]:
    return [one for sub in kind.__subclasses__() for one in (sub, *_all(sub))]


EVENTS: dict[str, type[Event]] = {kind.name: kind for kind in _all(Event)}
FROM_ENGINES = frozenset(name for name, kind in EVENTS.items() if not kind.of_kernel)


class UnknownEventError(RunError):
    """An event with a name that this version does not know."""


def read(name: str, fields: Mapping[str, Any]) -> Event:
    """Return the event with this name and these fields.

    Raises:
        UnknownEventError: There is no event with this name.
    """
    kind = EVENTS.get(name)
    if kind is None:
        raise UnknownEventError(
            "This event does not exist.", seen=name, allowed=", ".join(EVENTS), code="WB-RUN-034"
        )
    known = {one.name for one in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in fields.items() if key in known})


State = Literal[
    "pending", "starting", "running", "paused", "recovering", "stopping", "finished", "stopped",
    "failed",
]  # fmt: skip
LifeEvent = Literal["submit", "start", "pause", "resume", "recover", "stop", "finish", "fail"]
"""`recover`: an engine died, and the run continues without it or with a replacement."""

OVER: frozenset[State] = frozenset({"finished", "stopped", "failed"})

_NEXT: dict[State, dict[LifeEvent, State]] = {
    "pending": {"submit": "starting", "fail": "failed", "stop": "stopped"},
    "starting": {
        "start": "running", "recover": "recovering", "fail": "failed", "stop": "stopping",
        "finish": "finished",
    },
    "running": {
        "pause": "paused", "recover": "recovering", "stop": "stopping", "finish": "finished",
        "fail": "failed",
    },
    "paused": {
        "resume": "running", "recover": "recovering", "stop": "stopping", "fail": "failed",
        "finish": "finished",
    },
    "recovering": {"start": "running", "stop": "stopping", "fail": "failed", "finish": "finished"},
    "stopping": {"finish": "stopped", "fail": "failed"},
}  # fmt: skip


class InvalidTransitionError(Exception):
    """Raised for an event that is impossible in the present state; lists the run's events."""


def step(state: State, event: LifeEvent, story: tuple[str, ...] = ()) -> State:
    """Return the state after `event`.

    Events that repeat the present state (a second Stop, a start while running) change nothing.

    Raises:
        InvalidTransitionError: The event cannot happen in this state.
    """
    following = _NEXT.get(state, {}).get(event)
    if following is not None:
        return following
    if (state, event) in _REPEATS or (
        state in OVER and event in ("stop", "finish", "fail", "pause", "resume")
    ):
        return state
    raise InvalidTransitionError(
        f"event {event!r} is impossible in state {state!r}; events so far: "
        f"{' > '.join(story) or 'nothing'}"
    )


_REPEATS: frozenset[tuple[State, LifeEvent]] = frozenset(
    {
        ("running", "start"),
        ("running", "resume"),
        ("paused", "pause"),
        ("paused", "start"),
        ("recovering", "recover"),
        ("recovering", "resume"),
        ("stopping", "stop"),
        ("stopping", "start"),
        ("stopping", "pause"),
        ("stopping", "resume"),
    }
)


ANSWER_S = 1.0
"""How long a worker can be silent; a thread that never waits for others sends its position."""
REACH_S = (0.8, 2.0)
"""The shortest and the longest time to the agreed step."""
CLEAR_S = 10.0
"""How long workers may take to clean up after a run."""

GRACE_S = 0.5
BREAK_OUT_S = 0.2
AGAIN_S = 1.5
KILL_S = 8.0
KILL_ON_DEVICE_S = 20.0
CLEARING_S = 5.0
GROUP_GONE_S = 3.0
HEARD_S = 3.0
SETTLE_S = CLEAR_S + KILL_S + HEARD_S + 3.0
"""Longer than ending an engine takes that does not react to interrupts or cannot answer.

This includes an engine that has left its cell and still cleans up.
"""
