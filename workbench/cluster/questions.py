"""Questions to engines that their control threads answer, whatever the main thread does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, overload

from ..messages import AskStacks, AskWhere, Down, StacksAnswer, WhereAnswer


@dataclass
class _Question:
    missing: set[int]
    wanted: type[WhereAnswer]
    answers: dict[int, Any] = field(default_factory=dict)
    complete: threading.Event = field(default_factory=threading.Event)


class Questions:
    """Asks engines and gathers what they answer.

    Args:
        send: Sends a message to one engine.
    """

    def __init__(self, send: Callable[[int, Down], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._open: dict[int, _Question] = {}
        self._lock = threading.Lock()

    @overload
    def ask(
        self, question: type[AskWhere], engines: Iterable[int], timeout_s: float
    ) -> dict[int, WhereAnswer]: ...
    @overload
    def ask(
        self, question: type[AskStacks], engines: Iterable[int], timeout_s: float
    ) -> dict[int, StacksAnswer]: ...
    def ask(
        self, question: type[AskWhere | AskStacks], engines: Iterable[int], timeout_s: float
    ) -> dict[int, Any]:
        """Return what each engine answered within `timeout_s`; who was silent is missing."""
        asked = _Question(set(engines), StacksAnswer if question is AskStacks else WhereAnswer)
        number = next(self._numbers)
        with self._lock:
            self._open[number] = asked
        for engine in sorted(asked.missing):
            self._send(engine, question(ask=number))
        if asked.missing:
            asked.complete.wait(timeout_s)
        with self._lock:
            del self._open[number]
            return dict(asked.answers)

    def heard(self, answer: WhereAnswer) -> None:
        """Take an answer; one that comes too late is nobody's."""
        with self._lock:
            asked = self._open.get(answer.ask)
            if asked is None or type(answer) is not asked.wanted:
                return
            if answer.engine not in asked.missing:
                return
            asked.missing.remove(answer.engine)
            asked.answers[answer.engine] = answer
            if not asked.missing:
                asked.complete.set()
