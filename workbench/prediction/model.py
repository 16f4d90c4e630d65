"""One strategy with a number of workers, computed several times: seconds per step, and their parts.

Each draw is a separate run, with its own computation (`work.py`) and costs of messages (`fit.py`).
Effects outside the model are a further random factor, calibrated on training runs (`UNEXPLAINED`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .exchange import Cost, Exchange
from .pipeline import Pipe

if TYPE_CHECKING:
    from .probe import Setting
    from .work import Work

Floats = NDArray[np.float64]
CAUSES = ("own work", "waiting", "messages")
UNEXPLAINED = 0.005
"""Standard deviation of measured over predicted steps that no draw explains. Together with the next
constant it has the maximum likelihood over 110 training runs of 4 to 32 workers
(docs/measured/predictions-training.jsonl).
"""
UNEXPLAINED_PER_DOUBLING = 0.0075
"""Increase of it for each doubling of the workers above the measured number."""
MOST_COMPUTED = 40


@dataclass(frozen=True, eq=False)
class Computed:
    """Computed runs.

    Attributes:
        step_s: (draws,) mean seconds of a step.
        share: Share of each of `CAUSES` in a step; adds up to 1.
        behind: (draws,) step of the slowest worker divided by the mean step. If no worker waits for
            another, the run ends with the slowest worker. Otherwise it is 1.
    """

    step_s: Floats
    share: tuple[float, ...]
    behind: Floats

    @property
    def end_s(self) -> Floats:
        """(draws,) seconds of the run divided by its steps."""
        return self.step_s * self.behind


@dataclass(frozen=True, eq=False)
class Case:
    """The setting to compute.

    Attributes:
        message_bytes: Size of a worker's gradients as sent; NaN if nothing is sent.
        scale: (draws,) factor on computation for a different number of samples per worker.
        steps: Number of steps of the predicted run.
        seen_workers: Largest number of workers among the measured runs.
    """

    setting: Setting
    work: Work
    message_bytes: float
    scale: Floats
    cost: Cost
    steps: int
    seen_workers: int
    first: int = 0


def compute(case: Case, seed: int = 2027, *, noisy: bool = True) -> Computed:
    """Return runs of a case.

    Args:
        noisy: Whether the spread includes effects outside the model.
    """
    rng = np.random.default_rng(seed)
    draws, n = len(case.scale), case.setting.workers
    every = int(case.setting.options.get("every", 1) or 1)
    steps = min(case.steps, max(MOST_COMPUTED, 2 * every))
    drawn = (
        _stages(case, rng, steps) if case.setting.piped else case.work.draw(rng, draws, steps, n)
    )
    scale = case.scale[:, None, None]
    scaled = drawn * scale
    if not case.setting.piped:
        scaled += case.work.injected(drawn) * (1 - scale)  # an injected delay is not divided
    own = np.ascontiguousarray(scaled.transpose(1, 2, 0))
    mean, together = own.mean(axis=(0, 1)), np.ones(draws)
    if n == 1 or not (case.message_bytes > 0 or case.setting.piped):
        return _spread(Computed(mean, (1.0, 0.0, 0.0), together), case, rng, noisy=noisy)
    exchange = exchange_of(case.setting, case.message_bytes)
    period = exchange.period(own, case.cost, case.first)
    behind = together
    if case.setting.alone and isinstance(exchange, Exchange):
        behind = _behind(exchange.paces(own, case.cost), own, case.steps)
    even = np.broadcast_to(mean, own.shape)
    free = exchange.period(even, _free(case.cost), case.first)
    messages = exchange.period(even, case.cost, case.first) - free
    whole = float(np.median(period))
    busy = min(float(np.median(mean)) / whole, 1.0)
    sent = min(max(float(np.median(messages)) / whole, 0.0), 1.0 - busy)
    share = (busy, 1.0 - busy - sent, sent)
    found = Computed(_lengthened(period, own, case), share, behind)
    return _spread(found, case, rng, noisy=noisy)


def _behind(pace: Floats, own: Floats, count: int) -> Floats:
    """Return the slowest worker's step divided by the mean step, for a run of `count` steps.

    The chance of single steps makes workers of equal speed differ, but less in a longer run.

    Args:
        pace: (workers, draws) mean step of each worker over the computed steps.
        own: (steps, workers, draws) seconds of computation.
    """
    steps = len(own)
    mean = pace.mean(axis=0)
    spread = pace.var(axis=0).mean()
    chance = own.var(axis=0).mean() / steps
    kept = max(spread - chance, 0.0) + min(chance, spread) * steps / max(count, steps)
    return np.asarray(1 + (pace.max(axis=0) / mean - 1) * np.sqrt(kept / max(spread, 1e-30)))


def _lengthened(period: Floats, own: Floats, case: Case) -> Floats:
    """Return the spread of steps for runs with the requested number of steps, if larger than
    computed.

    The variation of a run shrinks with its number of steps; the uncertainty of the probes does not.
    """
    steps = len(own)
    if case.steps <= steps:
        return period
    alone = case.setting.alone or case.setting.piped
    pace = own.mean(axis=1) if alone else own.max(axis=1)
    own_var = float(pace.var(axis=0).mean())
    before = float(period.var())
    after = max(before - own_var / steps + own_var / case.steps, 0.1 * before)
    middle = np.median(period)
    return np.asarray(middle + (period - middle) * np.sqrt(after / max(before, 1e-30)))


def exchange_of(setting: Setting, message_bytes: float) -> Exchange | Pipe:
    """Return the object that computes a strategy's messages."""
    return (Pipe if setting.piped else Exchange)(setting, message_bytes)


def _stages(case: Case, rng: np.random.Generator, steps: int) -> Floats:
    """Return the busy time of stages, (draws, steps, workers); stages of a step stay together."""
    busy, n = case.work.own_s, case.setting.workers
    if n != busy.shape[1]:
        busy = np.repeat(busy.sum(axis=1, keepdims=True) / n, n, axis=1)
    draws, count = len(case.scale), len(busy)
    again = rng.integers(0, count, (draws, count))
    index = np.take_along_axis(again, rng.integers(0, count, (draws, steps)), axis=1)
    return np.asarray(busy[index])


def _free(cost: Cost) -> Cost:
    none = np.zeros_like(cost.message_s)
    return Cost.plain(none, none, held=cost.held)


def _spread(found: Computed, case: Case, rng: np.random.Generator, *, noisy: bool) -> Computed:
    """Add the effects outside the model."""
    step_s = found.step_s
    if noisy:
        doublings = max(np.log2(case.setting.workers / max(case.seen_workers, 1)), 0.0)
        spread = np.hypot(UNEXPLAINED, UNEXPLAINED_PER_DOUBLING * doublings)
        step_s = step_s * np.exp(rng.normal(0.0, spread, len(step_s)))
    return replace(found, step_s=step_s)
