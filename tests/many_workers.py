"""A notebook's session with many simulated workers, to test the panel's speed and widths."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fake_run import fake_snapshot

from workbench.cluster.hosts.settings import LaunchSettings
from workbench.cluster.vitals import EngineVitals
from workbench.shared.faults import parse_fault

DRAWN = 40
"""Snapshots of the run; they are shown one after the other, over and over."""


class FakeVitals:
    """Rows of engines that all train, new ones every second."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def rows(self, moment: int) -> list[EngineVitals]:
        return [
            EngineVitals(
                engine=rank, rank=rank, pid=40_000 + rank, host="here", device=f"cuda:{rank}",
                state="waiting" if rank % 5 == moment % 5 else "training",
                doing="waiting in all_reduce" if rank % 5 == moment % 5 else f"step {moment}",
                cpu_percent=50.0 + (rank * 7 + moment * 13) % 50, memory_bytes=10**9 + moment,
                gpu_percent=90.0, gpu_memory_bytes=3 * 10**9,
                log_line=f"rank {rank}: epoch {moment}, all is well",
            )
            for rank in range(self._workers)
        ]  # fmt: skip

    def watch(self, listener: Any) -> Any:
        ended = threading.Event()

        def main() -> None:
            for moment in itertools.count():
                listener(self.rows(moment))
                if ended.wait(1.0):
                    return

        threading.Thread(target=main, daemon=True).start()
        return ended.set


@dataclass(eq=False)
class FakeRun:
    """A running run with the parts of `Run` that the panel uses."""

    workers: int
    name: str = "many"
    number: int = 1
    state: str = "running"
    error: Exception | None = None
    is_over: bool = False
    task: Any = None
    folder: Path = Path("/nowhere")
    color: int = 1

    def __post_init__(self) -> None:
        self.engines, self.faults = tuple(range(self.workers)), ()
        self.plan = SimpleNamespace(
            strategy="mirrored",
            entry=SimpleNamespace(links=True),
            recipe=SimpleNamespace(digest="d"),
        )
        self._shots = [
            fake_snapshot(self.workers, 100 + 5 * i, name=self.name) for i in range(DRAWN)
        ]
        self._begun_s = time.monotonic()

    @property
    def history(self) -> Any:
        return SimpleNamespace(rests=False, totals=SimpleNamespace(steps=self.snapshot().step))

    def snapshot(self) -> Any:
        at = int((time.monotonic() - self._begun_s) * 5) % DRAWN
        shot = self._shots[at]
        if shot.state != self.state:
            self._shots[at] = shot = replace(shot, state=self.state)
        return shot

    def pause(self) -> None:
        self.state = "paused"

    def resume(self) -> None:
        self.state = "running"

    def stop(self) -> None:
        self.state, self.is_over = "stopped", True

    def inject(self, *faults: str) -> None:
        self.faults = tuple(parse_fault(text).text for text in faults)


class FakeCluster:
    """The parts of `Cluster` that the panel uses."""

    framework, devices_asked, is_busy = "torch", "auto", False
    launch = LaunchSettings()

    def __init__(self, workers: int, run: FakeRun) -> None:
        self.worker_ids, self.busy = list(range(workers)), run
        self.keeping = SimpleNamespace(kept=False)
        self.vitals = FakeVitals(workers)

    def lease(self, workers: int) -> Any:
        leases = tuple(SimpleNamespace(device="cpu", label="cpu") for _ in range(workers))
        return SimpleNamespace(leases=leases, words=["cpu"] * workers)

    def queue(self) -> Any:
        wire = {"items": [], "busy": False, "progress": 1.0, "remaining_s": None, "rough": False}
        return SimpleNamespace(to_wire=lambda: {**wire, "keep_going": False})


def install(workers: int) -> FakeRun:
    """Make the notebook's session show such a cluster and its run."""
    from workbench.execution.registry import runs
    from workbench.notebook.session import session

    run = FakeRun(workers)
    runs.add(run)  # type: ignore[arg-type]
    session.cluster = FakeCluster(workers, run)  # type: ignore[assignment]
    return run
