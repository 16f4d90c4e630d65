"""`%cluster debug`: a paused rank, a failed one, or debugpy for VS Code.

A failed rank keeps its frames with their variables, and pdb's commands work on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError, RunError
from ..execution.paused import Paused, Prompt, can_prompt, write_out
from ..shared.messages import Served
from ..views.blocks import show

if TYPE_CHECKING:
    from ..cluster.engines import Engines
    from ..execution.task import Task
    from ..shared.magic_args import ClusterLine
    from .access import ClusterAccess

SERVE = "workbench.engine.debugging.stdin_bridge:serve"


def debug(cluster: ClusterAccess, asked: ClusterLine) -> None:
    """Carry out a `%cluster debug` line."""
    if asked.port is not None:
        for offset, rank in enumerate(asked.ranks or cluster.worker_ids[:1]):
            port = asked.port + offset if asked.port else 0
            write_out(serve(cluster, rank, port) + "\n")
        return
    paused = cluster.paused
    engine = asked.ranks[0] if asked.ranks else next(iter(paused.stops), None)
    if engine is not None and (engine in paused.stops or cluster.is_busy):
        check_living(cluster, engine)
        if engine in paused.stops or paused.inquire(engine) is not None:
            _paused(paused, engine, asked.commands)
            return
    found = post_mortem(cluster, engine)
    if asked.commands:
        for line in asked.commands:
            write_out(found.command(line))
    elif can_prompt():
        converse(found, input, write_out)
    else:
        show(found)


def post_mortem(cluster: ClusterAccess, engine: int | None) -> PostMortem:
    """Return the post-mortem of a rank, by default of the rank that failed first.

    Raises:
        RunError: The rank has not failed, or a cell is active.
        ClusterError: The engine has ended.
    """
    cluster.claim()
    if engine is None:
        engine = failed_engine(cluster.last_task)
    check_living(cluster, engine)
    return PostMortem(cluster.engine_set, engine)


def check_living(cluster: ClusterAccess, engine: int) -> None:
    """Raise ClusterError if an engine is dead or does not exist."""
    info = cluster.engine_set.known(engine)
    if info.state == "dead":
        raise ClusterError(
            f"Engine {engine} has ended ({info.exit}), so it cannot be debugged.",
            allowed=f"engines that still run: {', '.join(map(str, cluster.ids)) or 'none'}",
            next_step=f"%cluster logs {engine} shows the engine's last output",
            code="WB-CLUSTER-037",
        )


def _paused(paused: Paused, engine: int, commands: Sequence[str]) -> None:
    if commands:
        for line in commands:
            write_out(paused.tell(engine, line).text)
    elif can_prompt():
        Prompt(paused).converse(engine)
    else:
        stop = paused.stops[engine]
        write_out(
            f"engine {engine} is paused at {stop.where}\n{stop.text}"
            "This notebook's front end cannot ask for input. Give the debugger's commands with -c: "
            f"%cluster debug {engine} -c 'p x' -c c\n"
        )


def serve(cluster: ClusterAccess, engine: int, port: int) -> str:
    """Have debugpy listen in an engine; return how to attach.

    Raises:
        ClusterError: debugpy is missing there, or the port is taken.
    """
    check_living(cluster, engine)
    if cluster.is_busy:
        found = cluster.paused.serve(engine, port)
    else:
        answer = cluster.engine_set.call([engine], SERVE, (port,))[engine]
        found = Served(engine=engine, **answer)
    if found.missing is not None:
        raise ClusterError(
            "debugpy is not installed in the Python of this engine.",
            seen=found.missing,
            next_step="pip install 'distributed-workbench[debug]', then %cluster restart",
            code="WB-CLUSTER-038",
        )
    if found.port is None:
        raise ClusterError(
            f"debugpy cannot listen on 127.0.0.1:{port}.",
            seen=found.taken,
            allowed="a free port; 0 chooses any free port",
            next_step=f"%cluster debug {engine} --port {port + 1 if port else 0}",
            code="WB-CLUSTER-039",
        )
    host = cluster.engine_set.known(engine).host
    return attach_words(engine, found.port, host, before=found.before)


def attach_words(engine: int, port: int, host: str, *, before: bool) -> str:
    """Return how to attach VS Code to an engine."""
    entry = {
        "name": f"Workbench rank {engine}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": port},
        "justMyCode": False,
    }
    state = "already listens" if before else "listens"
    return (
        f"engine {engine}: debugpy {state} on 127.0.0.1:{port} of {host}, until the engine ends.\n"
        f"For VS Code, write this into launch.json:\n{json.dumps(entry, indent=2)}\n"
        "If VS Code runs on another machine, first run there: "
        f"ssh -L {port}:127.0.0.1:{port} {host}\n"
        "While VS Code is attached, breakpoint() stops in VS Code. debugpy needs no password: "
        f"anyone who has an account on {host} can attach."
    )


EXAMINE = "workbench.engine.entry:examine"
INTERRUPT_S = 5.0


@dataclass(frozen=True)
class Frame:
    """One frame of the failed rank, outermost first.

    Attributes:
        index: The number that `PostMortem.eval` takes.
        where: Its place in the code: `cell line 7 in step`, `train.py:41 in load`.
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
    """The frames of the last failed cell on one rank. They are dropped when the next cell begins.

    Attributes:
        error: The error of the rank.
        frames: The frames, outermost first.
        current: Index of the user's innermost frame, where commands begin.

    Raises:
        RunError: The rank has no stored frames.
    """

    def __init__(self, engines: Engines, engine: int) -> None:
        self._engines, self.engine = engines, engine
        found = self._call("frames")
        if not found:
            raise RunError(
                f"Engine {engine} has no traceback to inspect.",
                allowed="an engine on which the last cell raised an error. An interrupt leaves no "
                "traceback. The next cell or %cluster free deletes the traceback",
                next_step="%cluster debug without a number opens the debugger for the engine that "
                "failed first",
                code="WB-RUN-076",
            )
        self.error = str(found["error"])
        self.current = int(found["current"])
        self.frames = [Frame(**frame) for frame in found["frames"]]

    def eval(self, frame: int | Frame, expression: str) -> str:
        """Evaluate an expression in a frame, on the engine; return its repr.

        Raises:
            RunError: The expression raised an error, or the frame does not exist.
        """
        index = frame.index if isinstance(frame, Frame) else frame
        found = self._call("evaluate", index, expression)
        if "error" in found:
            raise RunError(
                f"{expression} on engine {self.engine}: {found['error']}", code="WB-RUN-077"
            )
        return str(found["value"])

    def command(self, line: str) -> str:
        """Run a pdb command (w u d l p pp a locals, or any expression); return its output.

        Raises:
            RunError: The failure is no longer stored.
        """
        text = self._call("command", line)
        if text is None:
            raise RunError(
                f"The traceback of engine {self.engine} was deleted, because another cell or "
                "%cluster free ran after the failure.",
                next_step="first run the failed cell again, then run %cluster debug",
                code="WB-RUN-078",
            )
        return str(text)

    def _call(self, name: str, *args: Any) -> Any:
        call = self._engines.submit(self.engine, EXAMINE, (name, *args))
        try:
            while not call.done.wait(0.1):
                pass
        except KeyboardInterrupt:  # the interrupt ends the expression only
            self._engines.interrupt([self.engine])
            if not call.done.wait(INTERRUPT_S):
                raise
        if isinstance(call.result, BaseException):
            raise RunError(
                f"Engine {self.engine} did not answer.",
                seen=str(call.result),
                next_step="%cluster shows whether this engine still runs",
                code="WB-RUN-079",
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
    """Return the engine whose failure made the cell fail.

    Raises:
        RunError: The last cell did not fail.
    """
    cause = None if task is None else task.cause
    if cause is None:
        raise RunError(
            "There is nothing to debug: the last cell did not fail, and no rank is paused.",
            next_step="add breakpoint() to a cell, or use debugpy: %cluster debug 1 --port 5678",
            code="WB-RUN-080",
        )
    return cause


def converse(found: PostMortem, read: Callable[[str], str], write: Callable[[str], object]) -> None:
    """Read commands until `q`."""
    write(
        f"{found!r}\n(commands: w, u, d, l, p, pp, a, locals, or any expression; `q` ends this "
        "prompt)\n"
    )
    while True:
        try:
            line = read(f"rank {found.engine} post-mortem> ")
        except EOFError:
            return
        if line.strip() in ("q", "quit", "exit", "leave"):
            return
        write(found.command(line))
