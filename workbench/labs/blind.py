"""Blind tasks: probe a case, seal a prediction, run it, and be scored.

`from workbench.labs import blind` in a notebook. A prediction counts only if it was sealed before
any run of its case; a case that was run comes back with other numbers.

A case is a model, a batch, workers and their links. A seed draws its numbers, and `play_as` makes
the seed from a student's name. Runs and messages behave as on this cluster, because its delays are
injected.

A case's card says what a customer knows about a cluster before renting it. The compute time of the
model, and the latency and bandwidth of the links, are hidden: probes can measure them, and the
results of runs depend on them. In each case one kind of traffic wins by a margin.
The card does not say which kind. If workers are equal, central storage may tie with the parameter
server. A choice gets points for its samples per second, so both choices count the same then.
"""

from __future__ import annotations

import math
import random
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import PlanError, unknown
from ..execution.stop import ending
from ..notebook.session import session
from ..views.table import Column, Table
from ..views.text import UNKNOWN, number, size

if TYPE_CHECKING:
    from ..execution.run import Run


@dataclass
class Play:
    """One drawing of a case: what was sealed, and what was run.

    Attributes:
        late: Whether the case had already been run when the prediction was sealed.
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
_student = ""
_of_others: dict[str, dict[str, list[Play]]] = {}
"""The plays of students who are not playing now: a name that comes back has no fresh case."""


def begin(seed: int = 0) -> None:
    """Begin again: cases are drawn from this seed, nothing is sealed, and no student plays."""
    global _seed, _student
    _seed, _student = int(seed), ""
    _plays.clear()
    _of_others.clear()


def play_as(student: str) -> None:
    """Draw cases for a student from now on; what this student has sealed and run stays.

    Args:
        student: The student's name. Case and spaces at its ends do not matter.
    """
    global _seed, _student
    name = spelled(student)
    if name == _student:
        return
    _of_others[_student] = dict(_plays)
    _plays.clear()
    _plays.update(_of_others.pop(name, {}))
    _seed, _student = seed_of(name), name


def student_now() -> str:
    """Return the name of the student who plays, in small letters; empty if nobody said it."""
    return _student


def spelled(student: str) -> str:
    """Return a name in small letters, with single spaces."""
    return " ".join(str(student).split()).casefold()


def seed_of(student: str) -> int:
    """Return the seed of a student's cases; the same on each computer."""
    return zlib.crc32(spelled(student).encode())


def practice() -> Case:
    """Return the case to practise on; it is always the same."""
    return _latest(PRACTICE.name).case


def case(name: str, student: str | None = None) -> Case:
    """Return a case by its letter; one that was run comes back with other numbers.

    Args:
        student: Whose case it is, as in `play_as`; None for the student who plays now.

    Raises:
        PlanError: It is not a letter from A to D.
    """
    if name not in tuple("ABCD"):
        raise unknown("case", str(name), "ABCD")
    if student is not None:
        play_as(student)
    if _latest(name).runs:
        _plays[name].append(Play(draw(_seed, name, len(_plays[name]))))
        words = f"Case {name} has been run before. This is a new case {name}, with new numbers."
        print(words)  # noqa: T201
    return _latest(name).case


def cards(*names: str, student: str | None = None) -> Table:
    """Return a table of what is known about cases before anything is measured.

    Args:
        student: Whose cases these are, as in `play_as`; None for the student who plays now.
    """
    if student is not None:
        play_as(student)
    return case_cards([_latest(name).case for name in names])


def plays(name: str) -> list[Play]:
    """Return all drawings of a case, the newest last."""
    return _plays.get(name, [])


def latest(name: str) -> Play | None:
    """Return the newest drawing of a case; None if nobody asked for it."""
    return _plays[name][-1] if name in _plays else None


def _latest(name: str) -> Play:
    if name not in _plays:
        _plays[name] = [Play(PRACTICE if name == PRACTICE.name else draw(_seed, name))]
    return _plays[name][-1]


def _play_of(case: Case) -> Play:
    play = latest(case.name) if isinstance(case, Case) else None
    if play is None or play.case != case:
        name = case.name if isinstance(case, Case) else "A"
        call = "blind.practice()" if name == PRACTICE.name else f'blind.case("{name}")'
        raise PlanError(
            "The case that you passed is not the current case.",
            seen=case,
            allowed="the case that the latest call of blind.practice() or blind.case() returned",
            next_step=f"case = {call}",
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
        PlanError: The size is not a whole number above 0.
    """
    _play_of(case)
    if not isinstance(size_bytes, (int, np.integer)) or size_bytes < 1:
        raise PlanError(
            "size_bytes must be a whole number of at least 1.",
            seen=size_bytes,
            allowed="a number of bytes, at least 1",
            code="WB-PLAN-047",
        )
    return message_s(case, int(size_bytes))


def measure(case: Case, strategy: str) -> float:
    """Run a strategy on the case's cluster and return its samples per second.

    Raises:
        PlanError: The strategy is not one of those that can be chosen.
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

    If it cannot be sealed, it prints what is missing.
    """
    play = _play_of(case)
    words = _flaw(strategy, samples_per_s)
    if words:
        print(f"Nothing was sealed: {words}.")  # noqa: T201
        return
    if play.runs and play.honest:
        print(  # noqa: T201
            f"Case {case.name} has been run already, so its sealed prediction cannot change."
        )
        return
    play.strategy, play.predicted = str(strategy), float(samples_per_s)  # type: ignore[arg-type]
    play.sealed_at, play.late = time.time(), bool(play.runs)
    print(  # noqa: T201
        f"The prediction for case {case.name} was sealed at {time.strftime('%H:%M:%S')}: "
        f"{play.strategy}, {number(play.predicted)} samples/s."
    )


def _flaw(strategy: object, samples_per_s: object) -> str:
    if strategy is None or samples_per_s is None:
        return "give a strategy and the predicted samples per second"
    if strategy not in STRATEGIES:
        return f"{strategy!r} is not one of {', '.join(STRATEGIES)}"
    try:
        value = float(samples_per_s)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"{samples_per_s!r} is not a number"
    return "" if 0 < value < math.inf else f"{value} samples per second are impossible"


def run(case: Case) -> Table | None:
    """Run what was sealed, then all others, and return the scores; nothing without a seal."""
    play = _play_of(case)
    if not play.sealed:
        print(f"First seal a prediction for case {case.name} with blind.seal(...).")  # noqa: T201
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
    said = f"Points: prediction {prediction:.2f} of 1, choice {choice:.2f} of 1."
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
    title = (
        f"{total:.2f} of {2 * len(rows)} points" if rows else "no case from A to D has points yet"
    )
    columns = [
        Column("case", "left"), Column("chosen", "left"), Column("predicted / measured"),
        Column("prediction"), Column("choice"),
    ]  # fmt: skip
    return Table(columns, rows or [[UNKNOWN] * len(columns)], title)


STEPS, PROBE_STEPS, WARM_UP = 9, 6, 2
MESSAGES = 6

_OPTIONS: dict[str, dict[str, Any]] = {"mirrored": {"allreduce": "ring"}}
_RECIPE = """
import torch
from torch import nn
model = nn.Sequential(nn.Flatten(), nn.Linear(64, {width}), nn.Tanh(), nn.Linear({width}, 10))
wb.fit(model, wb.data.digits("train"), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.05), batch_size={batch})
"""
_MESSAGE = """
import time as _time
import torch
from workbench.engine.telemetry.step_gate import FaultInjector as _FaultInjector
_faults = _FaultInjector(rank, {faults})
_message, _message_s = torch.zeros({size_bytes}, dtype=torch.uint8), []
for _ in range({messages}):
    _began = _time.perf_counter()
    for _sender in (0, 1):
        if rank == _sender:
            _faults.travel({size_bytes})
            dist.send(_message, 1 - rank)
        else:
            dist.recv(_message, 1 - rank)
    _message_s.append((_time.perf_counter() - _began) / 2)
del _time, _FaultInjector, _faults, _message, _began, _sender
"""


def train(case: Case, strategy: str, name: str, steps: int) -> Run:
    """Train the case's model with a strategy, on the workers and links of the case."""
    cluster = session.need_cluster()
    with ending(cluster):
        run = cluster.run(
            _RECIPE.format(width=case.width, batch=case.batch),
            strategy=strategy,
            workers=1 if strategy == "one_device" else case.workers,
            framework="torch",
            options=_OPTIONS.get(strategy),
            name=name,
            inject=case.faults(strategy),
            steps=steps,
        )
        return run.wait()


def rate_of(run: Run) -> float:
    """Return samples per second: the sum over workers of their samples over their typical step.

    The typical step is the median after warm-up, so a short delay of this machine does not count,
    and neither does the end in which the slowest of asynchronous workers trains alone.
    """
    history = run.history
    ranks, late = history["rank"], history["step"] >= WARM_UP
    rates = [
        np.mean(history["samples"][mine]) / np.median(history["step_s"][mine])
        for mine in (late & (ranks == rank) for rank in np.unique(ranks))
    ]
    return float(sum(rates))


def message_s(case: Case, size_bytes: int) -> float:
    """Return the seconds of a message between two workers: the shortest of several round trips."""
    source = _MESSAGE.format(faults=case.link, size_bytes=size_bytes, messages=MESSAGES)
    cluster = session.need_cluster()
    with ending(cluster):
        task = cluster.execute(source, framework="torch", workers=2)
        task.over.wait()
    if (error := task.failure()) is not None:
        raise error
    found = cluster.pull(["_message_s"], task.ids[:1])
    return float(min(found[task.ids[0]]["_message_s"]))


STRATEGIES = ("one_device", "mirrored", "central_storage", "parameter_server")
"""The strategies that can be chosen; `mirrored` averages with a ring."""

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
        carry_s: Time that the link takes for the model's bytes, without its latency.
        slow: The range of the factor by which one worker is slower than the fastest.
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
        latency_s, bytes_per_s: Hidden: the link's latency and bandwidth.
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

    @property
    def numbers(self) -> list[float]:
        """All numbers of the case, the hidden ones too, in a fixed order."""
        hidden = [self.whole_s, self.latency_s, self.bytes_per_s]
        return [float(self.workers), float(self.width), *self.factors, *hidden]

    def faults(self, strategy: str) -> list[str]:
        """Return the faults that make a run behave as on the case's cluster."""
        if strategy == "one_device":
            return [f"slow=0:{_ms(self.whole_s)}"]
        share_s = self.whole_s / self.workers
        slow = [f"slow={r}:{_ms(share_s * factor)}" for r, factor in enumerate(self.factors)]
        return [*slow, *self.link]

    @property
    def link(self) -> list[str]:
        """The faults that simulate a link of this case."""
        return [f"latency={_ms(self.latency_s)}", f"bandwidth={self.bytes_per_s / 1e6:.6f}MB/s"]

    def table(self) -> Table:
        """The card as a table."""
        return case_cards([self])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return self.table()._repr_mimebundle_()


PRACTICE = Case("P", 3, 1000, (1.0, 1.0, 1.0), 180 * MS, 15 * MS, 10e6)
"""A case to practise on; its numbers are no secret."""


def size_of(width: int) -> int:
    """Return the bytes of the network's parameters."""
    return _BYTES_PER_UNIT * width + _BYTES_BESIDE


def case_cards(cases: list[Case]) -> Table:
    """Return a table of what is known about cases, side by side."""
    rows = [
        ["workers (N)", *(str(case.workers) for case in cases)],
        ["model, and gradients (M)", *(size(case.size_bytes) for case in cases)],
        ["global batch (B)", *(f"{case.batch} samples" for case in cases)],
        [
            "time for a sample, relative to the fastest worker",
            *(_factors(case.factors) for case in cases),
        ],
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
    """Return 1 for a right prediction, 0 for one that is wrong by a factor of 2 or more."""
    if not (0 < predicted < math.inf and 0 < measured < math.inf):
        return 0.0
    return max(0.0, 1 - abs(math.log2(predicted / measured)))


def choice_score(chosen: str, measured: Mapping[str, float]) -> float:
    """Return the rate of the chosen strategy as a fraction of the best one."""
    best = max(measured.values())
    return measured[chosen] / best if best > 0 else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}ms"
