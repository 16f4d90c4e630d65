"""Seconds per message and per byte, found from short runs.

A run is simulated with its own measured computation. The two numbers are chosen so that its steps
take as long as measured. A run with one kind of message gives one equation for two unknowns. Then
each draw divides the time between messages and bytes at random, and the interval shows this
uncertainty. Runs whose messages differ in number and size (another all-reduce, half precision,
another model) determine both numbers, by least squares of relative errors.

If a link is simulated, its own time is known, and the fit finds the workers' remaining time.
Each draw uses different blocks of the run's steps (moving blocks: Kuensch, Annals of
Statistics 17(3), 1989).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .exchange import Cost, Exchange
from .pipeline import Pipe

if TYPE_CHECKING:
    from .link import Link
    from .probe import Probe

Floats = NDArray[np.float64]
_ROUNDS, _MOST_STEPS, _BLOCK = 8, 160, 10
_APART = 1.25
"""Two runs separate the costs of messages and bytes if their proportions differ by this factor."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """The fitted costs, by draw.

    Attributes:
        message_s, byte_s: (draws,) costs of the link if it is real; otherwise the workers'
        additional costs.
        link: The simulated link of the runs' faults; None: the link is real.
        settled: Whether the costs of messages and bytes can be separated.
        runs: Number of runs with messages.
    """

    message_s: Floats
    byte_s: Floats
    link: Link | None
    settled: bool
    runs: int

    def cost(self, link: Link | None) -> Cost:
        """Return the cost of messages.

        Args:
            link: A link that replaces the measured link; None: the measured link.
        """
        none = np.zeros_like(self.message_s)
        if self.link is not None:
            if link is not None and link.latency_s is None:
                link = replace(link, latency_s=self.link.latency_s)
            return _held(link or self.link, (self.message_s, self.byte_s))
        if link is None:
            return Cost.plain(self.message_s, self.byte_s)
        message_s = self.message_s if link.latency_s is None else none + link.latency_s
        return Cost(
            message_s, none + 1 / link.bytes_per_s, none, none, self.message_s, self.byte_s
        )  # fmt: skip


def _held(link: Link, soft: tuple[Floats, Floats]) -> Cost:
    none = np.zeros_like(soft[0])
    return Cost.plain(
        none + (link.latency_s or 0.0), none + 1 / link.bytes_per_s, soft, held=True
    )  # fmt: skip


def fit(probes: Sequence[Probe], rng: np.random.Generator, draws: int) -> Fitted | None:
    """Return the message costs from runs; None if no run had messages.

    Args:
        probes: Runs that all have the same simulated link, or all have none.
    """
    talking = [p for p in probes if p.workers > 1 and p.message_bytes > 0]
    if not talking:
        return None
    link = talking[0].link
    exchanges = [
        (Pipe if p.setting.piped else Exchange)(p.setting, p.message_bytes) for p in talking
    ]
    samples = [_resampled(p, rng, draws) for p in talking]
    unit = [_units(exchange, probe) for exchange, probe in zip(exchanges, talking, strict=True)]
    ratios = np.array([messages / max(size, 1e-300) for messages, size in unit])
    settled = len(talking) > 1 and bool(ratios.max() > _APART * ratios.min())

    def computed(k: int, a: Floats, b: Floats) -> Floats:
        own, _, first = samples[k]
        cost = Cost.plain(a, b) if link is None else _held(link, (a, b))
        return exchanges[k].period(own, cost, first)

    if settled:
        a, b = _two(computed, [s[1] for s in samples], unit)
    else:
        share = rng.random(draws)
        each = [_one(computed, k, samples[k][1], share, unit[k]) for k in range(len(talking))]
        a = np.mean([one[0] for one in each], axis=0)
        b = np.mean([one[1] for one in each], axis=0)
    return Fitted(a, b, link, settled, len(talking))


def _units(exchange: Exchange | Pipe, probe: Probe) -> tuple[float, float]:
    """Return the numbers of consecutive messages and bytes in a step."""
    steps = 24 if probe.setting.workers < 64 else 8
    own = np.zeros((steps, probe.workers, 1))
    none, one = np.zeros(1), np.ones(1)
    messages = exchange.period(own, Cost.plain(one, none), probe.first)
    size = exchange.period(own, Cost.plain(none, one), probe.first)
    return float(messages[0]), float(size[0])


def _resampled(probe: Probe, rng: np.random.Generator, draws: int) -> tuple[Floats, Floats, int]:
    """Return computation (steps, workers, draws) and the mean step (draws,) of blocks of steps."""
    every = int(probe.setting.options.get("every", 1) or 1)
    block = every * max(1, -(-_BLOCK // every))
    own, step_s = probe.own_s[-_MOST_STEPS:], probe.step_s[-_MOST_STEPS:]
    first = probe.first + len(probe.own_s) - len(own)
    skip = -first % every  # blocks begin where a round does
    own, step_s, first = own[skip:], step_s[skip:], first + skip
    whole = len(own) // block
    if whole < 2:
        return np.repeat(own[:, :, None], draws, axis=2), np.full(draws, step_s.mean()), first
    starts = rng.integers(0, (len(own) - block) // every + 1, (whole, draws)) * every
    starts[:, 0] = np.arange(whole) * block
    index = (starts[:, None, :] + np.arange(block)[None, :, None]).reshape(-1, draws)
    return np.moveaxis(own[index], 1, 2), step_s[index].mean(axis=0), first


def _one(
    computed: object, k: int, wanted: Floats, share: Floats, unit: tuple[float, float]
) -> tuple[Floats, Floats]:
    """Solve for one run; `share` of its time belongs to the messages."""
    spent = np.zeros_like(wanted)
    for _ in range(_ROUNDS):
        a, b = _split(spent, share, unit)
        spent = np.maximum(spent + wanted - computed(k, a, b), 0.0)  # type: ignore[operator]
    return _split(spent, share, unit)


def _split(spent: Floats, share: Floats, unit: tuple[float, float]) -> tuple[Floats, Floats]:
    messages, size = unit
    return spent * share / max(messages, 1e-12), spent * (1 - share) / max(size, 1e-12)


def _two(
    computed: object, wanted: Sequence[Floats], unit: Sequence[tuple[float, float]]
) -> tuple[Floats, Floats]:
    """Solve for several runs with Gauss-Newton steps; results are never below 0."""
    draws = len(wanted[0])
    a, b = np.zeros(draws), np.zeros(draws)
    # Time that workers wait for others hides messages, so slopes are at most those of the messages.
    weights = [1 / w for w in wanted]
    for _ in range(2 * _ROUNDS):
        left = [w - computed(k, a, b) for k, w in enumerate(wanted)]  # type: ignore[operator]
        aa = sum((u[0] * q) ** 2 for u, q in zip(unit, weights, strict=True))
        bb = sum((u[1] * q) ** 2 for u, q in zip(unit, weights, strict=True))
        ab = sum(u[0] * u[1] * q * q for u, q in zip(unit, weights, strict=True))
        ra = sum(u[0] * q * q * r for u, q, r in zip(unit, weights, left, strict=True))
        rb = sum(u[1] * q * q * r for u, q, r in zip(unit, weights, left, strict=True))
        # The normal equations around the current point, for the new values of both unknowns.
        ta, tb = aa * a + ab * b + ra, ab * a + bb * b + rb
        det = np.maximum(aa * bb - ab * ab, 1e-300)
        na, nb = (bb * ta - ab * tb) / det, (aa * tb - ab * ta) / det
        only_b, only_a = np.maximum(tb / bb, 0.0), np.maximum(ta / aa, 0.0)
        nb = np.where(na < 0, only_b, nb)
        na = np.maximum(na, 0.0)
        na = np.where(nb < 0, only_a, na)
        a, b = na, np.maximum(nb, 0.0)
    return np.asarray(a), np.asarray(b)
