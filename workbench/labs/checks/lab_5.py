"""Lab 5: the parameter server, and what it costs not to wait."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..answers import Check, RunFacts, as_read, exercise, number

STEPS = 45
"""Steps of a run: in a shorter run, the beginning without waits is too large a part."""

SLOW = 1
"""The worker that is slow in exercise 5.3."""

SLOWER = 1.5
"""At least by this factor its steps are longer, without waits; it is about 3 on a quiet machine."""

TARGET = 1.2
"""The loss that exercise 5.5 asks for."""

SMOOTH_SAMPLES = 192

Floats = NDArray[np.float64]
Diary = list[tuple[str, int]]

_TURNS: Diary = [(what, w) for what in ("pull", "push") for w in (0, 1, 2)]
_FAST: Diary = [(what, 0) for _ in range(3) for what in ("push", "pull")]
_DIARIES: list[tuple[Diary, list[int], str]] = [
    ([("pull", 0), ("push", 0), ("pull", 0), ("push", 0)], [0, 0],
     "if there is only one worker, it always computes with the newest parameters"),
    (_TURNS, [0, 1, 2],
     "all three workers pulled before the first push, so each push has a higher staleness than "
     "the previous push"),
    ([("pull", 0), ("pull", 1), ("push", 0), ("push", 1), ("pull", 0), ("push", 0), ("pull", 1),
      ("push", 1)], [0, 1, 0, 0],
     "count the updates after the worker's own latest pull, not those after its latest push"),
    ([("pull", 0), ("pull", 1), *_FAST, ("push", 1)], [0, 0, 0, 3],
     "each push is one update, even if the same worker pushes several times"),
    ([("pull", 0), ("pull", 1), ("push", 1), ("pull", 0), ("push", 0)], [0, 0],
     "a worker that pulls twice computes with the parameters of its second pull"),
    ([*[("pull", w) for w in (4, 9, 0, 2, 7)], *[("push", w) for w in (7, 4, 2, 0, 9)]],
     [0, 1, 2, 3, 4], "there may be any number of workers, with any ranks"),
]  # fmt: skip


@exercise("5.1", "Staleness from the server's log")
def staleness(c: Check) -> None:
    """Compare the staleness of each push with the check's own count."""
    for diary, truth, hint in _DIARIES:
        found = c.call("staleness", list(diary))
        try:
            numbers = [number(value) for value in found]
        except (TypeError, ValueError):
            c.wrong(
                f"staleness(...) returned {found!r}, but it must return a list of numbers.",
                "begin with an empty list and append one number for each push",
            )
        pushes = len(truth)
        c.need(
            len(numbers) == pushes,
            f"For a log with {pushes} pushes, staleness(...) returned {len(numbers)} numbers.",
            "append one number for each push, and none for a pull",
        )
        c.need(
            numbers == truth,
            f"For the log {diary}, staleness(...) returned "
            f"[{', '.join(f'{n:g}' for n in numbers)}], which is not right.",
            hint,
        )
    c.expect(True, "the staleness of every push is right, in every log that the check tried", "")


@exercise("5.2", "Staleness of unequal workers")
def own_staleness(c: Check) -> None:
    """Call the student's function with several lists of times, and compare its results."""
    cases = (([0.2, 0.2, 0.2, 0.2], 1), ([0.02, 0.08, 0.02], 1), ([0.02, 0.08, 0.02], 0),
             ([1.0, 2.0], 0), ([0.3, 0.1, 0.4, 0.2], 3))  # fmt: skip
    for step_s, i in cases:
        found = c.number_from("own_staleness", i, list(step_s))
        truth = sum(step_s[i] / t for j, t in enumerate(step_s) if j != i)
        hint = (
            "add up only the pushes of the other workers, without the pushes of worker i"
            if len(set(step_s)) == 1
            else "in t seconds, a worker with a step of 0.1 s makes t / 0.1 pushes: add up the "
            "pushes that the other workers make during one step of worker i"
        )
        c.need(
            math.isclose(found, truth, rel_tol=1e-6),
            f"own_staleness({i}, {step_s}) returned {found:.4g}, which is not right.",
            hint,
        )
    c.expect(True, "the result is right for workers with equal and with different speeds", "")
    step_s = [0.5, 0.1, 0.3]
    shares = [1 / t / sum(1 / s for s in step_s) for t in step_s]
    mean = sum(share * c.number_from("own_staleness", i, step_s) for i, share in enumerate(shares))
    c.expect(
        math.isclose(mean, len(step_s) - 1, rel_tol=1e-6),
        "the mean staleness of all pushes is the same with equal and with different speeds",
        "for three workers with different speeds, the check computed the mean staleness of all "
        f"pushes with your `own_staleness`. The result is {mean:.3g}, but for three workers it "
        f"must be {len(step_s) - 1}, whatever their speeds are",
        f"compute own_staleness(0, {step_s}) on paper: how many pushes do the other workers make "
        f"in {step_s[0]} s?",
    )


@exercise("5.3", "A bound on staleness")
def tight(c: Check) -> None:
    """Check the bound, and what the student read from the run with this bound."""
    run = c.run("tight")
    workers, bound = run.plan.workers, run.plan.options.get("max_staleness")
    c.need(
        run.plan.strategy == "parameter_server" and workers == 3,
        f"The run 'tight' used {run.plan.strategy} with {workers} workers, but it must use "
        "parameter_server with 3 workers.",
        "in the cell, remove the # before the command, and replace the dots by the option",
    )
    if bound is None:
        c.wrong(
            "The run 'tight' has no bound on the staleness.",
            "use the same option as the run 'bounded' in section 4",
        )
        return
    limit = (workers - 1) * (int(bound) + 1)
    if limit > 4:
        c.expect(
            False, "", f"With max_staleness={bound} a push can have a staleness of {limit}, but no "
            "push may have a staleness above 4.",
            "`max_staleness` is not the largest staleness of a push. It is the number of steps "
            "that a worker may be ahead of the slowest worker. With N workers and max_staleness=s, "
            "the largest possible staleness is (N - 1)(s + 1): for which s is it 4?",
        )  # fmt: skip
    else:
        c.expect(
            limit == 4,
            "the bound is as large as possible, and no push has a staleness above 4",
            f"With max_staleness={bound} no push has a staleness above {limit}. This bound is "
            "stricter than necessary.",
            "choose the largest bound with which no push has a staleness above 4",
        )
    _waits(c, run)


def _long_enough(c: Check, run: RunFacts) -> None:
    steps = int(run.history["step"].max(initial=-1)) + 1
    c.need(
        steps >= STEPS,
        f"The run {run.name!r} has only {steps} steps, but it must have at least {STEPS}.",
        f"keep --steps {STEPS} in the command of the cell",
    )


def _waits(c: Check, run: RunFacts) -> None:
    _long_enough(c, run)
    ranks, blamed = run.history["rank"], run.history["blamed_rank"]
    blamed = blamed[blamed >= 0]
    c.need(
        len(blamed) > 0,
        "In the run 'tight' no worker had to wait.",
        "make worker 1 slow, as in the command of the cell",
    )
    truth = int(np.bincount(blamed.astype(int)).argmax())
    busy_s = run.history["step_s"] - run.history["sync_wait_s"]
    typical_s = {rank: np.median(busy_s[ranks == rank]) for rank in range(run.plan.workers)}
    c.need(
        truth == SLOW and typical_s.pop(SLOW) >= SLOWER * max(typical_s.values()),
        f"In the run 'tight' worker {SLOW} is not much slower than the other workers.",
        "keep the three options --inject in the command of the cell",
    )
    found = c.whole("waited_for")
    c.expect(
        found == truth,
        "`waited_for` is the worker for which the other workers waited",
        f"`waited_for` is {found}, which does not agree with the history of the run 'tight'",
        "in a row with a wait, `blamed_rank` is the rank of the worker that caused the wait; in "
        "the other rows it is -1",
    )
    mine = ranks == 0
    share = float(run.history["sync_wait_s"][mine].sum() / run.history["step_s"][mine].sum())
    found_share = c.number_of("waited_share")
    own_s, own_wait_s = run.history["step_s"][mine], run.history["sync_wait_s"][mine]
    right = as_read(found_share, share, 3)
    c.need(
        right or not as_read(found_share, float((own_wait_s / own_s).mean()), 3),
        f"`waited_share` is {found_share:.4g}. This is the result if you compute a fraction for "
        "each step, and then the mean of these fractions.",
        "compute only one fraction, for all steps of worker 0 together: divide the sum of the "
        "waits by the sum of the step times",
    )
    c.expect(
        right,
        "`waited_share` is the fraction of time in which worker 0 had to wait",
        f"`waited_share` is {found_share:.4g}, which does not agree with the history of the run "
        "'tight'",
        "take all rows of worker 0 and no other rows. Divide the sum of the waits by the sum of "
        "the step times. The result is a fraction between 0 and 1: keep at least three decimals",
    )


@exercise("5.4", "A learning rate that depends on the staleness")
def aware(c: Check) -> None:
    """Check the learning rates, and the run that uses the option."""
    for lr, stale in ((0.1, 2), (0.6, 3), (0.1, 1), (0.2, 0), (0.5, 10)):
        found = c.number_from("rate_of_push", lr, stale)
        c.need(
            math.isclose(found, lr / max(1, stale), rel_tol=1e-6),
            f"rate_of_push({lr}, {stale}) returned {found:.4g}, which is not right.",
            "a staleness of 2 halves the learning rate, and a staleness of 0 or 1 does not change "
            "it",
        )
    c.expect(
        True,
        "the learning rate is divided by the staleness, and a staleness of 0 or 1 does not change "
        "it",
        "",
    )
    run = c.run("aware")
    if not c.expect(
        run.plan.strategy == "parameter_server" and bool(run.plan.options["staleness_aware_lr"]),
        "the run 'aware' divides the learning rate of each push by the staleness of this push",
        "the run 'aware' applies every push with the full learning rate"
        if run.plan.strategy == "parameter_server"
        else f"the run 'aware' used {run.plan.strategy}, but it must use parameter_server",
        "find the option of parameter_server that divides the learning rate by the staleness, and "
        "set this option to true: -o OPTION=true",
    ):
        return
    c.need(
        _trains_as(run, c.run("hot")),
        "The run 'aware' does not train the recipe of 'hot' with three workers.",
        "use --recipe hot and -n 3",
    )
    _long_enough(c, run)
    loss = _by_time(run)[2]
    c.expect(
        bool(np.isfinite(loss).all()) and float(np.median(loss[-9:])) < float(np.median(loss[:9])),
        "the loss of the run 'aware' falls, with the same learning rate as in the run 'hot'",
        "the loss of the run 'aware' does not fall",
        "train the recipe of the run 'hot' without changes, with three equally fast workers",
    )


def _trains_as(run: RunFacts, other: RunFacts) -> bool:
    """Whether two runs are of the same recipe and number of workers."""
    return run.plan.recipe == other.plan.recipe and run.plan.workers == other.plan.workers


@exercise("5.5", "Samples and seconds until a loss of 1.2")
def ratios(c: Check) -> None:
    """Compare the ratios with the histories of the two runs."""
    sync, uneven = (_reached(c, name) for name in ("sync", "uneven"))
    for at, what in ((1, "samples"), (0, "seconds")):
        name = f"{what}_ratio"
        found = c.number_of(name)
        c.expect(
            as_read(found, uneven[at] / sync[at]),
            f"`{name}` is right: it is the {what} that 'uneven' needed for a loss below {TARGET}, "
            f"divided by the {what} that 'sync' needed",
            f"`{name}` is {found:.4g}, which does not agree with the curves of 'uneven' and 'sync'",
            f"`curve` returns seconds, samples and loss. For each run, take the {what} at the "
            f"first point with a loss below {TARGET}. Divide the {what} of 'uneven' by those of "
            "'sync', and keep at least two decimals",
        )


def _reached(c: Check, name: str) -> tuple[float, float]:
    seconds, used, loss = _by_time(c.run(name))
    below = np.flatnonzero(loss < TARGET)
    c.need(
        len(below) > 0,
        f"The loss of the run {name!r} never falls below {TARGET}.",
        f"run the cell with --name {name} again, with the number of steps in the original lab",
    )
    return float(seconds[below[0]]), float(used[below[0]])


def _by_time(run: RunFacts) -> tuple[Floats, Floats, Floats]:
    """Return the seconds, samples and smoothed loss of all workers' rows, as the lab's `curve`."""
    history: Any = run.history
    ends, ranks = history["start_s"] + history["step_s"], history["rank"]
    until = min(ends[ranks == rank].max() for rank in np.unique(ranks))
    order = np.argsort(ends, kind="stable")
    order = order[ends[order] <= until]
    used, loss = np.cumsum(history["samples"][order]), history["loss"][order]
    smooth = [loss[(used > end - SMOOTH_SAMPLES) & (used <= end)].mean() for end in used]
    return ends[order], used.astype(float), np.array(smooth)
