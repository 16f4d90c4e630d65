"""The events of a run, its states, and the timing of a Stop. Pure, for both sides.

Each event has a class. Engines send events to the kernel, and the kernel adds its own.

An event is sent and stored as its name and its fields (`to_wire`). `read` builds the event from
them; an unknown name is refused. Unknown fields of another version are left out, and missing
fields get their defaults.

A run's life is a state machine: events in, the next state out.

What happens after how many seconds when a run is stopped, or a cell interrupted, is one table:

    Stop
    at once              the kernel asks every worker for its step; where workers take steps apart,
                         it tells each to stop after the one it is in
    ANSWER_S             a worker has not answered: all are interrupted
    REACH_S              the agreed step is not reached (about two steps, within these bounds): the
                         same
    CLEAR_S              all have left the cell, some have not cleared away: the same

    Interrupt
    at once              SIGINT to every engine of the cell
    GRACE_S              the same to the others where one rank has failed and they went on
    BREAK_OUT_S          an engine's main thread waits in C++: its connections are shut down; after
                         as long again its store's too
    AGAIN_S              sent again, and again after as long: a cell may catch it and go on
    KILL_S               the engine is ended (SIGKILL); until then
    KILL_ON_DEVICE_S     the same where it computes on a GPU, whose queue of kernels may be long
      CLEARING_S         an engine that was told to end and did is deaf to interrupts
      GROUP_GONE_S       a process group that does not go is broken; it is left after as long again
    HEARD_S              nobody has told of that engine's end: the cell is over all the same
    SETTLE_S             the notebook's cell comes back, whatever is left
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
    """`value`: the first step whose loss is no number."""
    NOT_ON_DISK = "not_on_disk"
    """`value`: why some of the run could not be written."""
    DAMAGED = "damaged"
    """The folder that the run was read from lacks rows, events or weights; `value`: which."""

    @classmethod
    def of(cls, word: object) -> Topic | None:
        """Return what an event calls its topic; None for what this version does not know."""
        return next((topic for topic in cls if topic.value == word), None)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened once.

    Attributes:
        name: How it is called on the wire and on disk.
        of_kernel: Whether the kernel adds it to a run's history, so that no engine may send it.
    """

    name: ClassVar[str] = ""
    of_kernel: ClassVar[bool] = False

    def to_wire(self) -> dict[str, Any]:
        """Return its fields; what is None by default and was not said is left out."""
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
    """Numbers that `wb.log` was given, by name."""

    name: ClassVar[str] = "log"
    rank: int = 0
    step: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Noted(Event):
    """Something the user should know, shown once.

    Attributes:
        topic, value: What it is about, where something acts on it (`Topic`).
        deaths: Engines whose deaths it describes completely.
    """

    name: ClassVar[str] = "note"
    rank: int | None = None
    text: str = ""
    topic: str | None = None
    value: Any = None
    deaths: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Warned(Noted):
    """The same, as a warning."""

    name: ClassVar[str] = "warning"


@dataclass(frozen=True, kw_only=True)
class WasCut(Event):
    """How a pipeline's model was cut.

    Attributes:
        stages: Rows of stage, rank, layers, parameters, microbatch_s, handed_bytes.
        pipelines: How many stand side by side.
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
    """What a server holds.

    Attributes:
        copies_bytes: Of all that it holds a copy of, for another server.
        gradients: Where the workers' pushes arrive.
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
    """A checkpoint is whole on disk.

    Attributes:
        seconds: From the copy to the whole checkpoint on disk.
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
        reason: Of all of them, where an older version lists the columns alone.
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
    """Where a worker stands in its training, which decides whether it can be regrouped.

    Attributes:
        rank: Its rank in the run's tables.
        generation: Of the `Regroup` that this answers; 0: of none.
        phase: `in` for a worker that trains from now on, and can be regrouped; `apart` for one
            that trains and cannot, `why` says for what; `ready` for one that waits to be let in,
            `cut` for one that was cut off from another one, and waits to be told from whom.
    """

    name: ClassVar[str] = "standing"
    rank: int = 0
    generation: int = 0
    phase: Literal["before", "in", "apart", "ready", "cut", "past"] = "before"
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Regrouped(Event):
    """A worker goes on with the members of a generation.

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
    """An engine was told to end, and waits to be let go.

    Attributes:
        reason: Who told it, or why: `SIGTERM`.
        seconds: How much time is left, where that is known.
        host: Whether its whole host goes.
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
        ranks: Of those.
        step: The first without them.
        seconds: How long the others stood still, at most.
        workers: How many continue.
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
        ranks: Of those that have less than an equal share now; none: all shares are equal again.
        seconds: How long the others stood still, at most.
        shares: Samples that each worker takes of a batch, in the order of their ranks.
        ratio: How many times as long as the others the slowest took for its share, before.
        slow_s: For how long it had been seen so.
        before_s, after_s: A step before, and after, as soon as that is known (`Gained`).
    """

    name: ClassVar[str] = "shed"
    shares: Sequence[int] = ()
    ratio: float = 1.0
    slow_s: float = 0.0
    before_s: float | None = None
    after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Replaced(Healed):
    """Fresh engines have taken the places of workers that were slow for long, from a step on.

    Attributes:
        ratio, slow_s, before_s, after_s: As of `Shed`.
    """

    name: ClassVar[str] = "replaced"
    ratio: float = 1.0
    slow_s: float = 0.0
    before_s: float | None = None
    after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Gained(Event):
    """What `Shed` or `Replaced` has brought, from `step` on: a step before it, and since."""

    name: ClassVar[str] = "gained"
    of_kernel: ClassVar[bool] = True
    step: int = 0
    before_s: float = 0.0
    after_s: float = 0.0


SHARES = "shares"
"""Topic on which the kernel asks for a change of shares, says what they are, or calls it off."""


@dataclass(frozen=True, kw_only=True)
class Dealing(Event):
    """Answers a question on `SHARES`, by its number: the step that this worker has begun.

    Attributes:
        step: It begins no other before it hears what the shares are; -2: they cannot be changed.
    """

    name: ClassVar[str] = "dealing"
    rank: int = 0
    number: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineDied(Event):
    """An engine of the run is gone; `rank` is None where it held none."""

    name: ClassVar[str] = "death"
    of_kernel: ClassVar[bool] = True
    text: str = ""
    engine: int = -1
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Injected(Event):
    """The faults that hold from now on, as text."""

    name: ClassVar[str] = "inject"
    of_kernel: ClassVar[bool] = True
    faults: Sequence[str] = ()


def _all(kind: type[Event]) -> list[type[Event]]:
    return [one for sub in kind.__subclasses__() for one in (sub, *_all(sub))]


EVENTS: dict[str, type[Event]] = {kind.name: kind for kind in _all(Event)}
FROM_ENGINES = frozenset(name for name, kind in EVENTS.items() if not kind.of_kernel)


class UnknownEventError(RunError):
    """An event of a name that this version does not know."""


def read(name: str, fields: Mapping[str, Any]) -> Event:
    """Return the event that a name and its fields make.

    Raises:
        UnknownEventError: There is none of that name.
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
"""`recover`: an engine died, and the run goes on without it or with another in its place."""

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
    """An event that makes no sense in the present state; tells the run's story."""


def step(state: State, event: LifeEvent, story: tuple[str, ...] = ()) -> State:
    """Return the state after `event`.

    Events that repeat what already holds (a second Stop, a start while running) change nothing.

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
        f"{event!r} in state {state!r}; so far: {' > '.join(story) or 'nothing'}"
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
"""How long a worker may be silent: its position comes from a thread that waits for nobody."""
REACH_S = (0.8, 2.0)
"""Least and longest time to the agreed step."""
CLEAR_S = 10.0
"""How long workers may take to clear away what a run has left."""

GRACE_S = 0.5
BREAK_OUT_S = 0.2
AGAIN_S = 1.5
KILL_S = 8.0
KILL_ON_DEVICE_S = 20.0
CLEARING_S = 5.0
GROUP_GONE_S = 3.0
HEARD_S = 3.0
SETTLE_S = CLEAR_S + KILL_S + HEARD_S + 3.0
"""Longer than it takes to end an engine that no interrupt reaches, nor its answer us: also one that
has left its cell and is given time to clear away."""
