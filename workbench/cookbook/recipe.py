"""A recipe: the code of a cell or a function, with a name so that it can be run again.

A function can be a recipe with parameters. Workbench reads from the source how a recipe trains,
without running it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ..catalog.spec import FIT_FEATURES, Strategy, Way
from ..errors import PlanError, unknown

_FRAMEWORKS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+(torch|tensorflow|keras)\b", re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """Source that engines run as one cell.

    Attributes:
        source: Python source; line n of the user's cell is line n + `first_line` - 1 here.
        first_line: Line of the notebook cell on which `source` begins, so that tracebacks
            show the cell's own line numbers (2 below a `%%distributed` line).
        origin: Where it came from, for tables: `In[3]` or the function's name; in `wb.recipes`
            `cell In[3]`, `function` or `built-in`.
        function: For recipes made from a function: its name; the source then ends in its
            definition and is followed by a call.
        args: The positional arguments of the function; kept in the notebook, not in files.
        parameters: The keyword arguments of a registered function: every argument that has a
            default. They are plain values, so checkpoints store them too.
        name: The name for `--recipe`; empty for a cell that has no name.
        framework: The framework that it is written for; empty if it is not known.
        summary: One line, for lists.
    """

    source: str
    first_line: int = 1
    origin: str = "cell"
    function: str | None = None
    args: tuple[Any, ...] = field(default=(), compare=False)
    parameters: dict[str, Any] = field(default_factory=dict, hash=False)
    name: str = field(default="", compare=False)
    framework: str = field(default="", compare=False)
    summary: str = field(default="", compare=False)

    @property
    def digest(self) -> str:
        """Twelve hex digits that are equal for equal recipes; comparisons group runs by them.

        Blank lines around the source do not count, because a notebook ends a cell with a blank
        line.
        """
        text = self.source.strip("\n")
        if self.parameters:
            text += f"\n{self.call()}"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]

    @property
    def numbered(self) -> str:
        """The source after comment lines, so that its line numbers equal those of the user's cell.

        IPython drops blank lines at a cell's beginning, but not comments. A cell that begins with
        another magic (`%%time`) is not changed, because a cell magic must be in the first line.
        """
        if self.source.lstrip().startswith("%%"):
            return self.source
        return "#\n" * (self.first_line - 1) + self.source

    def call(self, *first: str) -> str:
        """Return the source of the call of a recipe's function.

        Args:
            first: Source of positional arguments.
        """
        given = [*first, *(f"{name}={value!r}" for name, value in self.parameters.items())]
        return f"{self.function}({', '.join(given)})"

    @property
    def cell(self) -> str:
        """The source of a cell that trains the recipe: a function is defined, then called.

        Raises:
            PlanError: The function was given an argument that cannot be written as source code.
        """
        if self.function is None:
            return self.source
        for index, value in enumerate(self.args):
            if not is_plain(value):
                raise PlanError(
                    "Workbench sends a function and its arguments to the engines as source code. "
                    f"An argument of `{self.function}` cannot be written as source code.",
                    seen=f"argument {index}: {type(value).__name__}",
                    allowed="numbers, text, True, False, None, and lists and dicts of these values",
                    next_step="create this value inside the function",
                    code="WB-PLAN-032",
                )
        return f"{self.source.rstrip()}\n\n\n{self.call(*map(repr, self.args))}\n"

    def with_parameters(self, **values: Any) -> Recipe:
        """Return the recipe with other values for some of its parameters.

        Raises:
            PlanError: The recipe has no such parameter, or the value cannot be written as source
                code.
        """
        for name, value in values.items():
            if name not in self.parameters:
                raise unknown(
                    f"parameter of recipe {self.name or self.origin}",
                    name,
                    self.parameters,
                    "only arguments with a default value are parameters of a recipe",
                )
            if not is_plain(value):
                raise PlanError(
                    "Workbench sends a recipe and its parameters to the engines as source code. "
                    f"The value of `{name}` cannot be written as source code.",
                    seen=type(value).__name__,
                    allowed="numbers, text, True, False, None, and lists and dicts of these values",
                    next_step="create this value inside the recipe's function",
                    code="WB-PLAN-033",
                )
        return replace(self, parameters={**self.parameters, **values})

    def with_given(self, given: Mapping[str, Any]) -> Recipe:
        """Return the recipe with the values of `-p`, which arrive as text.

        Raises:
            PlanError: The recipe has no such parameter, or the text does not fit the parameter's
                type.
        """
        if given and not self.parameters:
            raise PlanError(
                f"{self.name or 'This cell'} has no parameters, so -p cannot be used.",
                seen=", ".join(f"-p {name}" for name in given),
                allowed="a recipe written as a function: its arguments are the parameters",
                next_step=(
                    "add an argument with a default value to the function"
                    if self.function
                    else "write the recipe as a function `def name(lr=0.1): ...`, with "
                    "`@wb.recipe` on the line above"
                )
                + "; or remove -p",
                code="WB-PLAN-269",
            )
        values = {
            name: read_like(
                self.parameters[name], value, f"The value of `{name}` has the wrong type."
            )
            if isinstance(value, str) and name in self.parameters
            else value
            for name, value in given.items()
        }
        return self.with_parameters(**values)

    @staticmethod
    def from_function(function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Recipe:
        """Make a recipe from a function.

        Its source is sent to engines, so it must not be a closure.

        Raises:
            PlanError: The source cannot be read, or the function is a lambda or a closure.
        """
        try:
            source = textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError) as error:
            raise PlanError(
                "Workbench cannot read the function's source, so it cannot send the function to "
                "the engines.",
                seen=repr(function),
                next_step="define the function in a cell or a module, or pass the source as text",
                code="WB-PLAN-034",
            ) from error
        name = function.__name__
        if name == "<lambda>":
            raise PlanError(
                "A lambda cannot be a recipe.",
                next_step="define a function with a name: def name(): ...",
                code="WB-PLAN-035",
            )
        free = inspect.getclosurevars(function).nonlocals
        if free:
            raise PlanError(
                "The function uses variables of its enclosing function. These variables do not "
                "exist on the engines.",
                seen=", ".join(sorted(free)),
                next_step="turn these variables into arguments of the function. If the function is "
                "a recipe, give each argument a default value. Otherwise, pass the values with "
                "cluster.run(function, args=(...))",
                code="WB-PLAN-036",
            )
        return Recipe(source=undecorated(source), origin=name, function=name, args=args)


def is_plain(value: object) -> bool:
    """Whether a value's `repr` is source of the same value: numbers, text, lists of these."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def read_like(default: Any, text: str, otherwise: str = "Not understood.") -> Any:
    """Return the value of a text, in the type of the default.

    Args:
        otherwise: The message of the error.

    Raises:
        PlanError: The text does not have this type.
    """
    if isinstance(default, str):
        return text
    try:
        value = ast.literal_eval(text.capitalize() if isinstance(default, bool) else text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        if default is None:
            return text
        raise PlanError(
            otherwise,
            seen=text,
            allowed=f"a value of the same type as {default!r}",
            code="WB-PLAN-068",
        ) from None
    wanted = float if isinstance(default, float) else type(default)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if default is not None and type(value) is not wanted:
        raise PlanError(
            otherwise,
            seen=text,
            allowed=f"a value of the same type as {default!r}",
            code="WB-PLAN-069",
        )
    return value


def undecorated(source: str) -> str:
    """Return a function's source without `@wb.recipe`, which only the notebook needs."""
    try:
        node = ast.parse(source).body[0]
    except (SyntaxError, IndexError):
        return source
    lines = source.splitlines(keepends=True)
    for decorator in reversed(getattr(node, "decorator_list", [])):
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = getattr(called, "attr", getattr(called, "id", ""))
        if name == "recipe":
            del lines[decorator.lineno - 1 : decorator.end_lineno]
    return "".join(lines)


def framework_of(source: str) -> str:
    """Return the framework that a source imports; empty if it imports none or both."""
    found = {_FRAMEWORKS[name] for name in _IMPORT.findall(source)}
    return found.pop() if len(found) == 1 else ""


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NEXT = "write a function `def name(lr=0.1): ...` with the line `@wb.recipe` directly above it"


def recipe_of(function: Callable[..., Any], name: str = "", summary: str = "") -> Recipe:
    """Return a function as a recipe. Its arguments are the parameters; each needs a default.

    Args:
        name: By default the function's own.
        summary: By default the first line of its docstring.

    Raises:
        PlanError: It is not a function, or an argument has no default. Or its source cannot be
            read, or uses names of an enclosing function.
    """
    if not inspect.isfunction(function):
        raise PlanError(
            "A recipe must be a function.",
            seen=type(function).__name__,
            next_step=NEXT,
            code="WB-PLAN-028",
        )
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if is_async or inspect.isgeneratorfunction(function):
        raise PlanError(
            "A recipe must be a normal function that trains when it is called.",
            seen=f"{function.__name__}, which "
            + ("is an async function" if is_async else "contains yield"),
            next_step="write def instead of async def" if is_async else "remove yield",
            code="WB-PLAN-029",
        )
    made = Recipe.from_function(function)
    called = check_name(name or function.__name__)
    lines = (summary or inspect.getdoc(function) or "").strip().splitlines()
    return replace(
        made,
        parameters=_parameters(function),
        name=called,
        origin="function",
        framework=framework_of(made.source),
        summary=lines[0].strip() if lines else "",
    )


def check_name(name: object) -> str:
    """Return a recipe's name as a magic's line can contain it, or raise PlanError."""
    text = name if isinstance(name, str) else ""
    if not text.strip() or text != text.strip() or not text.isprintable() or text[0] in "-#%":
        raise PlanError(
            "This name cannot be used for a recipe.",
            seen=name,
            allowed="one line of text, not empty, without spaces at its ends; it must not begin "
            "with -, # or %",
            code="WB-PLAN-030",
        )
    return text


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    found, bare = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in _REST:
            continue
        if parameter.default is inspect.Parameter.empty:
            bare.append(parameter.name)
        elif parameter.kind in _BY_NAME and is_plain(parameter.default):
            found[parameter.name] = parameter.default
    if bare:
        raise PlanError(
            "Each argument of a recipe needs a default value. Workbench uses the default value if "
            "a run gives no other value.",
            seen=", ".join(bare),
            allowed=f"def {function.__name__}({bare[0]}=...)",
            next_step="add a default value for each argument, or call cluster.run(function, "
            "args=(...), strategy=...)",
            code="WB-PLAN-031",
        )
    return found


WORDS: dict[Way, str] = {
    "fit": "wb.fit",
    "prepare": "wb.prepare",
    "keras": "model.fit",
    "loop": "strategy.run",
}


@dataclass(frozen=True)
class Use:
    """What a recipe's source calls.

    Attributes:
        way: How it trains; None if the source does not show it (a magic, a library's trainer).
        features: The arguments in `FIT_FEATURES` that it passes to `wb.fit` for certain.
    """

    way: Way | None = None
    features: frozenset[str] = frozenset()


@lru_cache(maxsize=64)
def use_of(source: str) -> Use:
    """Return how a source trains. If the source does not show it clearly, the answer is None."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Use()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    ways = {way: call for call in calls if (way := _way(call))}
    if (
        framework_of(source) != "tensorflow"
    ):  # scikit-learn's scalers and Lightning's trainers also have a method `fit`
        ways.pop("keras", None)
    if "fit" in ways:
        return Use("fit", _features(ways["fit"]))
    order: tuple[Way, ...] = ("prepare", "keras", "loop")
    return Use(next((way for way in order if way in ways), None))


def misfit(entry: Strategy, use: Use) -> str:
    """Return why a strategy cannot train such a recipe, in one sentence; empty if it can."""
    if use.way is not None and use.way not in entry.ways:
        able = " or ".join(WORDS[way] for way in entry.ways)
        return f"This recipe trains with {WORDS[use.way]}, but {entry.name} needs {able}."
    missing = sorted(use.features - entry.supports)
    if missing:
        return f"This recipe uses {', '.join(missing)}, which {entry.name} does not support."
    return ""


def _way(call: ast.Call) -> Way | None:
    if not isinstance(call.func, ast.Attribute):
        return None
    owner = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
    name = call.func.attr
    if owner == "wb":
        ours: dict[str, Way] = {"fit": "fit", "prepare": "prepare"}
        return ours.get(name)
    if owner == "strategy":
        return "loop" if name == "run" else None
    return "keras" if name == "fit" and owner != "" else None


def _features(call: ast.Call) -> frozenset[str]:
    given = ((word.arg, word.value) for word in call.keywords if word.arg in FIT_FEATURES)
    return frozenset(name for name, value in given if name and not _unused(name, value))


def _unused(name: str, value: ast.expr) -> bool:
    """Whether an argument has its default value."""
    if not isinstance(value, ast.Constant):
        return False
    return value.value in (None, False) or (name == "accumulate" and value.value == 1)
