"""Lab 1: two namespaces, and when to distribute."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..answers import Check, close, exercise, number

_ROUNDED = 0.05
"""A result that is off by less was probably rounded or searched for."""

SHARE = 0.05
"""Largest relative error of a number that is read from a run: a student may round it."""


@exercise("1.1", "The square of the rank", where="the engines")
def square(c: Check) -> None:
    """Look at `square` on every engine."""
    found = c.engines("square")
    c.need_all_engines()
    for rank, value in enumerate(found):
        c.need(
            _is_number(value),
            f"`square`: the value of rank {rank} is {value!r}, but it must be one number.",
            "store one number on each engine: the square of this engine's rank. Do not store a "
            "list or a string",
        )
        c.need(
            number(value) == rank**2,
            f"`square`: the value of rank {rank} is {number(value):g}, which is not the square of "
            f"{rank}.",
            "the square of a number is the number times itself: use the engine's own `rank`",
        )
    c.expect(True, "every engine holds the square of its rank", "")


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(number(value))
    except (TypeError, ValueError, OverflowError):
        return False


@exercise("1.2", "The sum of the squares")
def total(c: Check) -> None:
    """Look at `total` in the notebook."""
    value = c.value("total")
    c.need(
        not isinstance(value, (list, tuple)) and getattr(value, "size", 1) == 1,
        f"`total` is {value!r}, but it must be one number.",
        "`%pull` gives a list with one value for each rank: add up these values",
    )
    c.expect(
        c.number_of("total") == 5,
        "`total` is the sum of the three squares",
        f"`total` is {value}, which is not the sum of the three squares",
        "pull `square` from all engines, not from one engine, and add up all three values",
    )


@exercise("1.3", "The mean of all numbers", where="the engines")
def mean(c: Check) -> None:
    """Compare `mean` of every worker with the mean of all numbers."""
    found = c.engines("mean")
    c.need_all_engines()
    for rank, value in enumerate(found):
        c.need(
            not isinstance(value, np.ndarray),
            f"`mean` of rank {rank} is an array or a tensor, but it must be one number.",
            "`.item()` turns a tensor with one element into a number",
        )
        c.need(
            _is_number(value),
            f"`mean` of rank {rank} is {value!r}, but it must be a finite number.",
            "divide the sum of all numbers by their count"
            if isinstance(value, float)
            else "store one number. Do not store a list or a string",
        )
    found = [number(value) for value in found]
    c.expect(
        len({round(value, 6) for value in found}) == 1,
        "all workers have the same mean",
        f"`mean` is not the same on all workers: {[round(value, 3) for value in found]}",
        "each worker has only its own `part`. With an all-reduce, every worker receives a sum over "
        "all workers",
    )
    parts = [rank + i for rank in range(len(found)) for i in range(rank**2 + 1)]
    truth = sum(parts) / len(parts)
    wrong = [i for i, value in enumerate(found) if not math.isclose(value, truth, rel_tol=1e-5)]
    rank = wrong[0] if wrong else 0
    if len(wrong) < len(found):
        hint = "every worker needs the sum and the count over all workers"
    elif abs(found[rank] - truth) < _ROUNDED:
        hint = "do not round the mean"
    else:
        hint = (
            "worker 2 has five numbers and worker 0 has only one number. Add up the workers' sums "
            "and counts, not their means"
        )
    c.expect(
        not wrong,
        "`mean` is the mean of all numbers",
        f"`mean` of rank {rank} is {found[rank]:.4g}, which is not the mean of all numbers",
        hint,
    )


@exercise("1.4", "The measured speed-up")
def speedup(c: Check) -> None:
    """Compare both speed-ups with the runs of section 3."""
    for which, wins in (("small", False), ("big", True)):
        alone, together = (c.run(f"{which}-{how}").summarise() for how in ("alone", "together"))
        truth = together.samples_per_s / alone.samples_per_s
        c.need(
            (truth > 1) is wins,
            f"In your runs with the {which} model, two workers were {truth:.2f} times as fast as "
            "one worker. If no other program runs, two workers should be "
            f"{'faster' if wins else 'slower'} than one worker with this model.",
            "close other programs. Then run the cells of section 3 and the cell of exercise 1.4 "
            "again",
        )
        name = f"speedup_{which}"
        found = c.number_of(name)
        c.expect(
            close(found, truth, SHARE),
            f"`{name}` is the ratio of the two throughputs",
            f"`{name}` is {found:.3g}, which is not the ratio of the two throughputs",
            "divide the samples per second of two workers by those of one worker. If you have run "
            "section 3 again, also run the cell of exercise 1.4 again",
        )


@exercise("1.5", "The crossing point")
def crossing(c: Check) -> None:
    """Call `crossing_s` with several numbers of workers and times, and compare its results."""
    for n, c_s in ((2, 0.01), (4, 0.03), (16, 0.5)):
        found = c.number_from("crossing_s", n, c_s)
        c.need(
            math.isclose(found, c_s * n / (n - 1), rel_tol=1e-6),
            f"crossing_s({n}, {c_s}) returned {found:.6g}. With this compute time, a step of {n} "
            f"workers takes {found / n + c_s:.6g} s and a step of one worker takes {found:.6g} s, "
            "but both steps must be equally long.",
            "compute the exact value with a formula, and do not round the result"
            if close(found, c_s * n / (n - 1), _ROUNDED)
            else "put your result into T₁ / n + c_s in place of T₁: this sum must be equal to your "
            "result",
        )
    c.expect(
        True,
        "with the compute time that `crossing_s` returns, n workers are as fast as one worker",
        "",
    )
