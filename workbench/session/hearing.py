"""Whose the engines' messages are: the runs of a cluster, by the number that messages name."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

from ..messages import Happened, Position, Records
from .run import Run


class Hearing:
    """Gives runs their numbers, and messages to the runs that they name.

    Attributes:
        folders: Of all runs that the cluster has had, by number.
    """

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}  # those that are heard
        self.folders: dict[int, Path] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def number(self) -> int:
        """Return a number that no other run of the cluster had."""
        return next(self._numbers)

    def count_from(self, first: int) -> None:
        """Give numbers from `first` on: another kernel has given those before."""
        self._numbers = itertools.count(first)

    def add(self, run: Run) -> None:
        """Have messages that name the run's number reach it.

        Those that are over are let go of, but the last one: its last words may still be on the way.
        """
        with self._lock:
            last = list(self._runs)[-1:]
            self._runs = {n: r for n, r in self._runs.items() if n in last or not r.is_over}
            self._runs[run.number] = run
            self.folders[run.number] = run.folder

    def renumber(self, run: Run) -> int:
        """Give a run that is begun again another number: nothing of before reaches it then."""
        number = self.number()
        with self._lock:
            self._runs.pop(run.number, None)
            self.folders.pop(run.number, None)
            self._runs[number], self.folders[number] = run, run.folder
        return number

    def receive(self, message: Records | Happened | Position) -> None:
        """Hand a message to the run it names; one of a run that is not heard is dropped."""
        run = self._runs.get(message.run)
        if run is not None:
            run.receive(message)
