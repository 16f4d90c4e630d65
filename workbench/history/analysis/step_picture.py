"""One measured step: a strategy's diagram with the measured values of this step.

A worker measures only the total of its sent bytes. If the diagram's formulas tell how this total
divides over the worker's arrows, each arrow gets its share. Values that no formula gives (the size
of activations) or that no process measures (bytes sent by servers and TensorFlow) stay NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import RunError
from ...shared.events import Topic
from ...shared.record import PARTS

if TYPE_CHECKING:
    from ...catalog.diagrams import Arrow, Diagram
    from ..events import Story
    from ..snapshot import Split
    from ..store import RunHistory


@dataclass(frozen=True)
class WorkerStep:
    """One worker's row of the step.

    Attributes:
        step: The worker's step number if each worker steps alone.
        start_s: Seconds after the first worker began.
        parts_s: Seconds in each of `record.PARTS`; NaN where not measured.
        sent_bytes: Its bytes sent in total; NaN where not measured.
        staleness: Staleness in asynchronous strategies; NaN in others.
        blamed: The worker it waited for; None if it waited for none.
    """

    rank: int
    step: int
    start_s: float
    step_s: float
    parts_s: tuple[float, ...]
    sent_bytes: float
    staleness: float
    loss: float
    blamed: int | None


@dataclass(frozen=True)
class StepPicture:
    """A measured step.

    Attributes:
        run: The run's name.
        arrow_bytes: Bytes by (phase, arrow) of the diagram; NaN where not measured. Phases that
            were not part of this step have no bytes.
    """

    run: str
    step: int
    diagram: Diagram
    workers: tuple[WorkerStep, ...]
    arrow_bytes: Mapping[tuple[int, int], float]

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data that a browser can animate; None for values not measured."""
        wire = self.diagram.to_wire()
        for p, (phase, drawn) in enumerate(zip(self.diagram.phases, wire["phases"], strict=True)):
            drawn["happens"] = phase.happens(self.step)
            for a, arrow in enumerate(drawn["arrows"]):
                arrow["bytes"] = _known(self.arrow_bytes.get((p, a), math.nan))
        return {
            "run": self.run, "step": self.step, "parts": list(PARTS), "diagram": wire,
            "workers": [
                {
                    name: [_known(v) for v in value] if isinstance(value, tuple) else _known(value)
                    for name, value in vars(worker).items()
                }
                for worker in self.workers
            ],
        }  # fmt: skip


def step_picture(
    history: RunHistory, diagram: Diagram, *, run: str = "", step: int | None = None
) -> StepPicture:
    """Return what happened in a step.

    Args:
        diagram: The diagram of the run's strategy, with its options and number of workers.
        step: Its number; by default the latest step that all workers have done. If each worker
            steps alone, the latest step of each worker.

    Raises:
        RunError: No such step is stored.
    """
    every = history.together(*_READ, *PARTS)
    number, rows = _rows(history, every["step"], every["rank"], step)
    columns = {name: values[rows] for name, values in every.items()}
    begin = float(np.nanmin(columns["start_s"]))
    workers = tuple(_worker(columns, at, begin) for at in range(len(rows)))
    sent = {worker.rank: worker.sent_bytes for worker in workers}
    units = handed_bytes(history.story.split) | part_bytes(history.story.servers)
    return StepPicture(run, number, diagram, workers, share_out(diagram, number, sent, units))


_READ = (
    "rank", "step", "start_s", "step_s", "sent_bytes", "staleness", "local_loss", "blamed_rank",
)  # fmt: skip


def _rows(
    history: RunHistory, steps: NDArray[Any], ranks: NDArray[Any], step: int | None
) -> tuple[int, NDArray[np.intp]]:
    """Return the step's number and its rows, by rank."""
    if not len(steps):
        raise RunError(
            "The run has not completed a step.",
            next_step="if the run still trains, wait for its first step",
            code="WB-RUN-043",
        )
    if step is None and not history.joined:
        latest = {int(rank): at for at, rank in enumerate(ranks)}
        rows = np.asarray([latest[rank] for rank in sorted(latest)], np.intp)
        return int(steps[rows].max()), rows
    if step is None:
        numbers, counts = np.unique(steps, return_counts=True)
        # The latest row may be of a step that others have not reported, or of fewer workers.
        last = counts[-2:].max() if len(counts) > 1 else counts[-1]
        step = int(numbers[counts >= last][-1])
    rows = np.flatnonzero(steps == step)
    if not len(rows):
        every = f", but only multiples of {history.stride} are stored" if history.stride > 1 else ""
        raise RunError(
            "This step is not in the history.", seen=f"step={step}",
            allowed=f"steps {steps[0]} to {steps[-1]}{every}",
            code="WB-RUN-044",
        )  # fmt: skip
    return step, rows


def _worker(columns: Mapping[str, NDArray[Any]], at: int, begin: float) -> WorkerStep:
    blamed = int(columns["blamed_rank"][at])
    return WorkerStep(
        int(columns["rank"][at]), int(columns["step"][at]),
        float(columns["start_s"][at]) - begin, float(columns["step_s"][at]),
        tuple(float(columns[name][at]) for name in PARTS), float(columns["sent_bytes"][at]),
        float(columns["staleness"][at]), float(columns["local_loss"][at]),
        None if blamed < 0 else blamed,
    )  # fmt: skip


def share_out(
    diagram: Diagram, step: int, sent: Mapping[int, float], units: Mapping[str, float]
) -> dict[tuple[int, int], float]:
    """Return the bytes of each arrow of a step; NaN if they are not known.

    Args:
        sent: Measured bytes by rank.
        units: Bytes of the unknowns that are known.
    """
    found: dict[tuple[int, int], float] = {}
    own: dict[int | None, list[tuple[tuple[int, int], Arrow]]] = {}
    for p, phase in enumerate(diagram.phases):
        if phase.happens(step):
            for a, arrow in enumerate(phase.arrows):
                found[p, a] = math.nan
                own.setdefault(diagram.node(arrow.payer).rank, []).append(((p, a), arrow))
    for rank, arrows in own.items():
        total = math.nan if rank is None else sent.get(rank, math.nan)
        if math.isfinite(total):
            found.update(_divide(arrows, total, units))
    return found


def _divide(
    arrows: Sequence[tuple[tuple[int, int], Arrow]], total: float, units: Mapping[str, float]
) -> dict[tuple[int, int], float]:
    """Return how one worker's bytes divide over its arrows, if the formulas tell it."""
    open_units = {arrow.size.unit for _, arrow in arrows if arrow.size.unit not in units}
    if len(open_units) > 1:
        return {}
    given = {place: a.factor * units[a.size.unit] for place, a in arrows if a.size.unit in units}
    if not open_units:
        whole = sum(given.values())
        return {place: total * part / whole for place, part in given.items()} if whole else {}
    rest = total - sum(given.values())
    if rest < 0:
        return {}
    factors = {place: a.factor for place, a in arrows if place not in given}
    whole = sum(factors.values())
    return given | {place: rest * factor / whole for place, factor in factors.items()}


def handed_bytes(split: Split | None) -> dict[str, float]:
    """Return the bytes that each pipeline stage sends on for a batch, measured before the cut."""
    if split is None:
        return {}
    return {
        f"A{stage.number}": float(stage.handed_bytes * split.microbatches)
        for stage in split.stages
        if stage.handed_bytes
    }


def part_bytes(servers: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
    """Return the bytes of the parameters on each of several servers, as the servers reported."""
    return {
        f"M{number}": float(held["parameters_bytes"])
        for number, held in servers.items() if held["parameters_bytes"]
    }  # fmt: skip


def chosen_algorithm(story: Story) -> str | None:
    """Return the all-reduce that `auto` chose, as the run reported; None: the backend's."""
    name = story.facts.get(Topic.ALLREDUCE_CHOSEN)
    return name if isinstance(name, str) else None


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
