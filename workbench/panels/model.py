"""The content and the actions of the panel, independent of its widgets.

    browser --do--> PanelWidget --> Panel.do --> Part's method --> session (as the magics)
    browser <-parts/frames- PanelWidget <-- Pump <-- Part.wire(), Run.snapshot()

There is one `Panel` for a notebook's session, so two panels in one notebook show the same.

A `Part` is a section of the panel: its content and the actions of its controls.
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
"""Largest number of displayed messages."""


@dataclass(frozen=True)
class Notice:
    """A message of the panel; all widgets show it until the user closes it.

    Attributes:
        part: The section of the message.
        level: `error` or `info`.
        detail: Folded text, such as a traceback.
    """

    id: int
    part: str
    level: str
    text: str
    detail: str = ""


class Panel:
    """The panel's model.

    Attributes:
        session: The notebook's session; clicks use the same code as magics.
        choice: The choices: recipe, strategies with their options, workers, seeds.
        parts: Its sections by name.
        changed: Set when widgets should draw before the next tick.
        keepers: Called with a name and the content to save in the notebook under this name.
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
        """The data for the browser, by section; `panel` is about the whole panel."""
        found = {name: _wire(part) for name, part in self.parts.items()}
        with self._lock:
            notices = [asdict(one) for one in self.notices]
            found["panel"] = {"notices": notices, "doing": list(self._doing)}
        return found

    def say(self, part: str, text: str, *, level: str = "info", detail: str = "") -> None:
        """Show a message; the oldest messages are dropped if there are too many."""
        notice = Notice(next(self._numbers), part, level, text, detail)
        with self._lock:
            same = [one for one in self.notices if (one.part, one.text) != (part, text)]
            self.notices = [*same, notice][-NOTICES:]
        self.changed.set()

    def dismiss(self, notice: object) -> None:
        """Remove a message by its id."""
        with self._lock:
            self.notices = [one for one in self.notices if one.id != notice]
        self.changed.set()

    def keep(self, name: str, thing: Any) -> None:
        """Save a picture in the notebook, for readers without a kernel."""
        for keeper in list(self.keepers):
            keeper(name, thing)

    # -- what is done ------------------------------------------------------------------------------

    def do(self, name: str, fields: Mapping[str, Any], reply: Reply = lambda *a, **k: None) -> None:
        """Carry out a control's action: `cluster.start` with its fields. Never raises.

        Args:
            reply: Called with the return value of the action. If the action fails, the error
                becomes a message and `reply` is called with `failed=True`.
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
        """Run an action on the panel's thread, after all earlier requests."""
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
        """Carry out requests until none waits; the next request starts another thread."""
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
        """Wait until all requests are done; for tests and scripts."""
        end_s = time.monotonic() + timeout_s
        while self._doing and time.monotonic() < end_s:
            self.changed.wait(0.01)
        return not self._doing


def _wire(part: Part) -> Wire:
    try:
        return part.wire()
    except Exception as error:  # an error in one section must not affect the others
        return {"broken": f"{type(error).__name__}: {error}"}


Wire = dict[str, Any]
"""Plain JSON for the browser. Numbers that were not measured are None."""
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Action:
    """The action of one control.

    Attributes:
        slow: Whether it can take longer than a click should. Then it runs on the panel's thread
            after all earlier requests. Other actions run at once (Stop, sliders).
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
        name: The name of the section in the browser, and the first half of its actions' names.
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
        """The data for the browser; cheap, called several times a second on any thread."""

    def find(self, name: str, fields: Mapping[str, Any]) -> Action:
        """Return an action that takes these fields.

        Raises:
            PlanError: There is no action with this name, or it takes other fields.
        """
        found = self._actions.get(name)
        if found is None:
            raise PlanError(
                f"The panel's section {self.name!r} does not have this control.",
                seen=name,
                allowed=", ".join(self._actions),
                code="WB-PLAN-074",
            )
        try:
            inspect.signature(found.call).bind(**fields)
        except TypeError as error:
            raise PlanError(
                f"The panel's control {self.name}.{name} does not take these arguments.",
                seen=str(error),
                code="WB-PLAN-075",
            ) from None
        return found

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release resources, because the last widget was closed."""
