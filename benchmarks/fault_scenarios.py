"""Parts of the fault scenarios: a registry, and the cluster that they share."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import workbench as wb

WAIT_S = 60


@dataclass(frozen=True)
class Scenario:
    """One row of the table.

    Attributes:
        provoke: Provokes the fault once on a stage; returns the measured seconds.
        fault: What happens, in words.
        promise_s: How long it may take.
        command: What a user types to see it.
        most: Largest useful number of repeats, for faults that cost a cluster each time.
    """

    name: str
    provoke: Callable[[Stage], float]
    fault: str
    promise_s: float
    command: str = ""
    most: int = 1000


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    fault: str, promise_s: float, *, command: str = "", most: int = 1000
) -> Callable[[Callable[[Stage], float]], Callable[[Stage], float]]:
    """Add a function to the table, under its own name."""

    def add(provoke: Callable[[Stage], float]) -> Callable[[Stage], float]:
        name = provoke.__name__
        SCENARIOS[name] = Scenario(name, provoke, fault, promise_s, command, most)
        return provoke

    return add


class Stage:
    """Clusters that scenarios share, by size and framework; started when first asked for."""

    def __init__(self) -> None:
        self._cluster: wb.Cluster | None = None
        self._kind: tuple[int, str] = (0, "")
        self.folder = Path(tempfile.mkdtemp(prefix="wb-faults-"))

    def cluster(self, engines: int = 4, framework: str = "torch") -> wb.Cluster:
        """Return a cluster whose engines all live; a damaged one is replaced."""
        alive = self._cluster is not None and len(self._cluster.worker_ids) >= engines
        if not alive or self._kind != (engines, framework):
            self.close()
            self._cluster = wb.Cluster(engines, framework=framework)
            self._kind = (engines, framework)
        assert self._cluster is not None
        return self._cluster

    def close(self) -> None:
        """Stop the cluster."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()

    def stamp(self) -> Stamp:
        """Return a fresh file into which an engine writes a time."""
        return Stamp(Path(tempfile.mkstemp(dir=self.folder)[1]))


class Stamp:
    """A time in an engine that this process can use: both read this host's monotonic clock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.unlink()
        # Renamed into place, so that nobody reads half of it.
        self.code = (
            f"import os, time, pathlib; pathlib.Path('{path}.part').write_text("
            f"repr(time.perf_counter())); os.rename('{path}.part', '{path}')"
        )
        """Source of a statement that writes it."""

    @property
    def written(self) -> bool:
        return self._path.exists()

    @property
    def at_s(self) -> float:
        return float(self._path.read_text())


def soon(condition: Callable[[], Any], timeout_s: float = WAIT_S) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: The condition was not true within `timeout_s`.
    """
    end, pause = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not so within {timeout_s:g} s")
        pause.wait(0.002)
