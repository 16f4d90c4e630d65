"""Faults to inject, as data: `slow=1:50ms`, `slow=1:3x`, `jitter=20ms`, `kill=2@100`.

`bandwidth=100MB/s` and `latency=5ms` are simulated: each message on the strategy's own links is
delayed for as long as such a link would take, in addition to the time of the real link.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from ..errors import PlanError

FORMS = "slow=RANK:50ms, slow=RANK:3x, jitter=20ms, kill=RANK@STEP, bandwidth=100MB/s, latency=5ms"
ON_LINKS = ("bandwidth", "latency")
_RATE = re.compile(r"^(\d+(?:\.\d+)?)([KMG]?)B/s$")
_RATE_UNIT = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)(us|ms|s)$")
_FACTOR = re.compile(r"^0*[1-9]\d*(?:\.\d+)?x$")
_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}
PLACES = ("step", "data", "forward", "backward")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: `slow` delays a worker each step, `jitter` delays every worker by a random time,
            `kill` ends a worker's process with SIGKILL, `bandwidth` and `latency` hold back what
            every worker sends and receives, `clear` removes the faults.
        rank: The worker that gets the fault; None for all.
        delay_s: Seconds added to each step (`slow`) or message (`latency`), or the upper bound of
            the random delay (`jitter`).
        bytes_per_s: For `bandwidth`: the rate of a worker's link.
        factor: For `slow`: the factor on the compute time of a step.
        step: For `kill`: the step before which the worker dies.
        where: The phase in which the delay takes place.
    """

    kind: Literal["slow", "jitter", "kill", "bandwidth", "latency", "clear"]
    rank: int | None = None
    delay_s: float = 0.0
    factor: float = 1.0
    step: int = 0
    where: str = "step"
    bytes_per_s: float = 0.0

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
        if self.kind in ("jitter", "latency"):
            return f"{self.kind}={_duration(self.delay_s)}"
        if self.kind == "bandwidth":
            return f"bandwidth={_rate(self.bytes_per_s)}"
        return f"kill={self.rank}@{self.step}" if self.kind == "kill" else "clear"

    def check(self, workers: int, *, links: bool = True) -> None:
        """Raise PlanError if the fault does not apply to the run.

        Args:
            links: Whether the strategy has its own links.
        """
        if self.kind in ON_LINKS and not links:
            raise PlanError(
                "The faults `bandwidth` and `latency` work only with strategies that send messages "
                "over Workbench's own links.",
                seen=self.text,
                allowed="the faults `slow`, `jitter` and `kill`, with every strategy except `tpu`",
                next_step="use another strategy, for example mirrored in PyTorch",
                code="WB-PLAN-038",
            )
        if self.rank is not None and not 0 <= self.rank < workers:
            raise PlanError(
                "The fault names a worker that this run does not have.",
                seen=self.text,
                allowed=f"ranks 0 to {workers - 1}" if workers > 1 else "rank 0",
                code="WB-PLAN-039",
            )


def lasting(faults: Iterable[Fault]) -> tuple[str, ...]:
    """Return the texts of the faults that last; a `kill` does not last."""
    return tuple(fault.text for fault in faults if fault.kind not in ("kill", "clear"))


def parse_fault(text: str) -> Fault:
    """Read one `--inject` value.

    Raises:
        PlanError: It has none of the known forms.
    """
    kind, _, value = text.strip().partition("=")
    if kind == "clear" and not value:
        return Fault("clear")
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
        if kind == "latency":
            return Fault("latency", delay_s=parse_duration(value))
        if kind == "bandwidth":
            return Fault("bandwidth", bytes_per_s=_parse_rate(value))
        if kind == "kill":
            rank, _, step = value.partition("@")
            return Fault("kill", int(rank), step=int(step))
    except ValueError:
        pass
    raise PlanError(
        "The fault is not valid.",
        seen=text,
        allowed=f"slow=RANK:50ms/PLACE or slow=RANK:3x/PLACE; places: {', '.join(PLACES)}"
        if kind == "slow" and "/" in value
        else FORMS,
        code="WB-PLAN-040",
    )


def _rate(bytes_per_s: float) -> str:
    """Return a rate so that `_parse_rate` gives the same number."""
    for unit in ("G", "M", "K"):
        short = f"{bytes_per_s / _RATE_UNIT[unit]:g}{unit}B/s"
        whole = bytes_per_s >= _RATE_UNIT[unit]
        if whole and _RATE.match(short) and _parse_rate(short) == bytes_per_s:
            return short
    return _plainly(bytes_per_s) + "B/s"


def _plainly(value: float) -> str:
    """Return a number without an exponent, with enough digits to read the same number again."""
    digits = f"{Decimal(repr(float(value))):f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _parse_rate(text: str) -> float:
    """Return the bytes per second in `100MB/s`; ValueError for any other text, and for 0."""
    match = _RATE.match(text.strip())
    if not match or not float(match[1]):
        raise ValueError(text)
    return float(match[1]) * _RATE_UNIT[match[2]]


def _duration(seconds: float) -> str:
    """Return seconds so that `parse_duration` gives the same number, in ms if that is exact."""
    short = f"{seconds * 1e3:g}ms"
    if _DURATION.match(short) and parse_duration(short) == seconds:
        return short
    return _plainly(seconds) + "s"


def parse_duration(text: str) -> float:
    """Return the seconds in `50ms`, `1.5s` or `200us`; ValueError for anything else."""
    match = _DURATION.match(text.strip())
    if not match:
        raise ValueError(text)
    return float(match[1]) / _PER_SECOND[match[2]]
