"""What is trained: the code of a cell or a function, named so that it can be run again."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import PlanError


@dataclass(frozen=True)
class Recipe:
    """Source that engines run as one cell.

    Attributes:
        source: Python source; line n of the user's cell is line n + `first_line` - 1 here.
        first_line: Line of the notebook cell on which `source` begins, so that tracebacks
            show the cell's own line numbers (2 below a `%%distributed` line).
        origin: Where it came from, for tables: `In[3]` or the function's name.
        call: For recipes made from a function: pickled `(args, kwargs)`; the source then ends in
            a definition and is followed by a call.
    """

    source: str
    first_line: int = 1
    origin: str = "cell"
    function: str | None = None
    args: tuple[Any, ...] = field(default=(), compare=False)

    @property
    def digest(self) -> str:
        """Twelve hex digits that are equal for equal recipes; comparisons are keyed on it."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:12]

    @property
    def numbered(self) -> str:
        """The source, below comments that make its lines count as those of the user's cell.

        IPython drops blank lines at a cell's beginning, but not comments. A cell that begins with
        a magic of its own (`%%time`) is left alone: below a comment it would be none.
        """
        if self.source.lstrip().startswith("%%"):
            return self.source
        return "#\n" * (self.first_line - 1) + self.source

    @staticmethod
    def from_function(function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Recipe:
        """Make a recipe from a function; its source travels, so it may not close over names.

        Raises:
            PlanError: The source is not to be had, or the function is a lambda or a closure.
        """
        try:
            source = textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError) as error:
            raise PlanError(
                "The function's source cannot be read, so it cannot be sent to the engines.",
                seen=repr(function),
                next_step="define it in a cell or a module, or pass the source as a string",
            ) from error
        name = function.__name__
        if name == "<lambda>":
            raise PlanError("A lambda is no recipe.", next_step="give it a name with def")
        free = inspect.getclosurevars(function).nonlocals
        if free:
            raise PlanError(
                "The function uses names of an enclosing function, which engines do not have.",
                seen=", ".join(sorted(free)),
                next_step="pass them as args=(...)",
            )
        return Recipe(source=source, origin=name, function=name, args=args)
