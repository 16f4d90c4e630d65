"""Lab 13: a scaling study."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...answers import close, exercise
from .on_engines import floats, have

if TYPE_CHECKING:
    from ...answers import Check, RunFacts

LIMIT_S = 25.0
"""For an answer that hangs on the engines."""

SHARE = 0.02
"""How far a number that is computed from a run may be off: a student may round it."""

ERROR = 0.0006
"""How far the error of a prediction may be off: other definitions differ by a few thousandths."""

WORKERS, STEPS = 16, 12
"""The run that checks the prediction."""

LINK = (0.020, 20_000, 5e6)
"""The lab's link: seconds, bytes of the gradients, bytes per second."""

_SIZES = ((2, 64, 64, 96, 16), (3, 32, 128, 50, 4), (1, 128, 16, 96, 1))


@exercise("13.1", "The work of a step")
def work(c: Check) -> None:
    """Parameters, FLOPs and the rule of thumb."""
    for layers, width, context, vocabulary, sequences in _SIZES:
        sizes = (layers, width, context, vocabulary)
        layer = 12 * width**2 + 13 * width
        numbers = (2 * vocabulary + context + 2) * width + vocabulary + layers * layer
        found = c.number_from("parameters", *sizes)
        c.need(
            found == numbers,
            f"parameters{sizes} returned {found:.0f}, which is not the number of parameters.",
            "add up the rows of the table; a part that is in each layer counts once for each layer",
        )
        weights = layers * 12 * width**2 + width * vocabulary
        tokens = sequences * context
        forward = 2 * weights * tokens + layers * 4 * context**2 * width * sequences
        found = c.number_from("step_flops", *sizes, sequences)
        c.need(
            found != forward,
            f"step_flops{(*sizes, sequences)} returned only the FLOPs of the forward pass.",
            "a training step also has a backward pass, which takes twice as many FLOPs as the "
            "forward pass",
        )
        c.need(
            found == 3 * forward,
            f"step_flops{(*sizes, sequences)} returned {found:.4g}, which is not the number of "
            "FLOPs of a training step.",
            "count 2 FLOPs per token for each weight of a matrix product. Add the FLOPs of "
            "attention's two products for each layer and sequence. Do not count embeddings, norms "
            "and biases",
        )
        found = c.number_from("thumb_flops", *sizes, sequences)
        c.need(
            found == 6 * numbers * tokens,
            f"thumb_flops{(*sizes, sequences)} returned {found:.4g}, which does not follow the "
            "rule of thumb.",
            "multiply 6 by the number of all parameters and by the number of tokens in a step",
        )
    c.expect(True, "all three functions are right, for models of three sizes", "")


_RATES = """
def _labs_look():
    calls = []
    def work():
        calls.append(None)
        time.sleep((0.01, 0.09, 0.03, 0.09, 0.09)[min(len(calls), 5) - 1])
    seconds = best_s(work, 4)
    kept = globals()["best_s"]
    asked, other, done = [], [], []
    allowed = {"mm", "copy_", "resize_", "slice", "view", "_unsafe_view", "detach", "alias", "t"}
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            name = operation.overloadpacket.__name__
            if name in ("mm", "copy_"):
                shapes = [list(one.shape) for one in args if isinstance(one, torch.Tensor)]
                done.append([name, *shapes])
            if name not in allowed:
                other.append(f"`{name}`")
            other.extend(str(one.dtype) for one in args
                         if isinstance(one, torch.Tensor) and one.dtype != torch.float32)
            return operation(*args, **(kwargs or {}))
    def pretend(work, repeats):
        with Watch():
            work()
        asked.append(repeats)
        return 0.5
    try:
        globals()["best_s"] = pretend
        rates = [matmul_rate(24, 3), copy_rate(1000, 7)]
    finally:
        globals()["best_s"] = kept
    return [seconds, len(calls), rates, asked, list(dict.fromkeys(other)), done]
_labs_answer = _labs_look() if rank == 0 else None
del _labs_look
"""


@exercise("13.2", "Peak and bandwidth", where="the engines")
def rates(c: Check) -> None:
    """The best of several times, and rates computed from it."""
    have(c, "best_s", "matmul_rate", "copy_rate")
    seconds, calls, found, asked, other, done = c.ask(
        _RATES, limit_s=LIMIT_S, hint="which line raises the error? Call best_s(lambda: None, 3), "
        "matmul_rate(24, 3) and copy_rate(1000, 7) in a new cell that begins with %%distributed"
    )[0]  # fmt: skip
    shortest_s = float(floats(c, seconds, "best_s", ()))
    c.need(
        calls == 5,
        f"best_s(work, 4) called `work` {calls} times, but it must call `work` 5 times.",
        "call `work` once without timing it, then `repeats` times with timing",
    )
    c.need(
        0.025 <= shortest_s < 0.06,
        "In the check, the first call of `work` took 10 ms, and the next four calls took 90, 30, "
        f"90 and 90 ms. But best_s returned {1e3 * shortest_s:.0f} ms.",
        "leave out the first call, and return the shortest time of a single call",
    )
    c.expect(True, "`best_s` leaves out the first call and returns the shortest time", "")
    c.need(
        asked == [3, 7],
        "`matmul_rate` or `copy_rate` does not measure with `best_s(work, repeats)`.",
        "call `best_s` once in each function, and pass the argument `repeats` to it",
    )
    c.need(
        not other,
        f"The measured work of `matmul_rate` and `copy_rate` must not contain {', '.join(other)}.",
        "before you measure, create all tensors with the type float32. The measured work "
        "must be only the product, or only the copy",
    )
    c.need(
        done == [["mm", [24, 24], [24, 24]], ["copy_", [1000], [1000]]],
        "`matmul_rate` must measure one product of two n x n matrices, and `copy_rate` must "
        "measure one copy of `numbers` numbers. At least one of them measures something else.",
        "measure only torch.mm(a, b, out=c) in `matmul_rate`, and only b.copy_(a) in `copy_rate`",
    )
    for name, rate, truth, work, hint in (
        (
            "matmul_rate(24, 3)",
            found[0],
            2 * 24**3 / 0.5,
            "the FLOPs of one product",
            "there are n * n * n multiplications and as many additions",
        ),
        (
            "copy_rate(1000, 7)",
            found[1],
            8 * 1000 / 0.5,
            "the bytes of one copy",
            "for each number, 8 bytes are moved: 4 are read, and 4 are written",
        ),
    ):
        value = float(floats(c, rate, name, ()))
        c.need(
            math.isclose(value, truth, rel_tol=1e-6),
            "The check replaced `best_s` by a function that always returns 0.5 s. Then "
            f"`{name}` must return {work} divided by 0.5 s, but it returned {value:.4g}.",
            hint,
        )
    c.expect(True, "`matmul_rate` and `copy_rate` are right", "")


@exercise("13.3", "The roofline")
def roofline(c: Check) -> None:
    """Intensities, the limit, and what sets it."""
    for m, k, n in ((1024, 64, 256), (1, 512, 512), (8, 8, 8)):
        found = c.number_from("matmul_intensity", m, k, n)
        truth = 2 * m * k * n / (4 * (m * k + k * n + m * n))
        c.need(
            math.isclose(found, truth, rel_tol=1e-6),
            f"matmul_intensity({m}, {k}, {n}) returned {found:.4g}, which is not the intensity.",
            "divide the FLOPs by the bytes: a float32 number has 4 bytes, and all three matrices "
            "are moved",
        )
    for flops, reads, writes in ((8, 1, 1), (1, 2, 1)):
        found = c.number_from("elementwise_intensity", flops, reads, writes)
        c.need(
            math.isclose(found, flops / (4 * (reads + writes)), rel_tol=1e-6),
            f"elementwise_intensity({flops}, {reads}, {writes}) returned {found:.4g}, which is "
            "not the intensity.",
            "divide the FLOPs by the bytes: 4 bytes for each number that is read or written",
        )
    c.expect(True, "both intensities are right", "")
    for intensity, peak, bandwidth, side in (
        (1.0, 1e11, 2e10, "memory"), (4.9, 1e11, 2e10, "memory"), (20.0, 1e11, 2e10, "compute"),
        (20.0, 4e12, 1e11, "memory"), (40.0, 4e12, 1e11, "compute"), (90.0, 4e12, 1e11, "compute"),
    ):  # fmt: skip
        asked = f"({intensity:g}, {peak:g}, {bandwidth:g})"
        found = c.number_from("attainable", intensity, peak, bandwidth)
        c.need(
            math.isclose(found, min(peak, bandwidth * intensity), rel_tol=1e-6),
            f"attainable{asked} returned {found:.3g}, which is not on the roofline.",
            "return the lower of the two limits of the roofline",
        )
        word = c.call("bound", intensity, peak, bandwidth)
        c.need(
            word == side,
            f"bound{asked} returned {word!r}, which is not right.",
            "at which intensity are both limits equal? At a lower intensity, the memory limits the "
            "rate",
        )
    found = c.number_from("mfu", 3e9, 0.1, 1e11)
    c.need(
        math.isclose(found, 0.3, rel_tol=1e-6),
        f"mfu(3e9, 0.1, 1e11) returned {found:.4g}, which is not the MFU.",
        "divide the FLOPs per second by the peak; the result is a fraction from 0 to 1",
    )
    c.expect(True, "`attainable`, `bound` and `mfu` are right", "")


@exercise("13.4", "MFU of a run")
def used(c: Check) -> None:
    """The median step, its MFU and its tokens per second."""
    run = c.run("alone")
    steps = run.history["step"]
    c.need(
        int(steps.max(initial=-1)) >= 24,
        "The run 'alone' has fewer than 25 steps.",
        "run the cell that trains 'alone' again, exactly as it is in the original lab",
    )
    truth = float(np.median(run.history["step_s"][steps >= 5]))
    step_time_s = c.number_of("step_time_s")
    c.need(
        close(step_time_s, truth, 1e-6),
        f"`step_time_s` is {step_time_s:.6g}, which does not agree with the history of 'alone'.",
        "take `step_s` of the rows with step >= 5, and compute the median in seconds; do not round "
        "it",
    )
    c.expect(True, "`step_time_s` is the median time of a step", "")
    machine = c.value("machine")
    c.need(
        isinstance(machine, dict) and "peak" in machine,
        "The variable `machine` does not contain the machine's peak FLOPs per second.",
        "solve exercise 13.2. Then run the cells below exercise 13.2, down to the cell with "
        "`%pull machine`",
    )
    flops = c.number_from("step_flops", *_SIZES[0])
    for name, value in (
        ("used", flops / step_time_s / float(machine["peak"])),
        ("tokens_per_s", 16 * 64 / step_time_s),
    ):
        found = c.number_of(name)
        c.expect(
            close(found, value, SHARE),
            f"`{name}` was computed from the median time of a step",
            f"`{name}` is {found:.4g}, which does not agree with `step_time_s`",
            "call `mfu` with three arguments: the result of `step_flops` for this run, "
            "`step_time_s`, and the peak"
            if name == "used"
            else "a step has 16 sequences of 64 tokens",
        )


@exercise("13.5", "Amdahl and Gustafson")
def laws(c: Check) -> None:
    """The serial share by least squares, and what the laws say."""
    exact = [0.08 * (0.25 + 0.75 / n) for n in (1, 2, 4, 8)]
    noisy, turned = [1.0, 0.68, 0.31, 0.36], [0.36, 0.31, 1.0, 0.68]
    for workers, step_s, truth in (
        ([1, 2, 4, 8], exact, 0.25),
        ([1, 2, 4, 8], noisy, _share([1, 2, 4, 8], noisy)),
        ([8, 4, 1, 2], turned, _share([1, 2, 4, 8], noisy)),
        ([1, 2, 4, 8], [1.0, 0.4, 0.15, 0.02], 0.0),
        ([1, 2, 4, 8], [1.0, 1.2, 1.5, 2.0], 1.0),
    ):
        found = c.number_from("serial_share", workers, step_s)
        c.need(
            abs(found - truth) < 1e-3,
            f"serial_share({workers}, {[round(s, 3) for s in step_s]}) returned {found:.4g}, "
            "which is not the serial share.",
            "fit step time = a + b * (1/n), a straight line in 1/n. The serial share is "
            "a / (a + b). If the share is below 0, return 0. If it is above 1, return 1",
        )
    c.expect(True, "`serial_share` returns the serial share of the fitted line", "")
    for s, n in ((0.2, 4), (0.05, 64), (0.0, 8)):
        for name, truth in (
            ("strong_speedup", 1 / (s + (1 - s) / n)),
            ("weak_speedup", s + (1 - s) * n),
        ):
            found = c.number_from(name, s, n)
            c.need(
                math.isclose(found, truth, rel_tol=1e-6),
                f"{name}({s}, {n}) returned {found:.4g}, which does not follow the law.",
                "strong scaling follows Amdahl's law, and weak scaling follows Gustafson's law",
            )
    for s, efficiency, truth in ((0.2, 0.45, 7), (0.01, 0.79, 27), (0.5, 0.9, 1)):
        found = c.number_from("most_workers", s, efficiency)
        c.need(
            found == truth,
            f"most_workers({s}, {efficiency}) returned {found:g}, which is not the largest n "
            "with at least this efficiency.",
            "the efficiency is strong_speedup(s, n) / n: compute it for n = 1, 2, 3, ...",
        )
    c.need(
        c.call("most_workers", 0.0, 0.5) == math.inf,
        "most_workers(0.0, 0.5) must return infinity, but it does not.",
        "if the serial share is 0, the efficiency is 1 for every number of workers: return "
        "math.inf",
    )
    c.expect(True, "`strong_speedup`, `weak_speedup` and `most_workers` are right", "")


def _share(workers: list[int], step_s: list[float]) -> float:
    b, a = np.polyfit(1 / np.asarray(workers, dtype=float), step_s, 1)
    return float(a / (a + b))


@exercise("13.6", "A prediction and its check")
def prediction(c: Check) -> None:
    """The formula, the run of 16 workers, and how far both predictions were off."""
    for n, compute_s, link in ((2, 0.1, LINK), (64, 0.05, (1e-3, 4e6, 1e9)), (8, 0.0, LINK)):
        truth = compute_s + math.log2(n) * (link[0] + link[1] / link[2])
        found = c.number_from("predicted_step_s", n, compute_s, *link)
        c.need(
            math.isclose(found, truth, rel_tol=1e-6),
            f"predicted_step_s({n}, {compute_s}, ...) returned {found:.4g}, which does not follow "
            "the formula.",
            "there are log2(n) rounds; in each round, every worker sends all bytes in one message",
        )
        found = c.number_from("compute_from", truth, n, *link)
        c.need(
            math.isclose(found, compute_s, rel_tol=1e-6, abs_tol=1e-9),
            f"For a step with {n} workers, `compute_from` returned {found:.4g}, which does not "
            "follow the formula.",
            "solve the formula of `predicted_step_s` for the compute time",
        )
    c.expect(True, "`predicted_step_s` and `compute_from` follow the formula", "")
    two, many = c.run("two"), c.run("many")
    steps = int(many.history["step"].max(initial=-1)) + 1
    c.need(
        many.plan.workers >= WORKERS and steps >= STEPS,
        f"The run 'many' has {many.plan.workers} workers and {steps} steps. It needs at least "
        f"{WORKERS} workers and {STEPS} steps.",
        f"run the recipe `two` on `MANY` workers for {STEPS} steps. The number `MANY` must be at "
        f"least {WORKERS}",
    )
    c.need(
        many.plan.options.get("allreduce") == "recursive_doubling",
        "The run 'many' does not use the same all-reduce as the run 'two'.",
        "train 'many' again, with the option `-o` of the cell that trains 'two'",
    )
    later = many.history["step"] >= 1
    message_s = LINK[0] + LINK[1] / LINK[2]
    rounds = math.log2(many.plan.workers)
    links_s = (many.history["sync_wait_s"] + many.history["transfer_s"])[later].min()
    c.need(
        links_s > 0.97 * rounds * message_s,
        f"In the run 'many', a worker waited only {1e3 * links_s:.0f} ms for the messages of a "
        "step: the link is faster than in the run 'two'.",
        "train 'many' again, with the latency and the bandwidth of the cell that trains 'two'",
    )
    found = c.number_of("own_error")
    c.expect(
        any(
            abs(found - (many_s / (two_s + (rounds - 1) * message_s) - 1)) < ERROR
            for many_s in _mean_steps_s(many)
            for two_s in _mean_steps_s(two)
        ),
        "`own_error` compares the run 'many' with your formula",
        f"`own_error` is {found:.3g}, which does not agree with the runs 'two' and 'many'",
        "call `compute_from` with the mean step time of `two`, without step 0. The result is the "
        "compute time c in your formula. The error is the measured time divided by the predicted "
        "time, minus 1. Do not round it",
    )
    predicted = c.value("workbench_s")
    predicted_s = predicted.get(str(many.plan.workers)) if isinstance(predicted, dict) else None
    if not isinstance(predicted_s, float) or predicted_s <= 0:
        c.wrong(
            f"`workbench_s` has no prediction for {many.plan.workers} workers.",
            "section 5 has a cell that sets `workbench_s` for 4 to 64 workers: run it again",
        )
    found = c.number_of("workbench_error")
    c.expect(
        any(abs(found - (one / predicted_s - 1)) < ERROR for one in _mean_steps_s(many)),
        "`workbench_error` compares the run 'many' with Workbench's prediction",
        f"`workbench_error` is {found:.3g}, which does not agree with `workbench_s` and the run "
        "'many'",
        "the predicted time is workbench_s[str(MANY)]. The error is the measured time divided by "
        "the predicted time, minus 1",
    )


@exercise("13.7", "The slowest worker")
def slowest(c: Check) -> None:
    """The largest of n draws, an interval by bootstrap, and the better prediction."""
    times = [0.4, 0.1, 0.3, 0.2]
    for n in (1, 2, 16):
        weights = [((i + 1) / 4) ** n - (i / 4) ** n for i in range(4)]
        truth = sum(weight * value for weight, value in zip(weights, sorted(times), strict=True))
        found = c.number_from("expected_slowest", times, n)
        c.need(
            math.isclose(found, truth, rel_tol=1e-6),
            f"expected_slowest({times}, {n}) returned {found:.4g}, which does not follow the "
            "formula.",
            "sort the m times, and number them from 1 to m. The weight of time i is "
            "(i/m)**n - ((i-1)/m)**n",
        )
    c.expect(True, "`expected_slowest` is right for 1, 2 and 16 workers", "")
    for values in (np.random.default_rng(1).normal(10.0, 2.0, 50), np.array([1.0] * 5 + [10.0])):
        low, high = _interval(values)
        pair = floats(c, c.call("interval", values, 4000, 3), "interval", (2,))
        c.need(
            _near(pair, (low, high)),
            f"For {len(values)} values, `interval` returned {pair[0]:.2f} to {pair[1]:.2f}. But "
            f"90 % of the means that the check computed are between {low:.2f} and {high:.2f}.",
            "do this `repeats` times: draw len(values) values with replacement, and compute their "
            "mean. Then return the 5 % and the 95 % quantile of these means",
        )
    values = np.random.default_rng(1).normal(10.0, 2.0, 50)
    pairs = [
        floats(c, c.call("interval", values, repeats, seed), "interval", (2,))
        for repeats, seed in ((200, 3), (200, 3), (200, 4), (1, 3))
    ]
    c.need(
        np.array_equal(pairs[0], pairs[1]) and not np.array_equal(pairs[0], pairs[2]),
        "`interval` must return the same result for the same seed, and another result for another "
        "seed. At least one of these two things is not true.",
        "make the generator in the function, from the argument `seed`, and draw all values with "
        "this generator",
    )
    c.need(
        bool(np.isclose(*pairs[3])),
        "With `repeats=1` there is only one mean, so both ends of the interval must be equal. But "
        f"`interval` returned {pairs[3][0]:.4g} and {pairs[3][1]:.4g}.",
        "compute exactly as many means as the argument `repeats` says",
    )
    c.expect(True, "`interval` returns the 90 % interval of the mean", "")
    two, many = c.run("two"), c.run("many")
    times_s = two.history["compute_s"][two.history["step"] >= 1]
    message_s = LINK[0] + LINK[1] / LINK[2]
    longer_s = _largest_s(times_s, many.plan.workers) - _largest_s(times_s, 2)
    longer_s += (math.log2(many.plan.workers) - 1) * message_s
    found = c.number_of("slowest_error")
    c.expect(
        any(
            abs(found - (many_s / (two_s + longer_s) - 1)) < ERROR
            for many_s in _mean_steps_s(many)
            for two_s in _mean_steps_s(two)
        ),
        "`slowest_error` takes the slowest worker into account",
        f"`slowest_error` is {found:.3g}, which does not agree with the runs 'two' and 'many'",
        "first correct your prediction: add expected_slowest(times_s, MANY), and subtract "
        "expected_slowest(times_s, 2). Here `times_s` are the compute times of all workers of "
        "`two`, without step 0. Then compute `slowest_error` like `own_error`: divide the measured "
        "time by the predicted time, and subtract 1",
    )
    rows = (many.history["rank"] == 0) & (many.history["step"] >= 1)
    values = many.history["step_s"][rows]
    ends = _interval(values)
    pair = floats(c, c.value("many_interval"), "many_interval", (2,))
    c.expect(
        _near(pair, ends),
        "`many_interval` is the interval of the mean step time of `many`",
        f"`many_interval` is {pair[0]:.4g} to {pair[1]:.4g} s, but the check's own bootstrap gives "
        f"the 90 % interval {ends[0]:.4g} to {ends[1]:.4g} s",
        "in the history of `many`, take `step_s` of worker 0 without step 0. Call `interval` with "
        "these values, 1000 repeats and any seed",
    )


def _interval(values: NDArray[Any]) -> tuple[float, float]:
    drawn = np.random.default_rng(0).choice(values, (20_000, len(values))).mean(axis=1)
    return float(np.quantile(drawn, 0.05)), float(np.quantile(drawn, 0.95))


def _near(pair: NDArray[np.float64], ends: tuple[float, float]) -> bool:
    """Whether an interval is this one; intervals of 80 and of 95 % are 20 % narrower and wider."""
    width = ends[1] - ends[0]
    middle = abs(float(pair[0]) + float(pair[1]) - sum(ends)) / 2
    return abs(float(pair[1]) - float(pair[0]) - width) < 0.11 * width and middle < 0.1 * width


def _largest_s(times_s: NDArray[Any], n: int) -> float:
    below = np.arange(len(times_s) + 1) / len(times_s)
    return float(np.sum(np.sort(times_s) * np.diff(below**n)))


def _mean_steps_s(run: RunFacts) -> list[float]:
    """Return the mean step of all workers and of worker 0: an answer may use either."""
    late: NDArray[Any] = run.history["step"] >= 1
    first = late & (run.history["rank"] == 0)
    return [float(run.history["step_s"][rows].mean()) for rows in (late, first)]


@exercise("13.8", "Cost, and a job")
def cost(c: Check) -> None:
    """The price of an epoch, the cheapest number of workers, and the job folder."""
    for rows, batch, step_s, workers, price in ((1000, 100, 3.6, 4, 2.0), (1001, 100, 0.5, 1, 9.0)):
        found = c.number_from("epoch_cost", rows, batch, step_s, workers, price)
        c.need(
            math.isclose(found, math.ceil(rows / batch) * step_s / 3600 * workers * price),
            f"epoch_cost({rows}, {batch}, {step_s}, {workers}, {price}) returned {found:.4g}, "
            "which is not the price of the epoch.",
            "round the number of steps up; multiply it by the time of a step in hours, by the "
            "number of workers, and by the price per hour",
        )
    options = [(1, 100.0, 5.0), (2, 60.0, 6.0), (4, 40.0, 6.0), (8, 30.0, 9.0)]
    for deadline_s, truth, turn in (
        (200, 1, 1), (70, 4, 1), (70, 4, -1), (45, 4, 1), (40, 4, 1), (35, 8, 1), (10, 0, 1)
    ):  # fmt: skip
        offers = options[::turn]
        found = c.number_from("cheapest", offers, deadline_s)
        c.need(
            found == truth,
            f"cheapest({offers}, {deadline_s}) returned {found:g}, which is not right.",
            "leave out each option that takes more than `deadline_s` seconds. Then take the option "
            "with the lowest cost. If costs are equal, take the shortest time. Return the number "
            "of workers of this option. If no option remains, return 0",
        )
    c.expect(True, "`epoch_cost` and `cheapest` are right", "")
    names = [str(one) for one in c.items("job_files")]
    c.expect(
        {"train.py", "run.json", "requirements.txt", "README.md"} <= set(names)
        and names == sorted(set(names))
        and not {"runs", "checkpoints"} & set(names),
        "`job_files` are the files of a job folder",
        f"the length of `job_files` is {len(names)}. At least one thing is wrong: a name is "
        "missing, a name appears twice, the list is not sorted, or the list has the name of a "
        "subfolder",
        "list the names of the files in the folder that to_job returns: sort the list, and leave "
        "out subfolders",
    )
    c.expect(
        c.text("job_strategy") == "one_device",
        "`job_strategy` is the strategy of the run",
        f"`job_strategy` is {c.text('job_strategy')!r}, but run.json names another strategy",
        "read run.json with json.loads, and look for the name of the strategy in the result",
    )
