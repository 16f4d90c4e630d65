"""The messages between the notebook's kernel and the engines, one class each.

`Up` lists the messages that an engine may send, `Down` those of the kernel; both sides tell them
apart by class. `protocol.py` sends a message as its kind (for the debugger also its word) and the
fields from `to_wire`. `from_wire` builds the message from them. It refuses a field that is unknown,
missing or of another type, so the receiver can rely on all fields.

`CellOutcome` is the result of a cell on an engine: it answers the call that ran the cell, and is
kept in the engine's log of cells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from . import events

Buffer = bytes | memoryview
Self = TypeVar("Self", bound="Message")
Purpose = Literal["stop", "pause", "leave", "leave_alone", "leave_now"]


class BadMessageError(Exception):
    """A message that is not signed with the cluster's key, is malformed, or has an unknown kind."""


# -- fields, checked ---------------------------------------------------------------------------


def fields_of(kind: Any, data: object, *, strict: bool = True) -> dict[str, Any]:
    """Return the arguments of a dataclass, from JSON.

    Args:
        kind: The dataclass.
        strict: Whether fields that the class does not have are refused; otherwise left out.

    Raises:
        BadMessageError: A field is unknown, missing, or of another type than is declared.
    """
    if not isinstance(data, Mapping):
        raise BadMessageError(f"{kind.__name__} is not a mapping, but a {type(data).__name__}")
    hints, needed = _declared(kind)
    if strict and (unknown := [name for name in data if name not in hints]):
        raise BadMessageError(f"{kind.__name__} has no field {unknown[0]!r}")
    if missing := needed - data.keys():
        raise BadMessageError(f"{kind.__name__} lacks {', '.join(sorted(missing))}")
    return {
        name: _checked(data[name], hint, f"{kind.__name__}.{name}", strict)
        for name, hint in hints.items()
        if name in data
    }


@functools.cache
def _declared(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a dataclass's fields by name, and the names of those without default."""
    hints, fields = get_type_hints(kind), dataclasses.fields(kind)
    needed = [
        one.name
        for one in fields
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    ]
    return {one.name: hints[one.name] for one in fields}, frozenset(needed)


def _checked(value: Any, hint: Any, what: str, strict: bool) -> Any:
    """Return a value of JSON as the type that a field declares."""
    origin = get_origin(hint)
    if hint is Any or (hint in (bool, int, str, type(None)) and type(value) is hint):
        return value
    if origin is Literal and isinstance(value, str) and value in get_args(hint):
        return value
    if origin in (Union, types.UnionType):
        for one in get_args(hint):
            with contextlib.suppress(BadMessageError):
                return _checked(value, one, what, strict)
    if hint is float and type(value) in (int, float):
        with contextlib.suppress(OverflowError):
            return float(value)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_checked(one, get_args(hint)[0], what, strict) for one in value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint(**fields_of(hint, value, strict=strict))
    raise BadMessageError(f"{what} has the wrong type {type(value).__name__}")


# -- of either direction -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message.

    Attributes:
        kind: Its name in the message.
        word: Distinguishes several messages of one kind.
    """

    kind: ClassVar[str] = ""
    word: ClassVar[str] = ""

    def to_wire(self) -> dict[str, Any]:
        """Return its fields, JSON-ready."""
        fields = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {k: v.to_wire() if isinstance(v, CellOutcome) else v for k, v in fields.items()}

    def buffers(self) -> tuple[Buffer, ...]:
        """Return the raw bytes that are sent in addition to the fields."""
        return ()

    @classmethod
    def from_wire(cls: type[Self], data: Mapping[str, Any], buffers: Sequence[Buffer]) -> Self:
        """Return the message that was sent.

        Raises:
            BadMessageError: Its fields or buffers are not those of this class.
        """
        if buffers:
            raise BadMessageError(f"{cls.__name__} must have no buffers")
        return cls(**fields_of(cls, data))


@dataclass(frozen=True, kw_only=True)
class OfEngine(Message):
    """A message about the engine itself, independent of any run."""

    engine: int


@dataclass(frozen=True, kw_only=True)
class OfRun(Message):
    """A message that belongs to a run; `run` is its number, 0 outside of runs."""

    run: int


@dataclass(frozen=True, kw_only=True)
class ToUser(Message):
    """To a cell that waits for its user; `number` is the question's number."""

    kind: ClassVar[str] = "debugger"
    number: int


# -- up: messages from engines -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hello(OfEngine):
    """The engine is attached.

    Attributes:
        clock: The name of the clock that it reads (`record.clock_name`); empty: not known.
    """

    kind: ClassVar[str] = "hello"
    pid: int = 0
    host: str = ""
    python: str = ""
    clock: str = ""


@dataclass(frozen=True, kw_only=True)
class Refused(OfEngine):
    """The number of messages and connections without the right key so far."""

    kind: ClassVar[str] = "refused"
    count: int


@dataclass(frozen=True, kw_only=True)
class Records(OfRun):
    """The measured steps.

    Attributes:
        dropped: How many rows were lost so far.
        rows: `record.RECORD` rows, packed.
    """

    kind: ClassVar[str] = "records"
    dropped: int
    rows: Buffer = b""

    def to_wire(self) -> dict[str, Any]:
        """Return its fields, JSON-ready."""
        return {"run": self.run, "dropped": self.dropped}

    def buffers(self) -> tuple[Buffer, ...]:
        """Return the rows."""
        return (self.rows,)

    @classmethod
    def from_wire(cls, data: Mapping[str, Any], buffers: Sequence[Buffer]) -> Records:
        """Return the message that was sent."""
        if len(buffers) != 1 or "rows" in data:
            raise BadMessageError(
                f"a message `Records` must have exactly one binary part, but has {len(buffers)}"
            )
        return cls(**fields_of(cls, data), rows=buffers[0])


@dataclass(frozen=True, kw_only=True)
class Happened(OfRun):
    """Something happened in the run."""

    kind: ClassVar[str] = "event"
    event: events.Event

    def to_wire(self) -> dict[str, Any]:
        """Return its fields, JSON-ready."""
        return {"run": self.run, "name": self.event.name, **self.event.to_wire()}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any], buffers: Sequence[Buffer]) -> Happened:
        """Return the message that was sent; its event is one that engines may send."""
        name = data.get("name")
        if not (isinstance(name, str) and name in events.FROM_ENGINES):
            raise BadMessageError(f"event {name!r}")
        if buffers or type(data.get("run")) is not int:
            raise BadMessageError(f"event {name!r} of run {data.get('run')!r}")
        fields = {key: value for key, value in data.items() if key not in ("run", "name")}
        return cls(run=data["run"], event=events.read(name, fields))


@dataclass(frozen=True, kw_only=True)
class Position(OfRun):
    """Answers `Halt`: the step that this rank has begun; it does not begin another one."""

    kind: ClassVar[str] = "position"
    rank: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Stopped(OfEngine):
    """A cell waits for its user.

    Attributes:
        number: The question's number on this engine.
        where: The place in the cell.
        text: The text that the user sees first.
        patience_s: How long the other ranks wait for this one in a collective.
        since: When it stopped (seconds since 1970).
    """

    kind: ClassVar[str] = "debugger"
    word: ClassVar[str] = "stopped"
    number: int
    asks: Literal["debugger", "input", "password"]
    where: str
    text: str = ""
    patience_s: float = 0.0
    since: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Answered(OfEngine):
    """The result of a line; the cell waits for the next one."""

    kind: ClassVar[str] = "debugger"
    word: ClassVar[str] = "answer"
    number: int
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Left(OfEngine):
    """The cell continues."""

    kind: ClassVar[str] = "debugger"
    word: ClassVar[str] = "left"
    number: int
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Served(OfEngine):
    """The result of `Serve`.

    Attributes:
        port: The port on which debugpy listens; None: it does not listen.
        before: Whether it listened already.
        missing, taken: Why it does not listen.
    """

    kind: ClassVar[str] = "debugger"
    word: ClassVar[str] = "served"
    port: int | None = None
    before: bool = False
    missing: str | None = None
    taken: str | None = None


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """Where an engine's main thread is.

    Attributes:
        at: The innermost line of the user's code: `train.py:41 in load_batch`, `cell line 7`.
        inside: The library function that runs there.
        waits_in: The collective or other function in which it waits.
    """

    state: Literal["idle", "busy", "waits", "held", "paused"]
    at: str = ""
    inside: str = ""
    waits_in: str = ""


@dataclass(frozen=True, kw_only=True)
class WhereAnswer(Whereabouts, OfEngine):
    """Answers `AskWhere`; `ask` is the question's number."""

    kind: ClassVar[str] = "where"
    ask: int


@dataclass(frozen=True, kw_only=True)
class StacksAnswer(WhereAnswer):
    """Answers `AskStacks`: `text` holds the stacks of all threads."""

    kind: ClassVar[str] = "stacks"
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class ClockAnswer(OfEngine):
    """Answers `AskClock`: the time of the engine's clock (`time.perf_counter`)."""

    kind: ClassVar[str] = "clock"
    ask: int
    at_s: float


@dataclass(frozen=True, kw_only=True)
class CellEnded(OfEngine):
    """The result of a cell in a job, where no call of the kernel waits for it."""

    kind: ClassVar[str] = "ended"
    outcome: CellOutcome


@dataclass(frozen=True, kw_only=True)
class AskedToEnd(OfEngine):
    """The platform told a job's process to exit, for the reason `why`: all must stop at a step."""

    kind: ClassVar[str] = "asked"
    why: str


# -- down: messages from the kernel ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Welcome(Message):
    """Answers `Hello`; `clock` names the kernel's clock, as there."""

    kind: ClassVar[str] = "welcome"
    clock: str = ""


@dataclass(frozen=True, kw_only=True)
class Halt(OfRun):
    """Answer with your `Position`, and begin no further step."""

    kind: ClassVar[str] = "halt"
    purpose: Purpose


@dataclass(frozen=True, kw_only=True)
class HaltAt(OfRun):
    """Halt after this step, which all ranks reach; -1: each at its present step."""

    kind: ClassVar[str] = "halt_at"
    purpose: Purpose
    step: int


@dataclass(frozen=True, kw_only=True)
class Resume(OfRun):
    """Continue after a pause."""

    kind: ClassVar[str] = "resume"


@dataclass(frozen=True, kw_only=True)
class Advance(OfRun):
    """Continue for this number of steps, then pause again."""

    kind: ClassVar[str] = "advance"
    steps: int


@dataclass(frozen=True, kw_only=True)
class Inject(OfRun):
    """The faults that hold from now on, as text."""

    kind: ClassVar[str] = "inject"
    faults: tuple[str, ...] = ()


SERVER_GONE, WORKERS_DONE = "server gone", "workers done"
"""Topics of the kernel: a server has died (by its number), others continue; no worker comes."""


@dataclass(frozen=True, kw_only=True)
class Told(OfRun):
    """A value that another engine of the run (`events.Posted`) or the kernel has posted."""

    kind: ClassVar[str] = "told"
    rank: int
    topic: str
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class Regroup(OfRun):
    """From the current step on, other workers take part; those in `past` have finished training."""

    kind: ClassVar[str] = "regroup"
    generation: int
    places: tuple[int, ...]  # ranks in the run's tables, none: leave; `ranks` has their engines
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    past: tuple[int, ...]
    prefix: str  # the prefix under which they meet in the store
    fresh: tuple[int, ...] = ()  # the places of the workers that join


@dataclass(frozen=True, kw_only=True)
class Hold(ToUser):
    """Wait for the user; `announce`: show a message, because no notebook cell is blocked."""

    word: ClassVar[str] = "hold"
    announce: bool = True


@dataclass(frozen=True, kw_only=True)
class GoOn(ToUser):
    """No answer will come, with the reason; the cell continues."""

    word: ClassVar[str] = "go_on"
    reason: str


@dataclass(frozen=True, kw_only=True)
class Typed(ToUser):
    """The text that the user has typed."""

    word: ClassVar[str] = "line"
    text: str


@dataclass(frozen=True, kw_only=True)
class Repeat(Message):
    """Report again where the cell waits for its user, if it waits."""

    kind: ClassVar[str] = "debugger"
    word: ClassVar[str] = "where"


@dataclass(frozen=True, kw_only=True)
class Serve(Message):
    """Serve debugpy on this port; 0: any free port."""

    kind: ClassVar[str] = "debugger"
    word: ClassVar[str] = "serve"
    port: int


@dataclass(frozen=True, kw_only=True)
class AskWhere(Message):
    """Asks where the main thread is, and in which function it waits; the answer repeats `ask`."""

    kind: ClassVar[str] = "where"
    ask: int


@dataclass(frozen=True, kw_only=True)
class AskStacks(Message):
    """Asks for the stacks of all threads; the answer repeats `ask`."""

    kind: ClassVar[str] = "stacks"
    ask: int


@dataclass(frozen=True, kw_only=True)
class AskClock(Message):
    """Asks for the time of the engine's clock; the answer repeats `ask`."""

    kind: ClassVar[str] = "clock"
    ask: int


@dataclass(frozen=True, kw_only=True)
class Interrupt(Message):
    """Interrupt the cell: sent to processes that the kernel cannot signal."""

    kind: ClassVar[str] = "interrupt"


Up = (
    Hello | Refused | Records | Happened | Position | Stopped | Answered | Left | Served
    | WhereAnswer | StacksAnswer | ClockAnswer | CellEnded | AskedToEnd
)  # fmt: skip
Down = (
    Welcome | Halt | HaltAt | Resume | Advance | Inject | Told | Regroup | Hold | GoOn | Typed
    | Repeat | Serve | AskWhere | AskStacks | AskClock | Interrupt
)  # fmt: skip


# -- the result of a cell -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OwnLoop:
    """A cell's own loop: the call that took it over, its backward passes, its optimizer steps."""

    by: str = ""
    backwards: int = 0
    updates: int = 0


@dataclass(frozen=True, kw_only=True)
class Copy:
    """An engine's copy of the model at the end; digests with equal rounding can be compared.

    Attributes:
        rank: The rank under which the engine's rows are kept.
    """

    rank: int
    digest: int
    like: Any = None


@dataclass(frozen=True, kw_only=True)
class CellOutcome:
    """The result of a cell on one engine; if the engine died, as the kernel found it.

    Attributes:
        ename, evalue: The class of an error, and its message.
        traceback: The traceback of an error outside the cell.
        advice: The next step for the user.
        felt: The other engine's death as Workbench's links saw it, if that was the error.
        replace: The engine's framework cannot be used any more.
        trained: The number of steps.
        loop: The report about a user's own loop.
        options_read: Whether the cell read `wb.options`.
        unread: Names of `--set` that the cell did not read.
        initial_read: Whether a model took the initial weights.
        weights: Name of the file with the final weights.
        copies: The engine's copy of the model, where copies should be equal.
        kept_step: The step that was rescued for the workers that continue; -1: none.
        reassigned: Names of Workbench to which the cell assigned another value.
        group_broken: Whether the process group must be created again.
        cut_off: Whether the engine's connections were cut so that it stopped waiting.
        how: How a dead engine ended.
        log: The last lines of its log.
        recoverable: Whether it died by itself, so that a run may continue without it.
        restarted: Whether it was restarted, so that it exists again.
        with_all: Whether it ended with all others.
        ended: How Workbench ended it, in words; empty: it did not.
        failed_of: The error that it had shown before.
    """

    status: Literal["ok", "error", "stopped", "interrupted", "died"]
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    advice: str | None = None
    felt: str = ""
    replace: bool = False
    trained: int = 0
    loop: OwnLoop | None = None
    options_read: bool = False
    unread: tuple[str, ...] = ()
    initial_read: bool = False
    weights: str | None = None
    copies: Copy | None = None
    kept_step: int = -1
    reassigned: tuple[str, ...] = ()
    group_broken: bool = False
    cut_off: bool = False
    how: str = ""
    log: str = ""
    recoverable: bool = False
    restarted: bool = False
    with_all: bool = False
    ended: str = ""
    failed_of: str = ""

    @property
    def words(self) -> str:
        """The error as `ValueError: text`."""
        return f"{self.ename}: {self.evalue}"

    @property
    def is_well(self) -> bool:
        """Whether the cell succeeded, or was stopped by its user."""
        return self.status in ("ok", "stopped")

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data; default values are left out."""
        bare = CellOutcome(status=self.status)
        said = dataclasses.asdict(self).items()
        return {k: v for k, v in said if k == "status" or v != getattr(bare, k)}

    @staticmethod
    def from_wire(data: object, *, strict: bool = True) -> CellOutcome:
        """Rebuild what `to_wire` gave, from JSON.

        Args:
            strict: Whether fields that this version does not know are refused. For files of other
                versions they are left out.

        Raises:
            BadMessageError: The data is not a result.
        """
        return CellOutcome(**fields_of(CellOutcome, data, strict=strict))


Outcomes = Mapping[int, CellOutcome]
"""The results of a cell on each of its engines."""
