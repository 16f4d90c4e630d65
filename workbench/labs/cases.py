"""Blind cases: a model, a batch, workers and their links, drawn from a seed, and how to score.

A case's card says what one would know of a cluster before renting it. How long the model computes
and what the links carry is hidden: it can be measured by probes, and shows in what runs achieve.
Each case is drawn so that one kind of traffic wins by a margin; which one is hidden too. Where
workers are equal, central storage may tie with the parameter server: a choice scores by what it
achieves, so either counts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..views.table import Column, Table
from ..views.units import size

STRATEGIES = ("one_device", "mirrored", "central_storage", "parameter_server")
"""What can be chosen; `mirrored` averages with a ring."""

BATCH = 96
_BYTES_PER_UNIT = 4 * (64 + 1 + 10)
_BYTES_BESIDE = 4 * 10
"""A network 64 - width - 10 has (64 + 1) width + 10 (width + 1) float32 parameters."""

MS = 1e-3


@dataclass(frozen=True)
class Kind:
    """What the cases of one kind have in common; ranges of seconds.

    Attributes:
        best: The strategy that wins.
        whole_s: Compute time of the whole batch on one device.
        carry_s: Time that the link takes for the model's bytes, beside its latency.
        slow: How many times as long as on the fastest each worker takes, beside the first ones.
    """

    best: str
    workers: tuple[int, ...]
    whole_s: tuple[float, float]
    latency_s: tuple[float, float]
    carry_s: tuple[float, float]
    slow: tuple[float, float] | None = None


KINDS = (
    Kind("one_device", (2, 3), (28 * MS, 40 * MS), (10 * MS, 18 * MS), (40 * MS, 60 * MS)),
    Kind("mirrored", (3,), (185 * MS, 215 * MS), (1.5 * MS, 3 * MS), (46 * MS, 54 * MS)),
    Kind("central_storage", (3,), (155 * MS, 180 * MS), (25 * MS, 30 * MS), (2 * MS, 4 * MS)),
    Kind("parameter_server", (3,), (95 * MS, 115 * MS), (1.5 * MS, 3 * MS), (5 * MS, 9 * MS),
         slow=(4, 5)),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        width: Of the network's hidden layer.
        factors: How many times as long as on the fastest worker a sample takes, by rank.
        whole_s: Hidden: compute time of the whole batch on one device.
        latency_s, bytes_per_s: Hidden: what a link takes for a message, and carries.
    """

    name: str
    workers: int
    width: int
    factors: tuple[float, ...]
    whole_s: float = field(repr=False)
    latency_s: float = field(repr=False)
    bytes_per_s: float = field(repr=False)
    batch: int = BATCH

    @property
    def size_bytes(self) -> int:
        """Bytes of the model's parameters, and of its gradients."""
        return size_of(self.width)

    @property
    def card(self) -> dict[str, Any]:
        """What is known before anything was measured."""
        return {
            "batch": self.batch, "workers": self.workers, "size_bytes": self.size_bytes,
            "factors": list(self.factors),
        }  # fmt: skip

    def faults(self, strategy: str) -> list[str]:
        """Return what is injected into a run, so that it behaves as on the case's cluster."""
        if strategy == "one_device":
            return [f"slow=0:{_ms(self.whole_s)}"]
        share_s = self.whole_s / self.workers
        slow = [f"slow={r}:{_ms(share_s * factor)}" for r, factor in enumerate(self.factors)]
        return [*slow, *self.link]

    @property
    def link(self) -> list[str]:
        """The faults that make a link what it is in this case."""
        return [f"latency={_ms(self.latency_s)}", f"bandwidth={self.bytes_per_s / 1e6:.6f}MB/s"]

    def table(self) -> Table:
        """The card as a table."""
        return cards([self])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return self.table()._repr_mimebundle_()


PRACTICE = Case("P", 3, 1000, (1.0, 1.0, 1.0), 180 * MS, 15 * MS, 10e6)
"""A case to practise on; its numbers may be told."""


def size_of(width: int) -> int:
    """Return the bytes of the network's parameters."""
    return _BYTES_PER_UNIT * width + _BYTES_BESIDE


def cards(cases: list[Case]) -> Table:
    """Return what is known of cases, side by side."""
    rows = [
        ["workers (N)", *(str(case.workers) for case in cases)],
        ["model, and gradients (M)", *(size(case.size_bytes) for case in cases)],
        ["global batch (B)", *(f"{case.batch} samples" for case in cases)],
        ["a sample takes, by worker", *(_factors(case.factors) for case in cases)],
        ["time to compute a batch on one device (T₁)", *("measure it" for _ in cases)],
        ["link: latency (α), bandwidth (β)", *("measure them" for _ in cases)],
    ]
    titles = [Column("", "left"), *(Column(f"case {case.name}") for case in cases)]
    return Table(titles, rows)


def _factors(factors: tuple[float, ...]) -> str:
    return ", ".join(f"{factor:g}x" for factor in factors)


def draw(seed: int, name: str, attempt: int = 0) -> Case:
    """Return a case; the same for the same seed, name and attempt.

    Cases `A`, `B`, `C`, `D` of one seed are of different kinds, and so are the attempts at one.
    """
    kinds = list(KINDS)
    random.Random(f"{seed}").shuffle(kinds)
    kind = kinds[(ord(name[0]) + attempt) % len(kinds)]
    rng = random.Random(f"{seed}/{name}/{attempt}")
    workers = rng.choice(kind.workers)
    width = 20 * rng.randint(25, 100)
    factors = [1.0] * workers
    if kind.slow is not None:
        factors[rng.randrange(workers)] = round(rng.uniform(*kind.slow), 1)
    whole_s, latency_s, carry_s = (
        rng.uniform(*span) for span in (kind.whole_s, kind.latency_s, kind.carry_s)
    )
    return Case(name, workers, width, tuple(factors), whole_s, latency_s, size_of(width) / carry_s)


def prediction_score(predicted: float, measured: float) -> float:
    """Return 1 for a prediction that is right, 0 for one that is off by a factor of 2 or more."""
    if not (0 < predicted < math.inf and 0 < measured < math.inf):
        return 0.0
    return max(0.0, 1 - abs(math.log2(predicted / measured)))


def choice_score(chosen: str, measured: Mapping[str, float]) -> float:
    """Return the share of the best strategy's rate that the chosen one achieved."""
    best = max(measured.values())
    return measured[chosen] / best if best > 0 else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}ms"
