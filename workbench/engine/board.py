"""What the engines of a run say to each other before anything else connects them.

A value that one engine posts (`RunContext.post`) goes up its control link to the kernel, which
hands it to every engine of the run:

    worker 1 -- post("address", "127.0.0.1:40123") --> kernel --> board of each engine

It is meant for a few small values per run: addresses, "I am there", "it is over".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ClusterError
from .marks import BOARD, waits_in


class Board:
    """Written by the control thread, read by the thread that runs the cell."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heard: dict[str, dict[int, Any]] = {}

    def hear(self, topic: str, rank: int, value: Any) -> None:
        """Put up what an engine said; its latest word counts."""
        with self._changed:
            self._heard.setdefault(topic, {})[rank] = value
            self._changed.notify_all()

    @waits_in(BOARD)
    def wait(
        self,
        topic: str,
        ranks: Iterable[int],
        timeout_s: float | None = None,
        names: Mapping[int, str] | None = None,
    ) -> dict[int, Any]:
        """Wait until all those engines have spoken on a topic; return what they said, by rank.

        Args:
            names: How ranks are called in an error.

        Raises:
            ClusterError: Not all of them did within `timeout_s`; says who is missing.
        """
        wanted = list(ranks)
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while missing := [r for r in wanted if r not in self._heard.get(topic, {})]:
                left_s = 0.5 if end_s is None else min(0.5, end_s - time.monotonic())
                if left_s <= 0:
                    raise ClusterError(
                        "Engines of this run did not answer.",
                        seen=f"no {topic} from "
                        + ", ".join((names or {}).get(rank, str(rank)) for rank in missing),
                        allowed=f"an answer within {timeout_s:g} s",
                        next_step="%cluster shows which are alive; %cluster restart",
                        code="WB-CLUSTER-025",
                    )
                self._changed.wait(left_s)
            heard = self._heard[topic]
            return {rank: heard[rank] for rank in wanted}
