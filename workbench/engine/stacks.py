"""Where this engine's threads are: one line for a banner, whole stacks on demand.

Read by the control thread while the cell runs, from `sys._current_frames`. A main thread that
holds the interpreter's lock in a call of C cannot be looked at: then nobody answers.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Literal

from ..messages import AskStacks, AskWhere, StacksAnswer, Whereabouts, WhereAnswer
from . import attention, marks, places
from .waits import Place, waiting_in

_PACKAGE = str(Path(__file__).parents[1])


def where() -> Whereabouts:
    """Return where the main thread is."""
    stack = _main_thread()
    if stack is None:
        return Whereabouts(state="idle")
    user = next((k for k, place in enumerate(stack) if places.is_yours(place.file)), None)
    inner = stack[:user]
    found = waiting_in(inner, stack[user] if user is not None else None)
    at = _spell(stack, user) if user is not None else ""
    inside = _inside(inner) if user is not None else _phase(inner)
    waits_in = "" if found is None else found.label
    if attention.paused_by_user():
        return Whereabouts(state="paused", at=at, inside=inside, waits_in=waits_in)
    if found is None:
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
        mine = places.is_yours(place.file)
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
    """Return what is called by the runtime, without its machinery."""
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
    cells = [one.file for one in stack if places.is_cell(one.file)]
    earlier = bool(cells) and place.file != cells[-1]
    return places.where(place.file, place.line, place.name, earlier=earlier)


def _inside(inner: list[Place]) -> str:
    """Return which function of a library the user's line is in, empty where it is in none."""
    for place in reversed(inner):  # the one that the user called
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
    """Answer one; frames that change while they are read must not end the control thread."""
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
