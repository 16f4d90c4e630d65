"""A job's run that a test writes, and what a place that follows it has of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.history import disk
from workbench.jobs import control, frames, places
from workbench.jobs.control import Inbox
from workbench.jobs.places import Place
from workbench.shared.record import RECORD

WITHIN_S = 20.0


def rows(count: int, first: int = 0) -> bytes:
    """Return packed rows, of which no two are alike."""
    table = np.zeros(count, RECORD)
    table["step"] = np.arange(first, first + count)
    return table.tobytes()


class Job:
    """A job folder whose run this test writes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "runs" / "1"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"format": "workbench-job/1"}))
        self.written = 0

    def begin(self, number: int = 1) -> Inbox:
        self.run = self.folder / "runs" / str(number)
        self.run.mkdir(parents=True)
        self.state("running")
        return Inbox(self.run, control.make_key(self.run))

    def state(self, state: str) -> None:
        disk.write_meta(self.run, {"plan": {}, "state": state})

    def step(self, count: int = 1, rank: int = 0) -> None:
        with disk.records_path(self.run, rank).open("ab") as file:
            file.write(rows(count, self.written))
        with disk.events_path(self.run, rank).open("ab") as file:
            file.write(b'{"name": "step", "t_s": %d}\n' % self.written)
        self.written += count


def until(place: Place, so: Callable[[], Any]) -> None:
    """Refresh until something is so."""
    pause, end = threading.Event(), int(WITHIN_S / 0.01)
    for _ in range(end):
        place.refresh()
        if so():
            return
        pause.wait(0.01)
    raise AssertionError(f"not within {WITHIN_S} s; problem: {place.problem!r}")


def content(folder: Path, *, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Return the files of a run by their names, of those that are followed."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if frames._NAME.fullmatch(path.name) and not path.name.startswith(without)
    }


def same(place: Place, run: Path, *, without: tuple[str, ...] = ()) -> bool:
    return content(place.folder) == content(run, without=without)


def code_of(error: pytest.ExceptionInfo[Any]) -> str:
    assert error.value.code
    return str(error.value.code)


def try_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a lost connection be tried again at once, and a slow one be waited for."""
    monkeypatch.setattr(places, "BACKOFF_S", (0.01,))
    monkeypatch.setattr(places, "CONNECT_S", WITHIN_S)
    monkeypatch.setattr(places, "ANSWER_S", WITHIN_S)
