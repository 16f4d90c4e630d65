"""A run on another machine, with all methods and data of a run of this notebook.

Its rows and events are read from a place (`places.py`): a folder, another host, marked lines. Stop,
pause and faults are sent there as signed orders. The job's conductor obeys an order at a step.

    place ── refresh ──> files here ── Tail ──> history, events ──> dashboard, tables, blame
    stop, pause, step, inject ──> Order ──> place
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import psutil

from ..errors import RunError
from ..execution import registry
from ..execution.run import Run
from ..history import disk
from ..shared import events
from ..shared.events import OVER, State
from ..shared.faults import lasting, parse_fault
from ..shared.plan import Plan
from .conductor import RUNS
from .control import Order
from .earlier import ALIVE, ALIVE_S
from .places import LOG, Place, open_place

if TYPE_CHECKING:
    from ..history.snapshot import Snapshot

log = logging.getLogger("workbench.jobs")
LOOK_S = 0.25
BEGIN_S = 60.0
"""How long `follow` waits by default for a run that has not begun."""
ASK_S = 3.0
SILENT_S = 15.0
"""The dashboard reports when the job was silent for this time."""
GONE_S = 10.0
"""How long rows can still arrive after the end of the place or of the job."""
OUTPUT = "log-rank{}.txt"
WHERE_CHARACTERS, HOST_CHARACTERS = 40, 60
STATES: frozenset[str] = frozenset(get_args(State))


class FollowedJob(Run):
    """The run of a job, followed.

    Attributes:
        place: The place of the run.
        heard: Counter of received data; it changes when there is something new to draw.
        banner: The current problem with following the run; empty if there is none.
    """

    def __init__(
        self, place: Place, meta: Mapping[str, Any], gone: Callable[[], str] = lambda: ""
    ) -> None:
        plan = Plan.from_wire(meta["plan"])
        super().__init__(
            plan,
            number=int(meta.get("number", 1)),
            name=str(meta["name"]),
            engines=[int(engine) for engine in meta["ranks"]],
            devices=[str(one) for one in meta.get("devices", ())],
            folder=place.folder,
            began=float(meta["began"]),
        )
        self.place, self._gone = place, gone
        self._tail = disk.Tail(place.folder)
        self._reading = threading.Lock()
        self._heard_at = self._asked_at = time.monotonic()
        self._ended_at: float | None = None
        self._why = self._why_next = ""
        self.banner = ""
        self.heard = 0
        self._meta_text = ""
        self._alive_text = self._held_up = ""
        self._went_on = self._where(meta)
        self.advance("submit")

    def _where(self, meta: Mapping[str, Any]) -> str:
        """Return the run's hosts in short; workers without a named host are on the job's host."""
        about = meta.get("job")
        host = str(about.get("host") or "")[:HOST_CHARACTERS] if isinstance(about, dict) else ""
        if host and host != socket.gethostname():
            for rank in range(len(self.engines)):
                self.history.story.hosts.setdefault(rank, host)
        where = self.place.where
        if re.match(r"(\S+:)?/", where):
            path = Path(where.rpartition(":")[2])
            where = path.parents[1].name if path.parent.name == RUNS else path.name
        where = where if len(where) <= WHERE_CHARACTERS else where[: WHERE_CHARACTERS - 1] + "…"
        return f"{where} @ {host}" if host else where

    def begin_to_follow(self) -> None:
        """Read the present data, and continue to read on a thread."""
        self._look()
        threading.Thread(target=self._main, name="workbench-job", daemon=True).start()

    # -- reading -----------------------------------------------------------------------------------

    def _main(self) -> None:
        while not self.is_over:
            time.sleep(LOOK_S)
            try:
                self.place.refresh()
                self._look()
            except Exception as error:  # the file can be complete the next time
                log.exception("Following run %r", self.name)
                words = f"{type(error).__name__}: {error}"
                self.banner = f"The run cannot be read, so Workbench tries again: {words}"
        self.place.close()

    def _look(self) -> None:
        with self._reading:
            meta = self._meta()
            self._catch_up()
            if meta is None:
                self._judge()
                return
            self._heard_at = time.monotonic()
            self._files = dict(meta.get(disk.FILES) or {})
            self._clock_bound_s = list(meta.get("clock_bound_s") or self._clock_bound_s)
            state = str(meta.get("state", ""))
            if state in OVER:
                self._catch_up()
                self._end(state, meta.get("error"))
            elif state in STATES and self._state not in OVER:
                self._state = state  # type: ignore[assignment]

    def _meta(self) -> dict[str, Any] | None:
        """Return the content of `run.json` if it is new."""
        try:
            text = (self.folder / disk.META).read_text()
        except OSError:
            return None
        if text == self._meta_text:
            return None
        with contextlib.suppress(ValueError):
            found = json.loads(text)
            if isinstance(found, dict):
                self._meta_text = text
                return found
        return None

    def _catch_up(self) -> None:
        """Read new records."""
        for name, fields in self._tail.events():
            with contextlib.suppress(
                KeyError, TypeError, ValueError, events.InvalidTransitionError, RunError
            ):
                self._event(events.read(name, fields), fields)
                self._hear()
        for rows in self._tail.rows():
            self.history.append(rows)
            self._hear()

    def _hear(self) -> None:
        self._heard_at = time.monotonic()
        self.heard += 1

    def _judge(self) -> None:
        """Decide what the silence about the run's state means."""
        now = time.monotonic()
        if self._alive():
            self._heard_at = now
        if not self._why and now - self._asked_at >= ASK_S:
            self._asked_at = now
            self._why, self._why_next = "", ""
            if ended := self._gone() or self._keeper_died():
                self._why = f"The job ended, but the end of its run was not recorded: {ended}"
                self._why_next = "look for the reason in the job's output or in the platform's log"
            elif self.place.over:
                why = self.place.problem or "no more data arrives"
                self._why = f"Workbench can no longer follow this run: {why}"
                self._why_next = (
                    "check with the platform's own command whether the job still runs; if it runs, "
                    "follow it again"
                )
            self._ended_at = now if self._why else None
        if self._ended_at is not None and now - max(self._ended_at, self._heard_at) > GONE_S:
            self._end("failed", self._why, self._why_next)
            return
        silent_s = now - self._heard_at
        self.banner = self.place.problem or (
            f"Nothing was received from the job for {silent_s:.0f} s."
            if silent_s > SILENT_S
            else self._held_up
        )

    def _alive(self) -> bool:
        """Whether the conductor has reported again that it lives."""
        try:
            text = (self.folder / ALIVE).read_text()
        except OSError:
            return False
        fresh, self._alive_text = text != self._alive_text, text
        if fresh:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._held_up = str(json.loads(text)["banner"])
        return fresh

    def _keeper_died(self) -> str:
        """Return the text that the conductor has died, if it ran on this host."""
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
            about = json.loads((self.folder / ALIVE).read_text())
            here = about["host"] == socket.gethostname()
            silent = time.time() - float(about["t"]) > 3 * ALIVE_S
            if here and silent and not psutil.pid_exists(int(about["pid"])):
                return "the process that wrote the job's records has ended"
        return ""

    def _end(self, state: str, error: object, next_step: str | None = None) -> None:
        if self.is_over:
            return
        self.banner = ""
        told = RunError(str(error), code="WB-RUN-102", next_step=next_step)
        self.error = told if error else None
        self._state = state  # type: ignore[assignment]
        self._halting.close()
        self.history.finish()
        self.over.set()

    def close(self) -> None:
        """Stop following; the job continues."""
        if not self.is_over:
            self.note("Workbench no longer follows this run. The job continues.")
            self.history.finish()
            self.over.set()

    # -- steering ----------------------------------------------------------------------------------

    def _order(self, do: Any, **about: Any) -> None:
        if not self.is_over:
            self.place.send(Order(do, **about))

    def stop(self) -> None:
        """End the job at a step that all its workers agree on; returns at once."""
        self._order("stop")

    def preempt(self) -> None:
        """Stop the job as its platform would; the next start of the job continues from there."""
        self._order("preempt")

    def pause(self) -> None:
        """Pause the run after a step that all workers agree on; returns at once."""
        self._order("pause")

    def resume(self) -> None:
        """Let the run continue after a pause."""
        self._order("resume")

    def step(self, steps: int = 1) -> None:
        """While paused: let the run take this many steps, then pause again."""
        self._order("step", steps=int(steps))

    def inject(self, *faults: str) -> None:
        """Replace the run's faults while it trains; without arguments, remove all faults.

        Raises:
            PlanError: A fault is not valid, or names a worker that the run does not have.
        """
        parsed = [parse_fault(text) for text in faults]
        for fault in parsed:
            fault.check(len(self.engines), links=self.plan.entry.links)
        self._order("inject", faults=tuple(fault.text for fault in parsed))
        self.faults = lasting(parsed)

    def interrupt(self) -> None:
        """Interrupt the job's script on all its ranks."""
        self._order("interrupt")

    # -- what it shows -----------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The run at this moment, for views."""
        why = str(self.error).partition("\n")[0] if self.error is not None else ""
        banner = why if self.is_over else self.banner
        return replace(super().snapshot(), banner=banner, place=self._went_on)

    def printed(self, rank: int = 0, last: int = 50) -> str:
        """The last lines that a rank has printed; empty if this place does not send them."""
        path = self.output_of(rank)
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 400 * last))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-last:])

    def output_of(self, rank: int) -> Path:
        """Return the file with a rank's output; for marked lines, the file with the lines between
        them.
        """
        path = self.folder / OUTPUT.format(int(rank))
        lines = self.folder / LOG
        return lines if not rank and not path.exists() and lines.exists() else path

    def record(self) -> None:
        """Write nothing, because `run.json` belongs to the job."""

    def discard(self) -> None:
        """Remove nothing, because the records belong to the job."""


def follow(
    place: str | Path | Sequence[str],
    *,
    wait_s: float | None = BEGIN_S,
    control: Sequence[str] | None = None,
    gone: Callable[[], str] = lambda: "",
) -> FollowedJob:
    """Follow the run at a place from its first step; return it.

    If this process follows the run already, the same object is returned.

    Args:
        place: A job's folder or a run's, `ssh://host/dir`, or a command whose standard output has
            marked lines (`kubectl logs -f POD`).
        wait_s: How long to wait for a run that has not begun; None: without a limit.
        control: The command that takes orders, for a place that cannot take them itself.
        gone: Returns why the platform has ended the job; empty while the job lives.

    Raises:
        RunError: There is no run at the place, or it did not begin in time.
        PlanError: The place is not valid.
    """
    found = open_place(place, control=control)
    try:
        meta = _await_meta(found, wait_s, gone)
        if control is None and (known := _followed(found, meta)) is not None:
            found.close()
            return known
        run = FollowedJob(found, meta, gone)
    except BaseException:
        found.close()
        raise
    registry.runs.add(run)
    run.begin_to_follow()
    return run


def _followed(place: Place, meta: Mapping[str, Any]) -> FollowedJob | None:
    """Return the object that follows this run already, unless it was closed or lost the run."""
    state = meta.get("state")
    for run in registry.runs.values():
        same = isinstance(run, FollowedJob) and (
            (run.place.where, run.began) == (place.where, float(meta["began"]))
        )
        if same and (not run.over.is_set() or run.state == state in OVER):
            return run  # type: ignore[return-value]  # checked in `same`
    return None


def _await_meta(place: Place, wait_s: float | None, gone: Callable[[], str]) -> dict[str, Any]:
    """Wait for the run's `run.json`; return its content."""
    began = asked_at = time.monotonic()
    while True:
        place.refresh()
        meta: dict[str, Any] = {}
        with contextlib.suppress(RunError, OSError, ValueError):
            meta = disk.read_meta(place.folder)
        if "plan" in meta:
            _check(meta, place)
            return meta
        now, why = time.monotonic(), ""
        if now - asked_at > ASK_S:
            asked_at, why = now, gone()
        if why or place.over:
            raise RunError(
                "The job ended before its run began."
                if why
                else "No run was found, and no more data comes from this place.",
                seen=why or place.problem or place.where,
                next_step="read the job's output (after wb.submit: job.logs()) or the platform's "
                "own log"
                if why
                else "check the place; read the job's output",
                code="WB-RUN-103",
            )
        if wait_s is not None and now - began > wait_s:
            raise RunError(
                "No run was found here." if place.problem else "The run has not begun.",
                seen=f"{place.where}, for {wait_s:g} s"
                + (f": {place.problem}" if place.problem else ""),
                allowed="a job that has started, or a run's folder",
                next_step="solve this problem, then follow the run again"
                if place.problem
                else "if the job is queued, wait without a time limit: wb.follow(place, "
                "wait_s=None), or `workbench follow --wait inf PLACE`",
                code="WB-RUN-104",
            )
        time.sleep(LOOK_S)


def _check(meta: Mapping[str, Any], place: Place) -> None:
    from ..shared.record import RECORD

    seen, other = "", meta.get(disk.ROW_BYTES) != RECORD.itemsize
    if other:
        size = meta.get(disk.ROW_BYTES) or "an unknown number of"
        seen = f"records with {size} bytes for each step"
    try:
        Plan.from_wire(meta["plan"])
        _ = str(meta["name"]), [int(engine) for engine in meta["ranks"]], float(meta["began"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        seen = seen or f"{type(error).__name__}: {error}"
    if seen:
        raise RunError(
            "The job runs another version of Workbench, or its run.json is damaged.",
            seen=f"{place.where}: {seen}",
            allowed=f"records with {RECORD.itemsize} bytes for each step" if other else None,
            next_step="install the job's version of Workbench (a job folder contains this version "
            "as a wheel), then follow the job again. If this does not help, run.json is damaged",
            code="WB-RUN-105",
        )
