"""A step of a pipeline, from its schedule's own graph and the stages' measured times.

Every piece of work (forward, backward, and in `zero_bubble` the weights' half of backward) of every
microbatch and stage is a node; it follows what its worker did before, and the message it needs. The
order in which a worker takes its pieces is the schedule's; a step is the longest path (Kelley and
Walker, Critical-Path Planning and Scheduling, 1959).

    gpipe        all forwards, then all backwards
    1f1b         a stage has at most as many microbatches under way as stages follow it, itself
                 included; a backward comes before a forward
    interleaved  the same over the stages of all workers, the microbatches in rounds
    zero_bubble  as 1f1b; the weights' halves fill the gaps

Backward is taken for twice forward, as two matrix products are to one (Narayanan et al., SC 2021,
section 2.1). With another number of workers the measured work is divided equally among them.
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
        stage: Of all stages, in the order of the model.
        batch: Number of the microbatch.
    """

    kind: str
    stage: int
    batch: int


def shape_of(setting: Setting) -> tuple[str, int, int]:
    """Return the schedule's name, microbatches and stages in all."""
    options = dict(setting.options)
    batches = schedules.microbatches(options, setting.workers)
    each = schedules.stages_per_worker(options)
    return str(options["schedule"]), batches, each * setting.workers


def order_of(name: str, workers: int, batches: int, stages: int) -> list[tuple[int, Piece]]:
    """Return all pieces with their workers, in an order in which each can be computed.

    Found by letting every worker take the next piece of its schedule as soon as what it needs is
    there, with equal stages.
    """
    split = name == "zero_bubble"
    last = stages - 1
    done: dict[Piece, float] = {}
    free = [0.0] * workers
    left = {
        w: [Piece(kind, s, b) for s in range(w, stages, workers) for b in range(batches)
            for kind in ("FBW" if split else "FB")]
        for w in range(workers)
    }  # fmt: skip
    order: list[tuple[int, Piece]] = []
    length = {"F": 1.0, "B": 1.0 if split else 2.0, "W": 1.0}

    def needs(piece: Piece) -> list[Piece]:
        if piece.kind == "F":
            return [Piece("F", piece.stage - 1, piece.batch)] if piece.stage else []
        if piece.kind == "W":
            return [Piece("B", piece.stage, piece.batch)]
        own = [Piece("F", piece.stage, piece.batch)]
        return own + ([Piece("B", piece.stage + 1, piece.batch)] if piece.stage < last else [])

    def allowed(worker: int, piece: Piece) -> bool:
        mine = [p for p in done if p.stage == piece.stage]
        begun = sum(p.kind == "F" for p in mine)
        ended = sum(p.kind == "B" for p in mine)
        if piece.kind == "F":
            if piece.batch != begun:
                return False
            return name in ("naive", "gpipe") or begun - ended < stages - piece.stage
        if piece.kind == "B":
            return piece.batch == ended and (name not in ("naive", "gpipe") or begun == batches)
        return True

    rank = {"B": 0, "F": 1, "W": 2}
    while any(left.values()):
        best: tuple[float, int, int, int, Piece] | None = None
        for worker, pieces in left.items():
            for piece in pieces:
                before = needs(piece)
                if not all(p in done for p in before) or not allowed(worker, piece):
                    continue
                at = max([free[worker], *(done[p] for p in before)])
                # Rounds of as many microbatches as workers, deeper stages first within a round.
                turn = piece.batch // workers * stages - piece.stage
                key = (at, rank[piece.kind], turn, worker, piece)
                if best is None or key[:4] < best[:4]:
                    best = key
        assert best is not None, "a schedule never stands still"
        at, _, _, worker, piece = best
        done[piece] = free[worker] = at + length[piece.kind]
        left[worker].remove(piece)
        order.append((worker, piece))
    return order


def step_s(
    order: Sequence[tuple[int, Piece]], stages: int, workers: int, work: dict[str, Floats],
    message_s: Floats, *, held: bool,
) -> Floats:  # fmt: skip
    """Return the seconds of a step, shape (draws,).

    Args:
        work: By kind, (stages, draws) seconds of a piece.
        message_s: (draws,) of a message between workers.
        held: Whether who sends holds it back, and computes nothing meanwhile.
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
        message_bytes: Of what a microbatch hands on.
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
            first: Not needed: all steps are alike.
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
