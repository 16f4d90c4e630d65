"""A notebook in this process: an IPython shell whose cells can be run and looked at."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

WAIT_S = 30


@dataclass
class Cell:
    """The outcome of a cell."""

    stdout: str
    stderr: str
    error: BaseException | None
    seconds: float
    displays: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text below the cell."""
        plain = [str(data.get("text/plain", "")) for data in self.displays]
        return "\n".join([self.stdout, self.stderr, *plain])

    def lines(self) -> list[str]:
        return [line for line in self.stdout.splitlines() if line]


class Notebook:
    """Runs cells as a notebook would."""

    def __init__(self) -> None:
        self.shell = InteractiveShell.instance()
        self.namespace = self.shell.user_ns

    def run(self, source: str) -> Cell:
        """Run a cell; its error is returned, not raised."""
        before = time.perf_counter()
        with capture_output() as captured:
            result = self.shell.run_cell(source, store_history=True)
        return Cell(
            captured.stdout,
            captured.stderr,
            result.error_before_exec or result.error_in_exec,
            time.perf_counter() - before,
            [output.data for output in captured.outputs],
        )

    def ok(self, source: str) -> Cell:
        """Run a cell that must not fail."""
        cell = self.run(source)
        assert cell.error is None, cell.text
        return cell

    def refused(self, source: str, *words: str) -> Cell:
        """Run a cell that must fail with a message that holds all the words."""
        cell = self.run(source)
        assert cell.error is not None, f"went through: {cell.text}"
        for word in words:
            assert word in str(cell.error), f"{word!r} is not in: {cell.error}"
        return cell

    def __getitem__(self, name: str) -> Any:
        return self.namespace[name]


@contextlib.contextmanager
def notebook(engines: int = 0, *, fresh: bool = False):
    """A notebook with the extension loaded and, maybe, a cluster; leaves no engine.

    Args:
        fresh: Whether its cluster starts without kept parts, and nothing of it is kept (`lending`).
    """
    import lending

    from workbench.execution import registry
    from workbench.notebook.session import session

    registry.runs.clear()  # of notebooks before this one
    session.reset()
    book = Notebook()
    if "workbench" in book.shell.extension_manager.loaded:
        book.ok("%unload_ext workbench")
    if not fresh:
        session.prepared = lending.take()
    book.ok("%load_ext workbench\nimport workbench as wb")
    try:
        if engines:
            book.ok(f"%cluster start {engines}")
        yield book
    finally:
        if not fresh:
            cluster, session.cluster = session.cluster, None
            prepared, session.prepared = session.prepared, None
            if cluster is not None:
                lending.take_back(cluster)
            if prepared is not None:
                lending.give(prepared)
        session.stop()


def soon(condition, timeout_s: float = WAIT_S) -> bool:
    """Whether a condition comes true in time."""
    end = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > end:
            return False
        pause.wait(0.01)
    return True


def interrupt_main_thread() -> None:
    """Do what the notebook's interrupt button does."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
