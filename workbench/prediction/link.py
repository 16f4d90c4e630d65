"""A link as text: `100Gbit`, `1GB/s`, `1GB/s 50us`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import PlanError
from ..shared.faults import Fault, parse_duration

FORMS = "100Gbit, 1GB/s, 25Mbit 2ms"
_RATE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]?)(bit(?:/s)?|bps|B/s)$")
_UNIT = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Link:
    """The link between a worker and the others.

    Attributes:
        bytes_per_s: Its bandwidth in each direction; infinite if only its latency is known.
        latency_s: Fixed time of a message; None if not given.
        held: Whether it is simulated (`--inject bandwidth=`). Then every worker delays its sent
            messages, one after the other, and messages from a server. Otherwise it is a port that
            all messages of a worker or a server share in each direction.
    """

    bytes_per_s: float
    latency_s: float | None = None
    held: bool = False

    @property
    def text(self) -> str:
        """The link in words."""
        words = []
        if self.bytes_per_s < float("inf"):
            for unit in ("G", "M", "K", ""):
                if self.bytes_per_s >= _UNIT[unit] or not unit:
                    words.append(f"{self.bytes_per_s / _UNIT[unit]:g} {unit}B/s")
                    break
        if self.latency_s is not None:
            words.append(f"{1e3 * self.latency_s:g} ms per message")
        return ", ".join(words) or "no limit"


def parse_link(text: object, latency: object = None) -> Link:
    """Return the link that a text describes.

    Args:
        text: `100Gbit` (bits), `1GB/s` (bytes); a latency may follow: `1GB/s 50us`.
        latency: The latency, `50us`, if it is not in the text.

    Raises:
        PlanError: The text is not valid, or the bandwidth is 0.
    """
    words = str(text).replace(",", " ").split()
    wait = str(latency) if latency is not None else words[1] if len(words) == 2 else None
    matched = _RATE.match(words[0]) if words and len(words) <= 2 else None
    if matched is None:
        raise PlanError(
            "The value of `link` is not valid.",
            seen=text,
            allowed=f"forms such as {FORMS}. `Gbit` means gigabits per second, and `GB/s` means "
            "gigabytes per second. A time such as `2ms` is the latency",
            code="WB-PLAN-285",
        )
    rate = float(matched[1]) * _UNIT[matched[2]] / (1.0 if matched[3] == "B/s" else 8.0)
    if not rate > 0:
        raise PlanError(
            "`link` must have a bandwidth above 0, otherwise no step would ever end.",
            seen=text,
            allowed="a bandwidth above 0",
            next_step="for example link='1Gbit'",
            code="WB-PLAN-286",
        )
    if wait is None:
        return Link(rate)
    try:
        return Link(rate, parse_duration(wait))
    except ValueError:
        raise PlanError(
            "The value of `latency` is not valid.",
            seen=wait,
            allowed="a time such as 50us, 2ms or 0.1s",
            code="WB-PLAN-287",
        ) from None


def simulated(faults: Iterable[Fault]) -> Link | None:
    """Return the link that a run's faults simulate; None if they simulate none."""
    known = list(faults)
    seconds_per_byte = sum(1 / f.bytes_per_s for f in known if f.kind == "bandwidth")
    latencies = [f.delay_s for f in known if f.kind == "latency"]
    if not latencies and not seconds_per_byte:
        return None
    rate = 1 / seconds_per_byte if seconds_per_byte else float("inf")
    return Link(rate, sum(latencies), held=True)
