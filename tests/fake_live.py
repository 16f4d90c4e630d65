"""A made-up run, shown live in a notebook while its cell blocks."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from fake_run import fake_pipeline, fake_snapshot

from workbench.views.live.live import WidgetView


def play(
    workers: int = 4,
    *,
    total: int = 10_000,
    limit_s: float = 60.0,
    period_s: float = 0.2,
    block: bool = True,
    pipeline: bool = False,
    **options: Any,
) -> list[str]:
    """Show steps until Stop is pressed or `limit_s` is over; return the commands received.

    With `block` the cell waits for the end, otherwise the run continues in the background.
    """
    received: list[str] = []
    stop, paused = threading.Event(), threading.Event()

    def on_command(name: str, fields: dict[str, Any]) -> None:
        received.append(name)
        if name == "pause":
            paused.set()
        if name == "resume":
            paused.clear()
        if name == "stop":
            stop.set()

    view = WidgetView("base", on_command)
    make = fake_pipeline if pipeline else fake_snapshot
    step, began_s = 60, time.monotonic()
    state = "running"
    view.begin(make(workers, step, total=total, **options))

    def draw() -> None:
        nonlocal step
        while not stop.wait(period_s) and time.monotonic() - began_s < limit_s:
            step += 0 if paused.is_set() else 2
            now = "paused" if paused.is_set() else state
            view.update(make(workers, min(step, 1999), total=total, state=now, **options))

    def watch() -> None:
        draw()
        final = "stopped" if stop.is_set() else "finished"
        last = make(workers, min(step, 1999), total=total, **options)
        view.end(replace(last, state=final))

    timer = threading.Thread(target=watch)
    timer.start()
    if block:
        timer.join()
    return received
