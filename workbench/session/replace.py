"""Engines whose framework cannot be used any more give way to fresh ones.

An engine says so itself, in the outcome of a cell (`errors.EngineSpentError`). Before anything was
trained the run then begins again on the fresh engines; otherwise they are there for the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ..cluster.engines import Engines
from ..errors import ClusterError
from ..members import ranges
from ..messages import Outcomes

WAIT_S = 60.0


def spent(outcomes: Outcomes) -> dict[int, str]:
    """Return the engines that must be replaced, and why."""
    return {i: o.evalue for i, o in outcomes.items() if o.replace}


def words(ids: Sequence[int], why: str) -> str:
    """Say what is done about spent engines."""
    reason = why.partition("\n")[0]
    if len(ids) == 1:
        return f"Engine {ids[0]} is replaced by a fresh one, its variables are gone: {reason}"
    return f"Engines {ranges(ids)} are replaced by fresh ones, their variables are gone: {reason}"


class Replacer:
    """Replaces engines in the background, one batch after the other.

    Callers hear of the end of a cell on the thread that hears the engines, which may not wait.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def begin(
        self,
        engines: Engines,
        ids: Sequence[int],
        framework: str,
        then: Callable[[ClusterError | None], None] = lambda error: None,
    ) -> None:
        """Replace engines by ones that have the framework; `then` hears how it went."""

        def replace(before: threading.Thread | None) -> None:
            if before is not None:
                before.join()
            error = None
            try:
                engines.restart(ids, framework)
            except ClusterError as failure:
                error = failure
            then(error)

        with self._lock:
            thread = threading.Thread(
                target=replace, args=(self._thread,), name="workbench-replace", daemon=True
            )
            self._thread = thread
            thread.start()

    def wait(self) -> None:
        """Wait until what was begun is done; called before engines are asked for anything else."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(WAIT_S)
