"""What the panel shows and does, whichever widgets show it.

    browser --do--> PanelWidget --> Panel.do --> Part's method --> session (as the magics)
    browser <-parts/frames- PanelWidget <-- Pump <-- Part.wire(), Run.snapshot()

There is one `Panel` for a notebook's session, so two panels in one notebook show the same.

A `Part` is a section of it: what it shows, and what its controls do.
"""

from __future__ import annotations

import inspect
import itertools
import queue
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..errors import PlanError, WorkbenchError
from .choice import Choice

if TYPE_CHECKING:
    from ..notebook.session import Session

Reply = Callable[..., None]
"""`reply(value)`, or `reply(None, failed=True)`."""
NOTICES = 4
"""Messages that are kept on show."""


@dataclass(frozen=True)
class Notice:
    """A message of the panel; shown by all its widgets until somebody closes it.

    Attributes:
        part: The section that it is about.
        level: `error` or `info`.
        detail: What can be unfolded: a traceback.
    """

    id: int
    part: str
    level: str
    text: str
    detail: str = ""


class Panel:
    """The panel's model.

    Attributes:
        session: The notebook's; what is clicked goes the same way as what is typed.
        choice: What is picked: recipe, strategies with their options, workers, seeds.
        parts: Its sections by name.
        changed: Set when widgets should draw before the next tick.
        keepers: Called with a name and what should stay in the saved notebook under that name.
    """

    def __init__(self, session: Session, parts: tuple[type[Part], ...]) -> None:
        self.session = session
        self.choice = Choice()
        self.changed = threading.Event()
        self.notices: list[Notice] = []
        self.parts: dict[str, Part] = {part.name: part(self) for part in parts}
        self.keepers: list[Callable[[str, Any], None]] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._slow: queue.SimpleQueue[tuple[str, Callable[[], None]]] = queue.SimpleQueue()
        self._doing: list[str] = []
        self._thread: threading.Thread | None = None

    # -- what is shown -----------------------------------------------------------------------------

    def wire(self) -> dict[str, Wire]:
        """What the browser draws, by section; `panel` is about the whole."""
        found = {name: _wire(part) for name, part in self.parts.items()}
        with self._lock:
            notices = [asdict(one) for one in self.notices]
            found["panel"] = {"notices": notices, "doing": list(self._doing)}
        return found

    def say(self, part: str, text: str, *, level: str = "info", detail: str = "") -> None:
        """Show a message; the oldest make room."""
        notice = Notice(next(self._numbers), part, level, text, detail)
        with self._lock:
            same = [one for one in self.notices if (one.part, one.text) != (part, text)]
            self.notices = [*same, notice][-NOTICES:]
        self.changed.set()

    def dismiss(self, notice: object) -> None:
        """Take a message away, by its id."""
        with self._lock:
            self.notices = [one for one in self.notices if one.id != notice]
        self.changed.set()

    def keep(self, name: str, thing: Any) -> None:
        """Keep a picture in the notebook, for when there is no kernel."""
        for keeper in list(self.keepers):
            keeper(name, thing)

    # -- what is done ------------------------------------------------------------------------------

    def do(self, name: str, fields: Mapping[str, Any], reply: Reply = lambda *a, **k: None) -> None:
        """Do what a control asks for: `cluster.start` with its fields. Never raises.

        Args:
            reply: Called with what the action returns, once it is done; after a failure, which
                becomes a message, with `failed=True`.
        """
        part, _, verb = name.partition(".")
        try:
            if name == "panel.dismiss":
                self.dismiss(fields.get("notice"))
                reply(None)
                return
            if part not in self.parts:
                raise PlanError(
                    "The panel does not have this section.", seen=part, code="WB-PLAN-073"
                )
            found = self.parts[part].find(verb, fields)
        except WorkbenchError as error:
            self._failed(part, error)
            reply(None, failed=True)
            return
        if found.slow:
            self.later(name, lambda: self._call(part, found, fields, reply))
        else:
            self._call(part, found, fields, reply)

    def _call(self, part: str, found: Action, fields: Mapping[str, Any], reply: Reply) -> None:
        try:
            reply(found.call(**fields))
        except Exception as error:  # shown; the panel stays usable
            self._failed(part, error)
            reply(None, failed=True)
        self.changed.set()

    def _failed(self, part: str, error: Exception) -> None:
        own = isinstance(error, WorkbenchError)
        text = str(error) if own else f"{type(error).__name__}: {error}"
        detail = "" if own else "".join(traceback.format_exception(error))
        self.say(part, text, level="error", detail=detail)

    def later(self, name: str, call: Callable[[], None]) -> None:
        """Do something on the panel's own thread, after what was asked for before it."""
        with self._lock:
            self._doing.append(name)
            self._slow.put((name, call))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="workbench-panel", daemon=True
                )
                self._thread.start()
        self.changed.set()

    def _work(self) -> None:
        """Do what was asked for until there is no more; the next request begins another thread."""
        while True:
            with self._lock:
                if self._slow.empty():
                    self._thread = None
                    return
                name, call = self._slow.get()
            try:
                call()
            except Exception as error:  # shown; the thread goes on
                self._failed(name.partition(".")[0], error)
            with self._lock:
                self._doing.remove(name)
            self.changed.set()

    def settled(self, timeout_s: float = 30.0) -> bool:
        """Wait until nothing that was asked for is under way; for tests and scripts."""
        end_s = time.monotonic() + timeout_s
        while self._doing and time.monotonic() < end_s:
            self.changed.wait(0.01)
        return not self._doing


def _wire(part: Part) -> Wire:
    try:
        return part.wire()
    except Exception as error:  # one section's mistake leaves the others standing
        return {"broken": f"{type(error).__name__}: {error}"}


Wire = dict[str, Any]
"""Plain JSON: what the browser draws. Numbers that were not measured are None."""
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Action:
    """What one control does.

    Attributes:
        slow: Whether it may take longer than a click should: it is then done after what was asked
            before it, on the panel's own thread. The others are done at once (Stop, sliders).
    """

    call: Callable[..., Any]
    slow: bool


def action(*, slow: bool = False) -> Callable[[Method], Method]:
    """Let the browser call this method as `part.method`, with its keyword arguments."""

    def mark(method: Method) -> Method:
        method.__dict__["panel_action"] = slow
        return method

    return mark


class Part(ABC):
    """One section.

    Attributes:
        name: What the browser calls it; the first half of its actions' names.
    """

    name: ClassVar[str]

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self._actions = {
            name: Action(method, method.panel_action)
            for name, method in inspect.getmembers(self, callable)
            if hasattr(method, "panel_action")
        }

    @abstractmethod
    def wire(self) -> Wire:
        """What the browser draws; cheap, asked for several times a second, on any thread."""

    def find(self, name: str, fields: Mapping[str, Any]) -> Action:
        """Return an action that takes these fields.

        Raises:
            PlanError: There is none of that name, or it takes others.
        """
        found = self._actions.get(name)
        if found is None:
            raise PlanError(
                f"The panel's {self.name} does not have this control.",
                seen=name,
                allowed=", ".join(self._actions),
                code="WB-PLAN-074",
            )
        try:
            inspect.signature(found.call).bind(**fields)
        except TypeError as error:
            raise PlanError(
                f"{self.name}.{name}: invalid arguments.", seen=str(error), code="WB-PLAN-075"
            ) from None
        return found

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of what was held; the last widget is gone."""
