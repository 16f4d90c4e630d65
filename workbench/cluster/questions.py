"""Questions to engines that their control threads answer, whatever the main thread does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..protocol import Message


@dataclass
class _Question:
    missing: set[int]
    answers: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    complete: threading.Event = field(default_factory=threading.Event)


class Questions:
    """Asks engines and gathers what they answer.

    Args:
        send: Sends a message to one engine.
    """

    def __init__(self, send: Callable[[int, Message], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._open: dict[int, _Question] = {}
        self._lock = threading.Lock()

    def ask(
        self, kind: str, engines: Iterable[int], timeout_s: float
    ) -> dict[int, Mapping[str, Any]]:
        """Return what each engine answered within `timeout_s`; who was silent is missing."""
        question = _Question(set(engines))
        number = next(self._numbers)
        with self._lock:
            self._open[number] = question
        for engine in sorted(question.missing):
            self._send(engine, Message(kind, {"ask": number}))
        if question.missing:
            question.complete.wait(timeout_s)
        with self._lock:
            del self._open[number]
            return dict(question.answers)

    def heard(self, engine: int, message: Message) -> None:
        """Take an answer; one that comes too late is nobody's."""
        with self._lock:
            question = self._open.get(int(message.body["ask"]))
            if question is None or engine not in question.missing:
                return
            question.missing.remove(engine)
            question.answers[engine] = message.body
            if not question.missing:
                question.complete.set()
