"""Describes a hang while it lasts: which ranks wait where and how long, and the others.

The engines are queried only when none of them has sent anything for a while. A rank that the user
has paused is not a hang. If all ranks compute, this is not a hang either: none waits for another.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ...shared.members import Member, called, ranges
from ...shared.messages import AskWhere, Whereabouts, WhereAnswer

if TYPE_CHECKING:
    from ..task import Task

HANG_S = 5.0
ASK_EVERY_S = 1.0
ANSWER_S = 2.0
ALIKE = 3
"""A large message may keep all ranks in the same collective: reported after this many `HANG_S`."""

Ask = Callable[[type[AskWhere], Iterable[int], float], Mapping[int, WhereAnswer]]


def patience_s() -> float:
    """Return the seconds without progress after which a wait counts as a hang; 0: never.

    `WORKBENCH_HANG_S` sets them.
    """
    try:
        return max(0.0, float(os.environ.get("WORKBENCH_HANG_S", HANG_S)))
    except ValueError:
        return HANG_S


def watch(
    task: Task,
    ask: Ask,
    held: Callable[[], bool] = lambda: False,
    absent: Sequence[int] = (),
) -> None:
    """Keep `task.banner` true until the task is over.

    Args:
        ask: Asks engines (`cluster.router.Questions.ask`).
        held: Whether the user has paused the run.
        absent: Ranks of the process group that do not run the cell.
    """
    limit_s = patience_s()
    if limit_s:
        thread = threading.Thread(
            target=_Watch(task, ask, held, absent, limit_s).main, name="workbench-hangs",
            daemon=True,
        )  # fmt: skip
        thread.start()


class _Watch:
    def __init__(
        self, task: Task, ask: Ask, held: Callable[[], bool], absent: Sequence[int], limit_s: float
    ) -> None:
        self._task, self._ask, self._held, self._limit_s = task, ask, held, limit_s
        self._absent = absent
        self._busy_at: dict[int, float] = {}  # when each engine was last seen at work

    def main(self) -> None:
        task, first_s = self._task, self._limit_s / 2
        pause_s = max(0.0, first_s - (time.perf_counter() - task.moved_at))
        while not task.over.wait(pause_s):
            quiet_s = time.perf_counter() - task.moved_at
            if self._held() or quiet_s < first_s:
                self._busy_at.clear()
                task.banner = ""
                pause_s = ASK_EVERY_S if self._held() else first_s - quiet_s
                continue
            moved_at = task.moved_at
            words = self._look(moved_at)
            if task.moved_at == moved_at:  # otherwise the run continued meanwhile
                task.banner = words
            pause_s = min(ASK_EVERY_S, first_s)
        task.banner = ""

    def _look(self, moved_at: float) -> str:
        task, now = self._task, time.perf_counter()
        asked = task.unfinished()
        places: dict[int, Whereabouts | None] = dict.fromkeys(asked)
        places |= self._ask(AskWhere, asked, ANSWER_S)
        for engine, place in places.items():
            if place is not None and place.state != "waits":
                self._busy_at[engine] = now
        waited_s = {i: now - max(moved_at, self._busy_at.get(i, 0.0)) for i in places}
        members = {i: task.member(i) for i in task.ids}
        ended = [i for i in task.ids if i not in asked]
        return diagnose(places, waited_s, members, ended, self._limit_s, self._absent)


def diagnose(
    places: Mapping[int, Whereabouts | None],
    waited_s: Mapping[int, float],
    members: Mapping[int, Member],
    ended: Iterable[int],
    limit_s: float,
    absent: Sequence[int] = (),
) -> str:
    """Return the hang in one sentence; empty if there is none.

    Args:
        places: The position that each running engine reports; None: the engine did not answer.
        waited_s: How long each engine has waited.
        members: The part that each engine takes. If all replicas are on one engine, there is no
            other engine that they could wait for.
        ended: Engines that have finished the cell.
        limit_s: Shorter waits do not count.
        absent: Ranks of the process group that do not run the cell.
    """
    workers = {i: p for i, p in places.items() if members[i].role == "worker" or p is None}
    states = {p.state for p in workers.values() if p is not None}
    if states & {"paused", "held"}:
        return ""
    waiting = [i for i, p in workers.items() if p and p.state == "waits" and waited_s[i] >= limit_s]
    if not waiting:
        return ""
    others = [i for i in workers if i not in waiting]
    waits = _waits(waiting, workers, waited_s, members)
    elsewhere = _elsewhere(others, workers, members, ended)
    if elsewhere:
        return f"{waits}; {elsewhere}"
    if len({_waits_in(workers[i]) for i in waiting}) > 1:
        return f"{waits}: these workers wait for each other, in different calls"
    if absent:
        them = f"rank{'s' if len(absent) > 1 else ''} {ranges(absent)}"
        return (
            f"{waits}, but {them} {'do' if len(absent) > 1 else 'does'} not run this cell. If all "
            "workers must take part in this call, use %%distributed instead of %%rank"
        )
    if max(waited_s[i] for i in waiting) >= ALIKE * limit_s:
        return (
            f"{waits}. All workers wait in the same call: perhaps the message is large, or the "
            "shapes or types of the workers' tensors do not match"
        )
    return ""


def _waits_in(place: Whereabouts | None) -> str:
    return "" if place is None else place.waits_in


def _waits(
    waiting: list[int],
    places: Mapping[int, Whereabouts | None],
    waited_s: Mapping[int, float],
    members: Mapping[int, Member],
) -> str:
    groups: dict[str, list[int]] = {}
    for engine in waiting:
        groups.setdefault(_waits_in(places[engine]), []).append(engine)
    parts = []
    for what, engines in groups.items():
        verb = "have" if len(engines) > 1 else "has"
        seconds = min(waited_s[i] for i in engines)
        parts.append(f"{called(members[i] for i in engines)} {verb} waited {seconds:.0f} s {what}")
    return ", ".join(parts)


def _elsewhere(
    others: Iterable[int],
    places: Mapping[int, Whereabouts | None],
    members: Mapping[int, Member],
    ended: Iterable[int],
) -> str:
    groups: dict[str, list[int]] = {}
    for engine in others:
        groups.setdefault(place_words(places[engine]), []).append(engine)
    if ended := [i for i in ended if members[i].role == "worker"]:
        groups.setdefault("at the end of the cell", []).extend(ended)
    parts = []
    for what, engines in groups.items():
        verb = "are" if len(engines) > 1 else "is"
        parts.append(f"{called(members[i] for i in engines)} {verb} {what}")
    return ", ".join(parts)


def place_words(place: Whereabouts | None) -> str:
    """Return where an engine is: `at train.py:41 in load_batch`, `waiting in all_reduce`."""
    if place is None:
        return f"silent (no answer for {ANSWER_S:g} s or longer; perhaps a C function does not end)"
    if place.state == "idle":
        return "idle"
    if not place.at:
        return place.inside or "busy"
    inside = f", in {place.inside}" if place.inside else ""
    return f"at {place.at}{inside}"
