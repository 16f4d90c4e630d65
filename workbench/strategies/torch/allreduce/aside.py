"""A thread that does nothing but exchange messages, while the training thread waits for it.

The training thread computes all the time; when its message arrives, a busy machine makes it wait
for its next turn, which takes milliseconds, in every round of every all-reduce. A thread that
sleeps most of the time is let in at once. With more workers than cores, which is how one learns
on a laptop, this decides how long a small all-reduce takes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ....engine.marks import ALL_REDUCE, waits_in
from ....engine.torch_group import shutdown_group_sockets

PATIENCE_S = 1.0


class Aside:
    """Runs tasks one after the other on a thread of its own, started at the first one."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @waits_in(ALL_REDUCE)
    def run(self, task: Callable[[], None]) -> None:
        """Run a task there; return when it is done, and raise what it raised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="workbench-links", daemon=True)
            self._thread.start()
        self._tasks.put(task)
        error = self._done.get()
        if error is not None:
            raise error

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            error: BaseException | None = None
            try:
                task()
            except BaseException as caught:
                error = caught
            self._done.put(error)
            del task, error

    @waits_in(ALL_REDUCE)
    def close(self) -> None:
        """End the thread; one that an interrupt left in the middle of a message is broken out."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._tasks.put(None)
        thread.join(PATIENCE_S)
        if thread.is_alive():
            shutdown_group_sockets()
            thread.join(PATIENCE_S)
