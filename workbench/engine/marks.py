"""What functions say of themselves to whoever reads a stack: that they wait, where a cell begins.

A mark stands at the function, so that it moves and is renamed with it. The decorators note the
function's code and give the function back as it is: a call costs nothing more.

    @waits_in(MESSAGE)           frames of it, and whatever is called from it, are a wait
    @begins_cell                 everything below is the cell, but for machinery
    machinery(__name__)          frames of this module say nothing to a user
    @doing("leaving ...")        what the engine does where no line of the user's is on the stack
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any, Literal, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rule:
    """A kind of wait: what it is called, and which frames mean it besides the marked ones.

    Attributes:
        label: What it is called; `{}` is the function.
        idle: Whose standing still it takes, for frames in which others compute.
        outermost: Take the outermost of the frames that fit: the one that was called.
        by_user: The user said so (a pause): nobody waits for others.
        modules: Modules of other libraries, and what is below them.
        function: Of those modules this function alone.
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
BOARD = Rule("to meet the other engines")
ALL_REDUCE = Rule("in all_reduce", idle="thread")
RECEIVE = Rule("in recv", idle="thread", modules=("torch.distributed.pipelining",))
MESSAGE = Rule("for a message of another worker")
ANSWER = Rule("for an answer of a server", idle="thread")
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
"""Where frames mean several waits, the first of these is said."""

_SHELL = ("IPython.core", "ipykernel")
_waits: dict[CodeType, Rule] = {}
_doing: dict[CodeType, str] = {}
_begins: set[CodeType] = set()
_machinery: set[str] = set()


def waits_in(rule: Rule) -> Callable[[Function], Function]:
    """Mark a function in which a thread blocks until others come: itself, or in what it calls."""

    def mark(function: Function) -> Function:
        _waits[_code(function)] = rule
        return function

    return mark


def doing(words: str) -> Callable[[Function], Function]:
    """Mark a function by what the engine does in it, around the cell."""

    def mark(function: Function) -> Function:
        _doing[_code(function)] = words
        return function

    return mark


def begins_cell(function: Function) -> Function:
    """Mark the function that runs a cell."""
    _begins.add(_code(function))
    return function


def machinery(module: str) -> None:
    """Have a module's frames left out between the beginning of a cell and the cell's own."""
    _machinery.add(module)


def wait_of(function: Callable[..., Any]) -> Rule | None:
    """Return the wait that a function is marked with."""
    return _waits.get(_code(function))


def is_beginning(frame: FrameType) -> bool:
    """Whether a cell begins below this frame."""
    return frame.f_code in _begins


def is_machinery(frame: FrameType) -> bool:
    """Whether the frame says nothing to a user."""
    return frame.f_globals.get("__name__") in _machinery or _is_of(frame, _SHELL)


def done_in(frame: FrameType) -> str:
    """Return what the engine does in this frame; empty where it is not marked."""
    return _doing.get(frame.f_code, "")


def _is_of(frame: FrameType, modules: tuple[str, ...]) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _code(function: Callable[..., Any]) -> CodeType:
    """Return a function's own code; a wrapper's would stand for everything that it wraps."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        raise TypeError(f"{function!r} is no plain function: the mark belongs below its wrappers")
    return function.__code__
