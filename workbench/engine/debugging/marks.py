"""Marks on functions, for readers of a stack: that a function waits, or that a cell begins there.

A mark is on the function itself, so it moves and is renamed with it. The decorators note the
function's code and return the function unchanged: a call costs nothing more.

    @waits_in(MESSAGE)           its frames, and those it calls, are a wait
    @begins_cell                 everything below is the cell, except machinery
    machinery(__name__)          a user does not need to see frames of this module
    @doing("leaving ...")        what the engine does if no line of the user's is on the stack

A place in code is shown in the user's terms (`cell line 7 in step`, `train.py:41 in load_batch`),
and any value in one short line.
"""

from __future__ import annotations

import os
import re
import reprlib
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Literal, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rule:
    """A kind of wait: its label, and which frames mean it besides the marked ones.

    Attributes:
        label: Its name; `{}` is the function.
        idle: Which part must be idle, for frames that may also compute.
        outermost: Take the outermost of the frames that fit: the one that was called.
        by_user: The user caused it (a pause), so it is not a wait for others.
        modules: Modules of other libraries, including their submodules.
        function: Only this function of those modules.
    """

    label: str
    idle: Literal["", "thread", "process"] = ""
    outermost: bool = False
    by_user: bool = False
    modules: tuple[str, ...] = ()
    function: str = ""

    def fits(self, frame: FrameType) -> bool:
        """Whether the frame means this wait."""
        if _waits.get(frame.f_code) is self:
            return True
        if self.function not in ("", frame.f_code.co_name):
            return False
        return _is_of(frame, self.modules)


PAUSE = Rule("in a pause", by_user=True)
GROUP = Rule("to join the process group")
COLLECTIVE = Rule(
    "in {}", idle="thread", outermost=True, modules=("torch.distributed.distributed_c10d",)
)
BOARD = Rule("for the other engines")
ALL_REDUCE = Rule("in all_reduce", idle="thread")
RECEIVE = Rule("in recv", idle="thread", modules=("torch.distributed.pipelining",))
MESSAGE = Rule("for a message from another worker")
ANSWER = Rule("for an answer from a server", idle="thread")
OF_TORCH = Rule(
    "in {}", idle="thread", modules=("torch.distributed", "torch.nn.parallel.distributed")
)
BACKWARD = Rule(
    "in backward (all_reduce)",
    idle="thread",
    modules=("torch.autograd.graph",),
    function="_engine_run_backward",
)
STEP = Rule("in a step of TensorFlow", idle="process", modules=("tensorflow.python.eager",))

RULES = (
    PAUSE, GROUP, COLLECTIVE, BOARD, ALL_REDUCE, RECEIVE, MESSAGE, ANSWER, OF_TORCH, BACKWARD, STEP,
)  # fmt: skip
"""If frames match several waits, the first of these is reported."""

_SHELL = ("IPython.core", "ipykernel")
_waits: dict[CodeType, Rule] = {}
_doing: dict[CodeType, str] = {}
_begins: set[CodeType] = set()
_machinery: set[str] = set()


def waits_in(rule: Rule) -> Callable[[Function], Function]:
    """Mark a function in which a thread blocks until others arrive, itself or in what it calls."""

    def mark(function: Function) -> Function:
        _waits[_code(function)] = rule
        return function

    return mark


def doing(words: str) -> Callable[[Function], Function]:
    """Mark a function with the engine's activity in it, outside the cell."""

    def mark(function: Function) -> Function:
        _doing[_code(function)] = words
        return function

    return mark


def begins_cell(function: Function) -> Function:
    """Mark the function that runs a cell."""
    _begins.add(_code(function))
    return function


def machinery(module: str) -> None:
    """Leave out a module's frames between the beginning of a cell and the cell's own frames."""
    _machinery.add(module)


def wait_of(function: Callable[..., Any]) -> Rule | None:
    """Return the wait that a function is marked with."""
    return _waits.get(_code(function))


def is_beginning(frame: FrameType) -> bool:
    """Whether a cell begins below this frame."""
    return frame.f_code in _begins


def is_machinery(frame: FrameType) -> bool:
    """Whether a user does not need to see the frame."""
    return frame.f_globals.get("__name__") in _machinery or _is_of(frame, _SHELL)


def done_in(frame: FrameType) -> str:
    """Return the engine's activity in this frame; empty if it is not marked."""
    return _doing.get(frame.f_code, "")


def _is_of(frame: FrameType, modules: tuple[str, ...]) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _code(function: Callable[..., Any]) -> CodeType:
    """Return a function's own code; a wrapper's code would match everything that it wraps."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        raise TypeError(
            f"{function!r} is not a plain function. If the function has other decorators, put this "
            "decorator below them"
        )
    return function.__code__


_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$|^<ipython-input-")
_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(
    {_PATHS[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[2]) + os.sep}
)


_FILE = re.compile(
    r'(?P<before>^|[ \t|+-]*)File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE
)
_numbers: list[Callable[[], Mapping[str, int]]] = []


def number_cells(numbers: Callable[[], Mapping[str, int]]) -> None:
    """Set the function that gives the notebook's number of each cell's file."""
    _numbers[:] = [numbers]


def cell_number(filename: str) -> int | None:
    """Return the number of the cell in this file; None if it is not a cell."""
    return _numbers[0]().get(filename) if _numbers else None


def name_cells(text: str) -> str:
    """Return a text in which `File "...", line 3` of a cell becomes `Cell In[7], line 3`."""

    def named(match: re.Match[str]) -> str:
        number = cell_number(match["file"])
        if number is None:
            return match[0]
        return f"{match['before']}Cell In[{number}], line {match['line']}"

    return _FILE.sub(named, text)


def fold_text(text: str) -> str:
    """Return a message without the libraries' frames of a traceback that it quotes.

    An error of a loader's worker process is sent as text: `Original Traceback ...`.
    """
    if "Traceback (most recent call last)" not in text:
        return name_cells(text)
    kept, skips = [], False
    for line in text.split("\n"):
        if found := _FILE.match(line):
            skips = not is_yours(found["file"])
        elif not line.startswith("    "):
            skips = False
        if not skips:
            kept.append(line)
    return name_cells("\n".join(kept))


def is_cell(filename: str) -> bool:
    """Whether the file is a cell of the notebook."""
    return _CELL.search(filename) is not None


def is_yours(filename: str) -> bool:
    """Whether the user wrote the file: a cell, or a module that was not installed."""
    if is_cell(filename):
        return True
    if filename.startswith("<") or f"{os.sep}site-packages{os.sep}" in filename:
        return False
    return not os.path.abspath(filename).startswith(_LIBRARIES)


def package(filename: str) -> str:
    """Return the package or library of a file that the user did not write."""
    inside = filename.rpartition(f"{os.sep}site-packages{os.sep}")[2] or filename
    if filename.startswith(str(Path(__file__).parents[2]) + os.sep):
        return "workbench"
    if filename.startswith("<") or f"{os.sep}site-packages{os.sep}" not in filename:
        return "Python"
    return inside.partition(os.sep)[0].removesuffix(".py")


def where(filename: str, line: int, function: str, *, earlier: bool = False) -> str:
    """Return a place as text; `earlier`: its cell is not the one that runs."""
    inside = "" if function == "<module>" else f" in {function}"
    if is_cell(filename):
        return f"{'earlier cell, line' if earlier else 'cell line'} {line}{inside}"
    shown = filename
    if not filename.startswith("<"):
        here = os.getcwd() + os.sep
        shown = filename[len(here) :] if filename.startswith(here) else os.path.basename(filename)
    return f"{shown}:{line}{inside}"


MAX_CHARS = 200

_short = reprlib.Repr()
_short.maxstring = _short.maxother = MAX_CHARS
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 8


def describe(value: Any) -> str:
    """Return a value's type, shape and beginning; never raises."""
    try:
        shape = getattr(value, "shape", None)
        text = " ".join(_short.repr(value).split())[:MAX_CHARS]
        if isinstance(shape, tuple):
            kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
            sizes = ", ".join(map(str, shape))
            text = f"{type(value).__name__} ({sizes}) {kind}: {text}"
        return text
    except Exception as error:
        return f"<{type(value).__name__}, its repr raised {type(error).__name__}>"
