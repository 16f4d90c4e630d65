"""The post-mortem of a failed rank: its frames, their variables, pdb's commands on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..cluster.engines import Engines
from ..errors import RunError
from .task import Task

EXAMINE = "workbench.engine.entry:examine"
INTERRUPT_S = 5.0


@dataclass(frozen=True)
class Frame:
    """One frame of the failed rank, outermost first.

    Attributes:
        index: What `PostMortem.eval` takes.
        where: `cell line 7 in step`, `train.py:41 in load`.
        source: The line.
        yours: Whether the user wrote it, rather than a library.
        variables: The beginning of each variable's repr, by name.
    """

    index: int
    file: str
    line: int
    function: str
    where: str
    source: str
    yours: bool
    variables: Mapping[str, str]


class PostMortem:
    """The frames of the cell that failed last on one rank; gone when the next cell begins.

    Attributes:
        error: What the rank failed with.
        frames: Outermost first.
        current: Index of the user's innermost frame, where commands begin.

    Raises:
        RunError: Nothing is kept there.
    """

    def __init__(self, engines: Engines, engine: int) -> None:
        self._engines, self.engine = engines, engine
        found = self._call("frames")
        if not found:
            raise RunError(
                f"Rank {engine} keeps no failure to look at.",
                allowed="a rank whose last cell raised; interrupted ones keep nothing, and the "
                "next cell and %cluster free drop it",
                next_step="%cluster debug without a number opens the rank that failed first",
                code="WB-RUN-076",
            )
        self.error = str(found["error"])
        self.current = int(found["current"])
        self.frames = [Frame(**frame) for frame in found["frames"]]

    def eval(self, frame: int | Frame, expression: str) -> str:
        """Evaluate an expression in a frame, on the engine; return its repr.

        Raises:
            RunError: It raised, or there is no such frame.
        """
        index = frame.index if isinstance(frame, Frame) else frame
        found = self._call("evaluate", index, expression)
        if "error" in found:
            raise RunError(
                f"{expression} on rank {self.engine}: {found['error']}", code="WB-RUN-077"
            )
        return str(found["value"])

    def command(self, line: str) -> str:
        """Obey a command of pdb (w u d l p pp a locals, or any expression); return its words.

        Raises:
            RunError: The failure is not kept any more.
        """
        text = self._call("command", line)
        if text is None:
            raise RunError(
                f"Rank {self.engine} keeps its failure no more: a cell has run since.",
                code="WB-RUN-078",
            )
        return str(text)

    def _call(self, name: str, *args: Any) -> Any:
        call = self._engines.submit(self.engine, EXAMINE, (name, *args))
        try:
            while not call.done.wait(0.1):
                pass
        except KeyboardInterrupt:  # it is the expression that is interrupted
            self._engines.interrupt([self.engine])
            if not call.done.wait(INTERRUPT_S):
                raise
        if isinstance(call.result, BaseException):
            raise RunError(
                f"Rank {self.engine} did not answer.", seen=str(call.result), code="WB-RUN-079"
            )
        return call.result

    def __repr__(self) -> str:
        lines = [f"rank {self.engine}: {self.error}"]
        for frame in self.frames:
            mark = ">" if frame.index == self.current else " "
            lines.append(f"{mark} {frame.index}  {frame.where}: {frame.source}")
        here = self.frames[self.current]
        lines += [f"     {name} = {text}" for name, text in here.variables.items()]
        return "\n".join(lines)


def failed_engine(task: Task | None) -> int:
    """Return the engine whose failure is the reason for a cell's.

    Raises:
        RunError: The last cell did not fail.
    """
    cause = None if task is None else task.cause
    if cause is None:
        raise RunError(
            "Nothing to debug: the last cell has not failed, and no rank is paused.",
            next_step="put breakpoint() into a cell, or name a rank: %cluster debug 1 --port 5678",
            code="WB-RUN-080",
        )
    return cause


def converse(found: PostMortem, read: Callable[[str], str], write: Callable[[str], object]) -> None:
    """Read commands until `q`."""
    write(f"{found!r}\n(w u d l p pp a locals, or any expression; q ends)\n")
    while True:
        try:
            line = read(f"rank {found.engine} post-mortem> ")
        except EOFError:
            return
        if line.strip() in ("q", "quit", "exit", "leave"):
            return
        write(found.command(line))
