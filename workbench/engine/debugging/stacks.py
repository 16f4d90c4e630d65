"""Where this engine's threads are: one line for a banner, whole stacks on demand.

The control thread reads it while the cell runs, from `sys._current_frames`. If the main thread
holds the interpreter's lock in a call of C, it cannot be looked at, and there is no answer.

The reason for a wait is read from the thread's frames: collectives, links, a step of TensorFlow.
Our functions are marked (`marks.waits_in`); those of other libraries are known by their modules. A
collective blocks in C++, below the last frame of Python, where computing blocks too. So a frame
that may mean both counts as a wait only while its thread is idle.

A thread that waits for an accelerator spins, so it seems to compute. The code that gave the device
its work reports what the device is doing (`ask_device`).
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

from ...shared.messages import AskStacks, AskWhere, StacksAnswer, Whereabouts, WhereAnswer
from . import marks, stdin_bridge
from .marks import RULES

_PACKAGE = str(Path(__file__).parents[2])


class DeviceWork(NamedTuple):
    """What an accelerator is doing.

    Attributes:
        waits: Whether it waits for other workers.
        words: Text such as "has waited 12 s ...", or its computation.
    """

    waits: bool
    words: str


_devices: list[Callable[[], DeviceWork | None]] = []


def ask_device(ask: Callable[[], DeviceWork | None]) -> Callable[[], None]:
    """Let `ask` report the device's activity, on the control thread; returns what ends that."""
    _devices.append(ask)

    def undo() -> None:
        if ask in _devices:
            _devices.remove(ask)

    return undo


def _device_work() -> DeviceWork | None:
    """Return the device's activity; the newest reporter is the most exact (a step's own events)."""
    for ask in reversed(_devices[:]):
        with contextlib.suppress(Exception):  # a device that has failed says nothing
            if (work := ask()) is not None:
                return work
    return None


def where() -> Whereabouts:
    """Return where the main thread is."""
    stack = _main_thread()
    if stack is None:
        return Whereabouts(state="idle")
    user = next((k for k, place in enumerate(stack) if marks.is_yours(place.file)), None)
    inner = stack[:user]
    found = waiting_in(inner, stack[user] if user is not None else None)
    at = _spell(stack, user) if user is not None else ""
    inside = _inside(inner) if user is not None else _phase(inner)
    waits_in = "" if found is None else found.label
    if stdin_bridge.paused_by_user():
        return Whereabouts(state="paused", at=at, inside=inside, waits_in=waits_in)
    if found is None:
        work = _device_work()
        if work is not None and work.waits:
            return Whereabouts(state="waits", at=at, inside=inside, waits_in=work.words)
        if work is not None:
            inside = ", ".join(filter(None, (inside, work.words)))
        return Whereabouts(state="busy", at=at, inside=inside)
    state: Literal["held", "waits"] = "held" if found.by_user else "waits"
    return Whereabouts(state=state, at=at, inside=inside, waits_in=waits_in)


def dump() -> str:
    """Return the stacks of all threads, the main thread's first; the user's lines are marked."""
    frames = sys._current_frames()
    main = threading.main_thread()
    others = [t for t in threading.enumerate() if t is not main and t.ident in frames]
    parts = []
    for thread in (main, *others):
        if thread.ident is None or thread.ident not in frames:
            continue
        stack = _places(frames[thread.ident])
        if thread is main:
            stack = _below_entry(stack) or stack
        head = "main thread" if thread is main else f"thread {thread.name}"
        parts.append("\n".join([head, *_lines(stack)]))
    return "\n".join(parts)


def _lines(stack: list[Place]) -> list[str]:
    """Return a stack as text, outermost first; lines of the user begin with `>`."""
    lines = []
    for k in range(len(stack) - 1, -1, -1):
        place = stack[k]
        mine = marks.is_yours(place.file)
        name = _spell(stack, k) if mine else f"{_short(place.file)}:{place.line} in {place.name}"
        lines.append(f"{'>' if mine else ' '} {name}")
        if source := linecache.getline(place.file, place.line).strip():
            lines.append(f"      {source}")
    return lines


def _main_thread() -> list[Place] | None:
    """Return the main thread's places within the cell, innermost first; None: it runs none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else _below_entry(_places(frame))


def _below_entry(stack: list[Place]) -> list[Place] | None:
    """Return the frames that the runtime calls, without internal frames."""
    for k, place in enumerate(stack):
        if place.frame is not None and marks.is_beginning(place.frame):
            inner = stack[:k]
            while len(inner) > 1 and _is_machinery(inner[-1]):
                inner.pop()
            return inner
    return None


def _is_machinery(place: Place) -> bool:
    frame = place.frame
    return frame is not None and marks.is_machinery(frame) and not marks.done_in(frame)


def _places(frame: FrameType | None) -> list[Place]:
    found = []
    while frame is not None:
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")
        found.append(Place(code.co_filename, frame.f_lineno or 0, name, frame))
        frame = frame.f_back
    return found


def _spell(stack: list[Place], k: int) -> str:
    """Return a line of the user's in words; a line of an earlier cell says so."""
    place = stack[k]
    cells = [one.file for one in stack if marks.is_cell(one.file)]
    earlier = bool(cells) and place.file != cells[-1]
    return marks.where(place.file, place.line, place.name, earlier=earlier)


def _inside(inner: list[Place]) -> str:
    """Return the library function that the user's line calls; empty if there is none."""
    for place in reversed(inner):  # the function that the user called
        if not place.file.startswith("<") and place.name != "<module>":
            return place.name
    return ""


def _phase(inner: list[Place]) -> str:
    """Return what the engine does around the cell."""
    said = (marks.done_in(place.frame) for place in inner if place.frame is not None)
    return next(filter(None, said), "getting ready")


def _short(file: str) -> str:
    """Return a library's file without the folder that it is installed in."""
    for folder in (f"{os.sep}site-packages{os.sep}", f"{os.path.dirname(os.__file__)}{os.sep}"):
        if folder in file:
            return file.partition(folder)[2]
    return file.replace(str(Path(_PACKAGE).parent) + os.sep, "")


def answer(question: AskWhere | AskStacks, engine: int) -> WhereAnswer | StacksAnswer:
    """Answer a question; frames that change during reading must not end the control thread."""
    text = ""
    try:
        place = where()
        if isinstance(question, AskStacks):
            text = dump()
    except Exception as error:
        place, text = Whereabouts(state="busy"), repr(error)
    if isinstance(question, AskStacks):
        return StacksAnswer(engine=engine, ask=question.ask, text=text, **vars(place))
    return WhereAnswer(engine=engine, ask=question.ask, **vars(place))


SAMPLES, SAMPLE_S = 4, 0.02
IDLE_CPU_S = 0.002
"""CPU time that a thread may use during the samples and still count as standing still."""


class Place(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    name: str
    frame: FrameType | None = None


@dataclass(frozen=True)
class Wait:
    """The reason for a wait; `by_user`: caused by the user (a pause), not by other workers."""

    label: str
    by_user: bool = False


_CALLS_WAIT = re.compile(r"\b(\w+)\.wait\(")


def waiting_in(inner: list[Place], user: Place | None) -> Wait | None:
    """Return what a thread waits in, None while it works.

    Args:
        inner: Its frames below the user's innermost one, innermost first.
        user: That frame.
    """
    if any(place.file.startswith("<frozen importlib") for place in inner):
        return None  # it can only be waiting for the disk
    for rule in RULES:
        fitting = [p for p in inner if p.frame is not None and rule.fits(p.frame)]
        if fitting and _stands_still(rule.idle):
            place = fitting[-1] if rule.outermost else fitting[0]
            return Wait(rule.label.format(place.name.rpartition(".")[2]), rule.by_user)
    if not inner and user is not None and _waits_for_work(user) and _stands_still("thread"):
        return Wait("in wait")
    return None


def _waits_for_work(user: Place) -> bool:
    """Whether the user's line waits for a collective begun earlier: `work.wait()`."""
    import linecache

    match = _CALLS_WAIT.search(linecache.getline(user.file, user.line))
    if match is None or user.frame is None:
        return False
    found: Any = user.frame.f_locals.get(match[1], user.frame.f_globals.get(match[1]))
    return "distributed" in type(found).__module__


def _stands_still(who: Literal["", "thread", "process"]) -> bool:
    if not who:
        return True
    if who == "process":
        return process_is_idle()
    idle = is_idle(threading.main_thread())
    return True if idle is None else idle


def process_is_idle() -> bool:
    """Whether all of this process's threads are idle."""
    before, began = time.process_time(), time.perf_counter()
    time.sleep(SAMPLES * SAMPLE_S)
    return time.process_time() - before < 0.2 * (time.perf_counter() - began)


def is_idle(thread: threading.Thread) -> bool | None:
    """Whether a thread is idle: it sleeps at every look, and uses no CPU meanwhile.

    A thread that only waits for a free core does not sleep, so a busy machine does not mislead.

    Returns:
        None if the system does not say.
    """
    stat = Path(f"/proc/self/task/{thread.native_id}/stat")
    try:
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        before_s = time.clock_gettime(clock)
        for _ in range(SAMPLES):
            if stat.read_text().rpartition(")")[2].split()[0] not in "SD":
                return False
            time.sleep(SAMPLE_S)
        return time.clock_gettime(clock) - before_s < IDLE_CPU_S
    except (OSError, AttributeError, IndexError):
        return None
