"""Faults a teacher can inject, as data: `slow=1:50ms`, `slow=1:3x`, `jitter=20ms`, `kill=2@100`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .errors import PlanError

FORMS = "slow=RANK:50ms, slow=RANK:3x, jitter=20ms, kill=RANK@STEP"
LATER = ("bandwidth", "latency")
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)(us|ms|s)$")
_FACTOR = re.compile(r"^0*[1-9]\d*(?:\.\d+)?x$")
_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}
PLACES = ("step", "data", "forward", "backward")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: `slow` delays a worker each step, `jitter` delays every worker by a random time,
            `kill` ends a worker's process with SIGKILL, `clear` removes the faults.
        rank: The worker it is for; None for all.
        delay_s: Seconds added to each step (`slow`), or the upper bound of the random delay.
        factor: For `slow`: how many times as long the step's own compute takes.
        step: For `kill`: the step before which the worker dies.
        where: Phase in which the delay is spent.
    """

    kind: Literal["slow", "jitter", "kill", "clear"]
    rank: int | None = None
    delay_s: float = 0.0
    factor: float = 1.0
    step: int = 0
    where: str = "step"

    @property
    def text(self) -> str:
        """The fault as the user would type it; `parse_fault` reads it back."""
        where = "" if self.where == "step" else f"/{self.where}"
        if self.kind == "slow":
            amount = (
                f"{repr(self.factor).removesuffix('.0')}x"
                if self.factor != 1.0
                else _duration(self.delay_s)
            )
            return f"slow={self.rank}:{amount}{where}"
        if self.kind == "jitter":
            return f"jitter={_duration(self.delay_s)}"
        return f"kill={self.rank}@{self.step}" if self.kind == "kill" else "clear"

    def check(self, workers: int) -> None:
        """Raise PlanError when the fault names a worker that the run does not have."""
        if self.rank is not None and not 0 <= self.rank < workers:
            raise PlanError(
                "The fault is for a worker that this run does not have.",
                seen=self.text,
                allowed=f"ranks 0 to {workers - 1}",
            )


def parse_fault(text: str) -> Fault:
    """Read one `--inject` value.

    Raises:
        PlanError: It has none of the known forms.
    """
    kind, _, value = text.strip().partition("=")
    if kind == "clear" and not value:
        return Fault("clear")
    if kind in LATER:
        raise PlanError(
            "Link faults are not there yet: they need the links of the server strategies.",
            seen=text,
            allowed=FORMS,
        )
    try:
        if kind == "slow":
            rank, _, amount = value.partition(":")
            amount, _, where = amount.partition("/")
            if (where or "step") not in PLACES:
                raise ValueError(where)
            if _FACTOR.match(amount):
                return Fault("slow", int(rank), factor=float(amount[:-1]), where=where or "step")
            return Fault("slow", int(rank), delay_s=parse_duration(amount), where=where or "step")
        if kind == "jitter":
            return Fault("jitter", delay_s=parse_duration(value))
        if kind == "kill":
            rank, _, step = value.partition("@")
            return Fault("kill", int(rank), step=int(step))
    except ValueError:
        pass
    raise PlanError("The fault was not understood.", seen=text, allowed=FORMS)


def _duration(seconds: float) -> str:
    """Return seconds so that `parse_duration` gives the same number, in ms where it is exact."""
    short = f"{seconds * 1e3:g}ms"
    if _DURATION.match(short) and parse_duration(short) == seconds:
        return short
    return f"{seconds:.17f}".rstrip("0").rstrip(".") + "s"


def parse_duration(text: str) -> float:
    """Return the seconds in `50ms`, `1.5s` or `200us`; ValueError for anything else."""
    match = _DURATION.match(text.strip())
    if not match:
        raise ValueError(text)
    return float(match[1]) / _PER_SECOND[match[2]]
