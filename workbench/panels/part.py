"""A section of the panel: what it shows, and what its controls do."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..errors import PlanError

if TYPE_CHECKING:
    from .model import Panel

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
                f"The panel's {self.name} has no such control.",
                seen=name,
                allowed=", ".join(self._actions),
                code="WB-PLAN-074",
            )
        try:
            inspect.signature(found.call).bind(**fields)
        except TypeError as error:
            raise PlanError(
                f"{self.name}.{name} was asked wrongly.", seen=str(error), code="WB-PLAN-075"
            ) from None
        return found

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of what was held; the last widget is gone."""
