"""Blind tasks: probe a case, seal a prediction, run it, and be scored.

`from workbench.labs import blind` in a notebook. A prediction counts only where it was sealed
before anything of its case was run; a case that was run comes back with other numbers.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from ..errors import PlanError, unknown
from ..session.run import Run
from ..views.table import Column, Table
from ..views.units import UNKNOWN, number
from .cases import PRACTICE, STRATEGIES, Case, choice_score, draw, prediction_score
from .cases import cards as _cards
from .probing import PROBE_STEPS, STEPS, message_s, rate_of, train


@dataclass
class Play:
    """One drawing of a case: what was sealed, and what was run.

    Attributes:
        late: Whether something of the case had been run when the prediction was sealed.
        sealed_at: Seconds since the epoch; NaN while nothing is sealed.
        runs: By strategy.
    """

    case: Case
    strategy: str = ""
    predicted: float = math.nan
    sealed_at: float = math.nan
    late: bool = False
    runs: dict[str, Run] = field(default_factory=dict)

    @property
    def sealed(self) -> bool:
        """Whether there is a prediction."""
        return bool(self.strategy)

    @property
    def measured(self) -> dict[str, float]:
        """Samples per second of each strategy that was run."""
        return {name: rate_of(run) for name, run in self.runs.items()}

    @property
    def complete(self) -> bool:
        """Whether a prediction can be scored."""
        return self.sealed and set(self.runs) == set(STRATEGIES)

    @property
    def honest(self) -> bool:
        """Whether the prediction was sealed before every run."""
        first = min((run.began for run in self.runs.values()), default=math.inf)
        return self.sealed and not self.late and self.sealed_at <= first

    @property
    def factor(self) -> float:
        """How far the prediction is off: predicted over measured."""
        return self.predicted / self.measured[self.strategy]

    @property
    def scores(self) -> tuple[float, float]:
        """Points for the prediction and for the choice, each 0..1."""
        measured = self.measured
        points = prediction_score(self.predicted, measured[self.strategy])
        return points if self.honest else 0.0, choice_score(self.strategy, measured)


_plays: dict[str, list[Play]] = {}
_seed = 0


def begin(seed: int = 0) -> None:
    """Begin anew: cases are drawn from this seed, and nothing is sealed."""
    global _seed
    _seed = int(seed)
    _plays.clear()


def practice() -> Case:
    """Return the case to practise on; it is always the same."""
    return _latest(PRACTICE.name).case


def case(name: str) -> Case:
    """Return a case by its letter; one that was run comes back with other numbers.

    Raises:
        PlanError: It is no letter from A to D.
    """
    if name not in tuple("ABCD"):
        raise unknown("case", str(name), "ABCD")
    if _latest(name).runs:
        _plays[name].append(Play(draw(_seed, name, len(_plays[name]))))
        print(f"Case {name} has been run; these are new numbers for it.")  # noqa: T201
    return _latest(name).case


def cards(*names: str) -> Table:
    """Return what is known of cases before anything is measured."""
    return _cards([_latest(name).case for name in names])


def plays(name: str) -> list[Play]:
    """Return all drawings of a case, the newest last."""
    return _plays.get(name, [])


def latest(name: str) -> Play | None:
    """Return the newest drawing of a case; None where it was not asked for."""
    return _plays[name][-1] if name in _plays else None


def _latest(name: str) -> Play:
    if name not in _plays:
        _plays[name] = [Play(PRACTICE if name == PRACTICE.name else draw(_seed, name))]
    return _plays[name][-1]


def _play_of(case: Case) -> Play:
    play = latest(case.name) if isinstance(case, Case) else None
    if play is None or play.case != case:
        raise PlanError(
            "This is no case that is open.",
            seen=case,
            allowed="what blind.practice() and blind.case() returned last",
            next_step='case = blind.case("A")',
            code="WB-PLAN-046",
        )
    return play


# -- measuring -----------------------------------------------------------------------------------


def time_step(case: Case) -> float:
    """Probe: the seconds that one device takes for a step with the whole batch."""
    _play_of(case)
    return case.batch / rate_of(train(case, "one_device", f"{case.name}-probe", PROBE_STEPS))


def time_message(case: Case, size_bytes: int) -> float:
    """Probe: the seconds that a message of `size_bytes` takes between two workers of the case.

    Raises:
        PlanError: The size is no whole number above 0.
    """
    _play_of(case)
    if not isinstance(size_bytes, (int, np.integer)) or size_bytes < 1:
        raise PlanError(
            "A message has a size.",
            seen=size_bytes,
            allowed="bytes, at least 1",
            code="WB-PLAN-047",
        )
    return message_s(case, int(size_bytes))


def measure(case: Case, strategy: str) -> float:
    """Run a strategy on the case's cluster and return its samples per second.

    Raises:
        PlanError: There is no such strategy among those that can be chosen.
    """
    play = _play_of(case)
    if strategy not in STRATEGIES:
        raise unknown("strategy", str(strategy), STRATEGIES)
    if strategy not in play.runs:
        play.runs[strategy] = train(case, strategy, f"{case.name}-{strategy}", STEPS)
    return rate_of(play.runs[strategy])


# -- the task ------------------------------------------------------------------------------------


def seal(case: Case, strategy: object, samples_per_s: object) -> None:
    """Seal a prediction: from now on it counts, and running the case opens it.

    Says what is missing where it cannot be sealed.
    """
    play = _play_of(case)
    words = _flaw(strategy, samples_per_s)
    if words:
        print(f"Nothing was sealed: {words}.")  # noqa: T201
        return
    if play.runs and play.honest:
        print(f"Case {case.name} is open: its sealed prediction stays as it was.")  # noqa: T201
        return
    play.strategy, play.predicted = str(strategy), float(samples_per_s)  # type: ignore[arg-type]
    play.sealed_at, play.late = time.time(), bool(play.runs)
    print(  # noqa: T201
        f"Case {case.name} is sealed at {time.strftime('%H:%M:%S')}: {play.strategy}, "
        f"{number(play.predicted)} samples/s."
    )


def _flaw(strategy: object, samples_per_s: object) -> str:
    if strategy is None or samples_per_s is None:
        return "a strategy and samples per second are needed"
    if strategy not in STRATEGIES:
        return f"{strategy!r} is none of {', '.join(STRATEGIES)}"
    try:
        value = float(samples_per_s)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"{samples_per_s!r} is no number"
    return "" if 0 < value < math.inf else f"{value} samples per second cannot be"


def run(case: Case) -> Table | None:
    """Run what was sealed, then all others, and return the scores; nothing without a seal."""
    play = _play_of(case)
    if not play.sealed:
        print(f"Seal a prediction for case {case.name} first: blind.seal(...).")  # noqa: T201
        return None
    for strategy in (play.strategy, *STRATEGIES):
        measure(case, strategy)
    return _result(play)


def _result(play: Play) -> Table:
    measured = play.measured
    best = max(measured, key=measured.__getitem__)
    rows = [
        [
            strategy,
            number(play.predicted) if strategy == play.strategy else "",
            number(measured[strategy]),
            f"{measured[strategy] / measured[best] * 100:.0f} %",
        ]
        for strategy in sorted(measured, key=measured.__getitem__, reverse=True)
    ]
    columns = [Column("", "left"), Column("predicted"), Column("samples/s"), Column("of the best")]
    mine = next(i for i, row in enumerate(rows) if row[0] == play.strategy)
    return Table(columns, rows, f"case {play.case.name}", [_words(play)], frozenset({mine}))


def _words(play: Play) -> str:
    prediction, choice = play.scores
    said = f"Prediction {prediction:.2f}, choice {choice:.2f} of 1."
    if play.honest:
        return said
    return f"{said} The prediction does not count: it was sealed after the case had been run."


def score() -> Table:
    """Return a table of the cases that were played, and their points."""
    rows, total = [], 0.0
    for name, plays in sorted(_plays.items()):
        for play in plays:
            if not play.complete or name == PRACTICE.name:
                continue
            points = play.scores
            total += sum(points)
            rows.append([name, play.strategy, f"{play.factor:.2f}", *(f"{p:.2f}" for p in points)])
    title = f"{total:.2f} of {2 * len(rows)} points" if rows else "no case was run yet"
    columns = [
        Column("case", "left"), Column("chosen", "left"), Column("predicted / measured"),
        Column("prediction"), Column("choice"),
    ]  # fmt: skip
    return Table(columns, rows or [[UNKNOWN] * len(columns)], title)
