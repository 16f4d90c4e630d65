"""Lab 3: synchronous means waiting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..answers import Check, close, exercise

SHARE = 0.01
"""How far a rate that is read from a run may be off: a student may round it to three digits."""
SAME_MS = 2.0
"""How far an expected time may be off: averaging takes almost no time."""
SAME_S = 1e-3
"""How far a wait may be off: it may be rounded to milliseconds."""
_MESSAGES_S = 0.05
"""A wait that is longer by less probably includes the messages of the all-reduce."""
_ROUNDED = 0.05
"""A result that is off by less was probably rounded or simulated."""


@exercise("3.1", "Predict the time and the waits of a step")
def expect(c: Check) -> None:
    """Check the step and the wait of each of the three workers."""
    work_ms = np.array([20.0, 10.0, 50.0])
    step, wait = c.array("step_ms", (3,)), c.array("wait_ms", (3,))
    c.expect(
        float(np.ptp(step)) <= SAME_MS,
        "the step is equally long for all workers",
        f"`step_ms` is {_list(step)}, but the step must be equally long for all workers",
        "a step ends when the weights are updated, and no worker can update its weights before it "
        "has the average of all gradients",
    )
    c.expect(
        bool(np.all(np.abs(step - work_ms.max()) <= SAME_MS)),
        "the length of the step is right",
        f"`step_ms` is {_list(step)}, which is not the time of a step of these three workers",
        "the workers can average only when all three gradients are ready: after how many "
        "milliseconds is the last gradient ready?",
    )
    c.expect(
        bool(np.all(np.abs(wait - (work_ms.max() - work_ms)) <= SAME_MS)),
        "the waits are right",
        f"`wait_ms` is {_list(wait)}, but these are not the waits of the three workers",
        "for each worker, the time of its own work plus its wait is the time of the whole step. "
        "The worker that is ready last does not wait",
    )


@exercise("3.2", "A step by hand", where="the engines")
def by_hand(c: Check) -> None:
    """Compare `wait_s` of each worker with the times that the workers recorded."""
    ready, found = c.engines("ready_s"), c.engines("wait_s")
    c.need_all_engines()
    waits = []
    for rank, value in enumerate(found):
        one = np.asarray(value).reshape(-1) if not isinstance(value, (str, dict)) else np.empty(0)
        c.need(
            len(one) == 1 and one.dtype.kind in "fiu",
            f"`wait_s` of rank {rank} is {value!r}, but it must be one number.",
            "`.item()` turns a tensor with one element into a number",
        )
        c.need(
            bool(np.isfinite(one[0])),
            f"`wait_s` of rank {rank} is {one[0]}, but it must be a finite number.",
            "a worker's wait is the latest `ready_s` minus its own `ready_s`",
        )
        waits.append(float(one[0]))
    truth = [max(ready) - mine for mine in ready]
    slow = max(range(len(ready)), key=lambda r: ready[r])
    c.need(
        all(0.005 <= truth[r] <= 10 for r in range(len(ready)) if r != slow),
        "The times in `ready_s` are not right: the worker that is ready last must be between 5 ms "
        "and 10 s later than every other worker.",
        "run the cell again, with the original lines above `# YOUR CODE`",
    )
    c.need(
        len(ready) > 1,
        "Only one engine is running, and a single worker never waits.",
        "run labs.begin(3, engines=3) again, then the cell of exercise 3.2",
    )
    c.expect(
        min(waits) >= -SAME_S,
        "no wait is negative",
        f"one `wait_s` is {min(waits) * 1e3:.1f} ms, but a wait is never negative",
        "a worker's wait is the latest `ready_s` minus its own `ready_s`",
    )
    others = [r for r in range(len(ready)) if r != slow]
    c.need(
        not all(close(waits[r], 1e3 * truth[r], SHARE) for r in others),
        f"The wait of rank {others[0]} is {waits[others[0]]:.3g} s, which is far too long.",
        "`wait_s` must be in seconds, like `ready_s`",
    )
    last = int(np.argmin(truth))
    c.expect(
        abs(waits[last]) <= SAME_S,
        "the worker that was ready last does not wait",
        f"rank {last} was ready last, but its `wait_s` is {waits[last] * 1e3:.1f} ms: a worker "
        "that is ready last does not wait",
        "all waits end at the same time. This time is the `ready_s` of one worker: which worker?",
    )
    off = [r for r in range(len(ready)) if abs(waits[r] - truth[r]) > SAME_S and r != last]
    c.expect(
        not off,
        "the other workers wait until the last worker is ready",
        f"the wait of rank {off[0] if off else 0} is {waits[off[0] if off else 0] * 1e3:.1f} ms, "
        "but it must be the time from this rank's `ready_s` until the last worker is ready",
        "a wait ends when the last worker is ready. Do not measure how long `dist.all_reduce` "
        "takes: this call also sends messages, and ends later than the wait. A worker's wait is "
        "the latest `ready_s` minus its own `ready_s`"
        if all(0 < waits[r] - truth[r] < _MESSAGES_S for r in off)
        else "all waits end at the same time. Find this time with one `dist.all_reduce`: which "
        "`op` is right?",
    )


@exercise("3.3", "Find the slow worker")
def blind(c: Check) -> None:
    """Compare `culprit` and `potential` with the run `blind`."""
    run = c.run("blind")
    rank, step, wait = (run.history[k] for k in ("rank", "step_s", "sync_wait_s"))
    samples = run.history["samples"]
    workers = len(run.engines)
    waited = [float(np.nansum(wait[rank == r])) for r in range(workers)]
    busy = [float(step[rank == r].sum()) - waited[r] for r in range(workers)]
    truth = [float(samples[rank == r].sum()) / busy[r] for r in range(workers)]
    actual = [float(samples[rank == r].sum() / step[rank == r].sum()) for r in range(workers)]
    typical = [float(np.nanmedian(wait[rank == r])) for r in range(workers)]
    culprit = c.whole("culprit")
    c.need(
        0 <= culprit < workers,
        f"`culprit` is {culprit}, but there is no such rank.",
        f"the ranks are 0 to {workers - 1}",
    )
    c.expect(
        culprit == int(np.argmin(typical)),
        "`culprit` is the slow worker",
        f"`culprit` is {culprit}, but worker {culprit} waits {typical[culprit] * 1e3:.0f} ms in a "
        "typical step, so it is not the slow worker",
        "a worker that waits was ready early. For which worker do the others wait? In the table of "
        "blind.blame(), each column shows how long the others waited for one worker",
    )
    found = c.array("potential", (workers,))
    right = all(close(a, b, SHARE) for a, b in zip(found, truth, strict=True))
    as_it_was = all(close(a, b, SHARE) for a, b in zip(found, actual, strict=True))
    c.need(
        right or not as_it_was,
        f"`potential` is {_list(found)}. These are the actual speeds: you did not subtract the "
        "waits.",
        "divide a worker's samples by the time in which the worker did not wait: the sum of its "
        "step times minus the sum of its waits",
    )
    c.expect(
        right,
        "the potentials are computed without the waits, so they show which worker is slow",
        f"`potential` is {_list(found)}, which does not agree with the run",
        "for each worker, add up the samples, the step times and the waits over the whole run. "
        "Subtract the sum of the waits from the sum of the step times. Then divide the sum of the "
        "samples by this difference. If you have trained `blind` again, also run the cell of "
        "exercise 3.3 again",
    )


@exercise("3.4", "The fraction of the time in which a worker waits")
def share(c: Check) -> None:
    """Call `waiting_share` with several numbers of workers, and compare its results."""
    for n in (1, 2, 3, 8, 1000):
        found = c.number_from("waiting_share", n)
        if n == 1:
            c.need(
                abs(found) < 1e-9,
                f"waiting_share(1) returned {found:.4g}, which is not right for one worker.",
                "how long does a worker wait if there are no other workers?",
            )
        c.need(
            0 <= found < 1,
            f"waiting_share({n}) returned {found:.4g}, but it must return a fraction between 0 and "
            "1.",
            "divide the mean wait by the mean step time: the wait is only a part of the step time",
        )
        c.need(
            math.isclose(found, (n - 1) / (2 * n), rel_tol=1e-6, abs_tol=1e-9),
            f"waiting_share({n}) returned {found:.4g}, which is not right for {n} workers.",
            "return the exact value, without rounding or simulation"
            if close(found, (n - 1) / (2 * n), _ROUNDED)
            else "the mean wait is the mean step time minus the mean delay. Divide the mean wait "
            "by the mean step time",
        )
    c.expect(True, "the fraction is right, for few workers and for many", "")


@exercise("3.5", "Keep the slow worker or leave it out")
def keep(c: Check) -> None:
    """Call `keep_up_to_s` with several numbers of workers and times, and compare its results."""
    for n, t_s in ((3, 0.01), (2, 0.02), (10, 0.3)):
        found = c.number_from("keep_up_to_s", n, t_s)
        c.need(
            math.isclose(found, t_s * n / (n - 1), rel_tol=1e-6),
            f"keep_up_to_s({n}, {t_s}) returned {found:.4g}, which is not the right time. If the "
            f"slow worker needs {found:.4g} s for its part, a step with this worker and a step "
            "without it are not equally long. With the right time they are equally long.",
            "return the exact value, without rounding"
            if close(found, t_s * n / (n - 1), _ROUNDED)
            else "without the slow worker, how large is each other worker's part of the batch? "
            "How long does this part take?",
        )
    c.expect(
        True,
        "`keep_up_to_s` is right: if the slow worker needs the returned time for its part, a step "
        "with this worker is as long as a step without it",
        "",
    )


def _list(values: np.ndarray[Any, Any]) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in values) + "]"
