"""`%cluster logs` and `%cluster stacks`: an engine's log, and the stacks of its threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..execution.workers.hangs import ANSWER_S, place_words
from ..shared.messages import AskStacks, Whereabouts

if TYPE_CHECKING:
    from .access import ClusterAccess

LINES = 40
POLL_S = 0.2


class Tail:
    """Reads new lines of a file; a file that was replaced or cut is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = self._at = 0
        self._rest = b""

    def last(self, lines: int) -> list[str]:
        """Return the last lines; later lines count as new."""
        found = self.new()
        return found[-lines:] if lines else []

    def new(self, *, final: bool = False) -> list[str]:
        """Return the complete lines that were added; the incomplete one as well when `final`."""
        try:
            with self.path.open("rb") as file:
                status = self.path.stat()
                if status.st_ino != self._inode or status.st_size < self._at:
                    self._inode, self._at, self._rest = status.st_ino, 0, b""
                file.seek(self._at)
                data = file.read()
        except OSError:
            data = b""
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if final and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        return [line.decode(errors="replace") for line in lines]


def show(tails: Mapping[int, Tail], lines: int, write: Callable[[str], object]) -> None:
    """Write the last lines of each log."""
    for engine, tail in tails.items():
        write(f"--- engine {engine}\n")
        found = tail.last(lines)
        write("".join(f"{line}\n" for line in found))


def follow(
    tails: Mapping[int, Tail],
    alive: Callable[[int], bool],
    write: Callable[[str], object],
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Write new lines as they appear, until an interrupt or until all engines have ended."""
    named = len(tails) > 1
    left = dict(tails)
    try:
        while left:
            living = {engine: alive(engine) for engine in left}  # before its last words are read
            for engine, tail in list(left.items()):
                prefix = f"[{engine}] " if named else ""
                lines = tail.new(final=not living[engine])
                if lines:
                    write("".join(f"{prefix}{line}\n" for line in lines))
                if not living[engine]:
                    write(f"--- engine {engine} has ended\n")
                    del left[engine]
            if left:
                wait(POLL_S)
    except KeyboardInterrupt:
        write("--- interrupted: no more lines of the logs are shown\n")


def logs(
    cluster: ClusterAccess,
    ranks: tuple[int, ...],
    lines: int | None,
    write: Callable[[str], object],
    *,
    following: bool = False,
) -> None:
    """Carry out a `%cluster logs` line.

    Raises:
        ClusterError: There is no engine with this id.
    """
    tails = {e: Tail(cluster.engine_set.log_path(e)) for e in ranks or cluster.ids}
    show(tails, LINES if lines is None else lines, write)
    if following:
        follow(tails, lambda engine: engine in cluster.ids, write)


@dataclass(frozen=True)
class Stack:
    """One engine's threads.

    Attributes:
        name: `rank 1 (engine 1, pid 2600)`.
        place: The place in the code where its main thread is, and the call in which it waits.
        text: The stacks of its threads, the main thread first. Lines of the user's code begin with
            `>`. Empty if the engine did not answer.
    """

    engine: int
    name: str
    place: str
    text: str


class Stacks(tuple[Stack, ...]):
    """The engines' stacks, shown as text; a notebook shows one fold for each engine."""

    def __repr__(self) -> str:
        return "\n\n".join(
            f"--- {one.name}: {one.place}" + (f"\n{one.text}" if one.text else "") for one in self
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        style = "margin:0;padding:1px 4px;white-space:pre-wrap"
        blocks = (
            f"<details><summary>{escape(one.name)}: {escape(one.place)}</summary>"
            f'<pre style="{style}">{escape(one.text or "no answer")}</pre></details>'
            for one in self
        )
        return {"text/html": "".join(blocks), "text/plain": repr(self)}


def gather(cluster: ClusterAccess, ids: Iterable[int] | None = None) -> Stacks:
    """Ask engines for their stacks; also works during a cell or a run.

    Args:
        ids: The ids of the engines; by default all living engines.

    Raises:
        ClusterError: There is no engine with this id.
    """
    engines = cluster.engine_set
    wanted = [engines.known(i).id for i in ids] if ids is not None else cluster.ids
    living = [i for i in wanted if i in cluster.ids]
    found = engines.router.questions.ask(AskStacks, living, ANSWER_S)
    workers = cluster.worker_ids
    return Stacks(
        Stack(
            i,
            f"{f'rank {workers.index(i)}' if i in workers else 'server'} "
            f"(engine {i}, pid {engines.engines[i].pid})",
            _words(found.get(i)) if i in living else f"dead ({engines.engines[i].exit})",
            found[i].text if i in found else "",
        )
        for i in wanted
    )


def _words(answer: Whereabouts | None) -> str:
    words = place_words(answer)
    if answer is None or not answer.waits_in:
        return words
    return f"{words}; waits {answer.waits_in}"
