"""A cell or a run that another notebook began, followed through what its engines write.

Rows, events and outputs are read from disk from the beginning, so none is lost and none comes
twice, whoever was there to hear them meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import lifecycle
from ..cluster import kept
from ..cluster.calls import Call
from ..cluster.engines import Engines
from ..errors import RunError
from ..history.tail import Tail
from ..members import Member
from ..protocol import Message
from ..scratch import last_page
from .run import Run
from .task import OnLoss, Task

LOOK_S = 0.15
BEGIN_S = 10.0
"""How long a call that was sent to an engine may take to begin there."""
FINISHED = frozenset({"finished", "stopped", "failed"})


class FollowedRun(Run):
    """A run whose history comes from its folder; its engines' messages only steer it."""

    def __init__(self, **about: Any) -> None:
        super().__init__(**about)
        self._tail = Tail(self.folder)
        self._reading = threading.Lock()

    def receive(self, message: Message) -> None:
        """Take a message of this run; what is on disk as well is taken from there."""
        if message.kind == "event":
            body = message.body
            on_disk = int(body.get("rank", 0)) < len(self.engines)
            if not on_disk:
                super().receive(message)
        elif message.kind != "records":
            super().receive(message)

    def catch_up(self) -> None:
        """Take in what engines have written since the last time."""
        with self._reading:
            for name, fields in self._tail.events():
                with contextlib.suppress(KeyError, lifecycle.InvalidTransitionError):
                    self._event(name, fields)
            for rows in self._tail.rows():
                self.history.append(rows)
                if self.task is not None:
                    self.task.moved()

    def finish(self, error: RunError | None) -> None:
        """Settle the run, all of it being read."""
        try:
            self.catch_up()
        except Exception as trouble:  # it is over, whatever cannot be read of it
            self.note(f"Not all of this run could be read: {type(trouble).__name__}: {trouble}")
        finally:
            super().finish(error)


class FollowedTask(Task):
    """A cell that was begun by another kernel.

    Args:
        calls: What stands for the engines' parts, in the order of the ranks.
    """

    def __init__(
        self,
        engines: Engines,
        calls: Mapping[int, Call],
        members: Mapping[int, Member],
        on_done: Callable[[Task], None] = lambda task: None,
        spare: Iterable[int] = (),
        on_loss: OnLoss = lambda text, engines: None,
    ) -> None:
        self._calls = calls
        super().__init__(engines, {i: {} for i in calls}, members, on_done, spare, on_loss)

    def _submit(self, engine: int, request: Mapping[str, Any]) -> Call:
        return self._calls[engine]


class Follower:
    """Reads what the engines of one task write, on a thread of its own, until all have ended.

    Args:
        folder: The cluster's.
        record: What the last owner wrote about the task (`keeping.task_record`).
    """

    def __init__(self, folder: Path, record: Mapping[str, Any], engines: Engines) -> None:
        self._folder = folder
        self._ids = {int(engine): str(call) for engine, call in record["calls"].items()}
        self.calls = {engine: engines.expect(engine) for engine in self._ids}
        self._outputs = {engine: _Outputs(folder, engine) for engine in self._ids}
        self._began = time.monotonic()

    def follow(self, task: Task, run: FollowedRun | None) -> None:
        """Begin; `task` is told of outputs and ends, `run` of rows and events."""
        threading.Thread(
            target=self._main, args=(task, run), name="workbench-attached", daemon=True
        ).start()

    def _main(self, task: Task, run: FollowedRun | None) -> None:
        while not all(call.done.is_set() for call in self.calls.values()):
            ended = dict(self._ended())  # first: what they printed before is then on disk
            self._read(task, run)
            for engine, outcome in ended.items():
                self.calls[engine].finish(outcome)
            time.sleep(0 if ended else LOOK_S)

    def _read(self, task: Task, run: FollowedRun | None) -> None:
        for engine, outputs in self._outputs.items():
            if self._page(engine).get("call") == self._ids[engine]:
                for kind, content in outputs.fresh():
                    task._output(engine, kind, content)
        if run is not None:
            run.catch_up()

    def _page(self, engine: int) -> Mapping[str, Any]:
        page = last_page(self._folder / kept.DOING / f"engine-{engine}.jsonl")
        return page if isinstance(page, dict) else {}

    def _ended(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for engine, call in self.calls.items():
            if call.done.is_set():
                continue
            page = self._page(engine)
            if page.get("call") == self._ids[engine]:
                if not page.get("busy") and isinstance(page.get("outcome"), dict):
                    yield engine, page["outcome"]
            elif time.monotonic() - self._began > BEGIN_S:
                why = "its notebook was gone before this engine was asked to begin"
                yield engine, {"status": "error", "ename": "RunError", "evalue": why}


class _Outputs:
    """What one engine's call has printed: segments, of which some in the middle may be missing."""

    def __init__(self, folder: Path, engine: int) -> None:
        self._folder, self._engine = folder / kept.DOING, engine
        self._segment, self._at = 0, 0

    def fresh(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield what was added since the last time, as kind and content."""
        paths = sorted(self._folder.glob(f"out-{self._engine}-*.jsonl"))
        for path in paths:
            number = int(path.stem.rpartition("-")[2])
            if number < self._segment:
                continue
            if number > self._segment:
                if number > self._segment + 1:
                    text = "[... output that nobody read was left out ...]\n"
                    yield "stream", {"name": "stderr", "text": text}
                self._segment, self._at = number, 0
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(self._at)
                packed = file.read()
                whole = packed.rfind(b"\n") + 1
                self._at += whole
                for line in packed[:whole].splitlines():
                    with contextlib.suppress(ValueError, TypeError):
                        kind, content = json.loads(line)
                        yield str(kind), content


def abandon(run: Run, text: str) -> None:
    """End a run for this notebook only: another one has it, and settles it on disk."""
    run._halting.close()
    run.error = RunError(text, code="WB-RUN-068")
    with contextlib.suppress(lifecycle.InvalidTransitionError):
        run.advance("fail")
    if run.task is not None:
        run.task._on_done = lambda task: None
    run.history.finish()
    run._over.set()
