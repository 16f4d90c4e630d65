"""Several TensorFlow engines as processes of their own, without a notebook's kernel.

Importing TensorFlow takes seconds, so the same processes take all runs, and are forked from one
that has it imported, as engines are. What one engine posts is passed on to all, as the kernel does.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import queue
import sys
import threading
from typing import Any

import pytest
from tf_harness import Report

from workbench import catalog
from workbench.cluster.forkserver.preload import _tensorflow_began

TIMEOUT_S = 240
PRELOAD = [
    "tensorflow", "keras", "workbench.engine.tensorflow.support", "workbench.engine.training.fit",
    *sorted({entry.module.partition(":")[0] for entry in catalog.strategies("tensorflow")}),
]  # fmt: skip
"""What the process that engines are forked from imports; it never runs an operation."""


def _starter() -> Any:
    """Return what forks engines: this process if it may, else one that is there for it alone."""
    if "tensorflow" in sys.modules and not _tensorflow_began():
        return multiprocessing.get_context("fork")
    starter = multiprocessing.get_context("forkserver")
    starter.set_forkserver_preload(PRELOAD)
    return starter


class Workers:
    """`count` engines."""

    def __init__(self, count: int) -> None:
        self._patch = pytest.MonkeyPatch()
        if "TF_CPP_MIN_LOG_LEVEL" not in os.environ:
            self._patch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
        context = _starter()
        self._pipes, self._processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, count), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, strategy: str, cell: Any, **settings: Any) -> list[Report]:
        """Run a cell on all engines; of a list of cells, each its own.

        With `workers=1` each does so for itself; `carry` names what it finds of the last cell.
        `told` comes back. An engine that died brings back an error.

        Returns:
            What each engine brings back, by rank.
        """
        cells = cell if isinstance(cell, list) else [cell] * len(self._pipes)
        for pipe, each in zip(self._pipes, cells, strict=True):
            with contextlib.suppress(BrokenPipeError):
                pipe.send(("run", (strategy, each, settings)))
        reports: dict[int, Report] = {}
        while len(reports) < len(self._pipes):
            open_pipes = [p for rank, p in enumerate(self._pipes) if rank not in reports]
            ready = multiprocessing.connection.wait(open_pipes, TIMEOUT_S)
            assert ready, "an engine hangs"
            for pipe in ready:
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    kind, value = "done", Report(error="died")
                if kind == "done":
                    reports[self._pipes.index(pipe)] = value
                else:
                    for every in open_pipes:
                        with contextlib.suppress(BrokenPipeError):
                            every.send((kind, value))
        return [reports[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """End the processes."""
        self._patch.undo()
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.kill()  # TensorFlow swallows SIGTERM
            process.join()
            process.close()


def _serve(pipe: Any, rank: int, count: int) -> None:
    gc.freeze()  # as in an engine
    from tf_harness import run

    from workbench.engine.testing import CollectingLink

    todo: queue.Queue[Any] = queue.Queue()
    links: list[CollectingLink] = []

    def listen() -> None:
        while True:
            try:
                kind, value = pipe.recv()
            except EOFError:  # the tests' process has died
                os._exit(1)
            if kind == "post":
                links[-1].hear(value["topic"], value["rank"], value["value"])
            else:
                links.append(CollectingLink(post=lambda fields: pipe.send(("post", fields))))
                todo.put((value, links[-1]))

    threading.Thread(target=listen, daemon=True, name="listen").start()
    kept: dict[str, Any] = {}
    while True:
        (strategy, cell, settings), link = todo.get()
        workers = settings.pop("workers", count)
        carried = {name: kept[name] for name in settings.pop("carry", ())}
        settings["names"] = {**settings.get("names", {}), **carried}
        report = run(
            strategy, cell, workers, rank=rank if workers > 1 else 0, link=link, **settings
        )
        kept = report.names
        report.names = {name: report.names[name] for name in ("told",) if name in report.names}
        pipe.send(("done", report))
