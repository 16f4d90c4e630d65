"""A simulated cluster for the queue: its runs end when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from workbench.cookbook.recipe import Recipe
from workbench.errors import RunError
from workbench.session.queue import Queue
from workbench.session.queue_state import Item
from workbench.shared.plan import Plan, make_plan

WAIT_S = 20


def plan_of(name: str, strategy: str = "mirrored") -> Plan:
    return make_plan(Recipe("wb.fit()"), strategy, workers=2, name=name)


def plans_of(names: str) -> list[Plan]:
    return [plan_of(name) for name in names]


def states(items: list[Item]) -> dict[str, str]:
    return {item.name: item.state for item in items}


class Run:
    """A run that ends when a test says so."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.name, self.state = plan, plan.name, "running"
        self.error: RunError | None = None
        self.over = threading.Event()
        self.step = 0

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    def snapshot(self) -> SimpleNamespace:
        return SimpleNamespace(step=self.step, total_steps=10, elapsed_s=self.step * 0.1)

    def end(self, state: str = "finished", error: RunError | None = None) -> None:
        self.state, self.error = state, error
        self.step = 10 if state == "finished" else self.step
        self.over.set()

    def stop(self) -> None:
        self.end("stopped")


class Cluster:
    """Starts fake runs; `behave(run)` may end them at once."""

    def __init__(self, behave: Callable[[Run], None] = lambda run: None) -> None:
        self.started: list[Run] = []
        self.behave = behave
        self.framework, self.worker_ids = "torch", [0, 1]
        self.refuse: Callable[[Plan], None] = lambda plan: None
        self.began = threading.Semaphore(0)

    @property
    def is_busy(self) -> bool:
        return any(not run.is_over for run in self.started)

    def start(self, plan: Plan, **_: Any) -> Run:
        self.refuse(plan)
        assert not self.is_busy
        run = Run(plan)
        self.started.append(run)
        self.behave(run)
        self.began.release()
        return run

    def next(self) -> Run:
        assert self.began.acquire(timeout=WAIT_S)
        return self.started[-1]


def finish(run: Run) -> None:
    run.end()


def queue_on(cluster: Cluster, **more: Any) -> Queue:
    return Queue(cluster, **more)  # type: ignore[arg-type]
