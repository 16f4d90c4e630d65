"""A step of a pipeline, from its schedule's own graph and the stages' measured times.

Every piece of work (forward, backward, and in `zero_bubble` the weights' half of backward) of every
microbatch and stage is a node. It begins after its worker's previous piece and after the message
that it needs. The schedule gives the order of a worker's pieces. The step time is the longest path
(Kelley and Walker, Critical-Path Planning and Scheduling, 1959).

    gpipe        all forwards, then all backwards
    1f1b         a stage has at most as many unfinished microbatches as there are stages from it to
                 the end, itself included; a backward comes before a forward
    interleaved  the same over the stages of all workers, the microbatches in rounds
    zero_bubble  as 1f1b; the weights' halves fill the gaps

Backward is assumed to take twice as long as forward, because it has two matrix products instead of
one (Narayanan et al., SC 2021, section 2.1). With another number of workers the measured work is
divided equally among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..catalog import schedules
from .exchange import FORWARD, Cost

if TYPE_CHECKING:
    from .probe import Setting

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Piece:
    """A piece of work.

    Attributes:
        kind: `F`, `B`, or `W` for the weights' half of backward.
        stage: Number of the stage, in the order of the model.
        batch: Number of the microbatch.
    """

    kind: str
    stage: int
    batch: int


def shape_of(setting: Setting) -> tuple[str, int, int]:
    """Return the schedule's name, and the total numbers of microbatches and stages."""
    options = dict(setting.options)
    batches = schedules.microbatches(options, setting.workers)
    each = schedules.stages_per_worker(options)
    return str(options["schedule"]), batches, each * setting.workers


def order_of(name: str, workers: int, batches: int, stages: int) -> list[tuple[int, Piece]]:
    """Return all pieces with their workers, in an order in which each can be computed."""
    if name == "zero_bubble":
        return _filled(workers, batches, stages)
    if name == "interleaved":
        return _in_turn([_interleaved(w, workers, batches, stages) for w in range(workers)])
    lines = []
    for worker in range(workers):  # one stage each
        first = batches if name in ("naive", "gpipe") else min(stages - worker, batches)
        forward = [Piece("F", worker, b) for b in range(batches)]
        backward = [Piece("B", worker, b) for b in range(batches)]
        lines.append(_alternating(forward, backward, first))
    return _in_turn(lines)


def _alternating(forward: list[Piece], backward: list[Piece], first: int) -> list[Piece]:
    """Return so many first forwards, then alternate backwards and forwards."""
    line = forward[:first]
    for k, piece in enumerate(forward[first:]):
        line += [backward[k], piece]
    return line + backward[len(forward) - first :]


def _interleaved(worker: int, workers: int, batches: int, stages: int) -> list[Piece]:
    """Return a worker's pieces in rounds of microbatches, each through all its stages.

    Source: Narayanan et al., SC 2021, section 2.2; the number of first forwards is that of
    Megatron-LM.
    """
    per_round = batches // max(1, batches // workers)
    own = range(worker, stages, workers)
    rounds = [range(b, b + per_round) for b in range(0, batches, per_round)]
    forward = [Piece("F", s, b) for some in rounds for s in own for b in some]
    backward = [Piece("B", s, b) for some in rounds for s in reversed(own) for b in some]
    first = (len(own) - 1) * per_round + 2 * (workers - 1 - worker) + 1
    return _alternating(forward, backward, min(first, len(forward)))


def _needs(piece: Piece, stages: int) -> list[Piece]:
    """Return the pieces that must be done before a piece."""
    if piece.kind == "F":
        return [Piece("F", piece.stage - 1, piece.batch)] if piece.stage else []
    if piece.kind == "W":
        return [Piece("B", piece.stage, piece.batch)]
    own = [Piece("F", piece.stage, piece.batch)]
    return own + ([Piece("B", piece.stage + 1, piece.batch)] if piece.stage < stages - 1 else [])


def _in_turn(lines: Sequence[list[Piece]]) -> list[tuple[int, Piece]]:
    """Merge the workers' orders into one order in which each piece comes after its requirements."""
    stages = 1 + max(piece.stage for line in lines for piece in line)
    order: list[tuple[int, Piece]] = []
    done: set[Piece] = set()
    at = [0] * len(lines)
    while len(order) < sum(map(len, lines)):
        before = len(order)
        for worker, line in enumerate(lines):
            while at[worker] < len(line) and done.issuperset(_needs(line[at[worker]], stages)):
                done.add(line[at[worker]])
                order.append((worker, line[at[worker]]))
                at[worker] += 1
        assert len(order) > before, "a schedule never stands still"
    return order


def _filled(workers: int, batches: int, stages: int) -> list[tuple[int, Piece]]:
    """Return the pieces of `zero_bubble`: each worker takes the piece that it can begin first.

    If there are several, backward comes first, then forward, then a weights' half. A stage has at
    most as many unfinished microbatches as there are stages from it to the end, itself included.
    """
    kinds = ("B", "F", "W")
    ends: dict[Piece, float] = {}
    free = [0.0] * workers
    count = {(kind, s): 0 for kind in kinds for s in range(stages)}
    order: list[tuple[int, Piece]] = []
    for _ in range(3 * batches * stages):
        best: tuple[float, int, int, int] | None = None
        for stage in range(stages):
            under_way = count["F", stage] - count["B", stage]
            for k, kind in enumerate(kinds):
                piece = Piece(kind, stage, count[kind, stage])
                before = _needs(piece, stages)
                held = kind == "F" and under_way >= stages - stage
                if piece.batch == batches or held or any(one not in ends for one in before):
                    continue
                at = max([free[stage % workers], *(ends[one] for one in before)])
                if best is None or (at, k, piece.batch, stage) < best:
                    best = (at, k, piece.batch, stage)
        assert best is not None, "a schedule never stands still"
        at, k, batch, stage = best
        piece = Piece(kinds[k], stage, batch)
        ends[piece] = free[stage % workers] = at + 1.0
        count[kinds[k], stage] += 1
        order.append((stage % workers, piece))
    return order


def step_s(
    order: Sequence[tuple[int, Piece]], stages: int, workers: int, work: dict[str, Floats],
    message_s: Floats, *, held: bool,
) -> Floats:  # fmt: skip
    """Return the seconds of a step, shape (draws,).

    Args:
        work: Seconds of a piece by kind, (stages, draws).
        message_s: (draws,) seconds of a message between workers.
        held: Whether the sender delays the message and computes nothing meanwhile.
    """
    none = np.zeros_like(message_s)
    free = [none] * workers
    there: dict[Piece, Floats] = {}
    ends: dict[Piece, Floats] = {}
    for worker, piece in order:
        begin = free[worker]
        if piece in there:
            begin = np.maximum(begin, there[piece])
        end = begin + work[piece.kind][piece.stage]
        ends[piece] = end
        onward = piece.stage + (1 if piece.kind == "F" else -1)
        if piece.kind in "FB" and 0 <= onward < stages:
            apart = onward % workers != worker
            came = end + message_s if apart else end
            there[Piece(piece.kind, onward, piece.batch)] = came
            free[worker] = came if apart and held else end
        else:
            free[worker] = end
    return np.asarray(np.max(free, axis=0))


def pieces_of(busy_s: Floats, name: str, batches: int, stages: int) -> dict[str, Floats]:
    """Return the seconds of each kind of piece, (stages, draws).

    Args:
        busy_s: (workers, draws) seconds of a step in which a worker is busy.
    """
    workers = len(busy_s)
    each = busy_s[np.arange(stages) % workers] / (batches * stages / workers)
    if name == "zero_bubble":
        return dict.fromkeys("FBW", each / 3)
    return {"F": each * FORWARD, "B": each * (1 - FORWARD)}


class Pipe:
    """The messages of a pipeline; see `exchange.Exchange`, whose methods it has.

    Args:
        message_bytes: Size of the message of a microbatch to the next stage.
    """

    def __init__(self, setting: Setting, message_bytes: float) -> None:
        self.setting, self.workers = setting, setting.workers
        self.message_bytes = message_bytes if message_bytes == message_bytes else 0.0
        self._name, self._batches, self._stages = shape_of(setting)
        self._order = order_of(self._name, self.workers, self._batches, self._stages)

    def period(self, own: Floats, cost: Cost, first: int = 0) -> Floats:
        """Return the mean seconds of a step, shape (draws,).

        Args:
            own: (steps, workers, draws) seconds in which a worker is busy.
            first: Not used, because all steps are equal.
        """
        message = cost.message_s + cost.soft_message_s
        message = message + self.message_bytes * (cost.byte_s + cost.soft_byte_s)
        total = np.zeros(own.shape[2])
        for busy in own:
            work = pieces_of(busy, self._name, self._batches, self._stages)
            total += step_s(
                self._order, self._stages, self.workers, work, message, held=cost.held
            )  # fmt: skip
        return total / len(own)
