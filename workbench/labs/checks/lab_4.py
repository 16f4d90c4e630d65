"""Lab 4: central storage."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..answers import Check, close, exercise, number
from ..plain import NamedRun

LIMIT_S = 8.0
"""Steps on a few numbers take milliseconds; an answer that takes longer waits forever."""

SHARE = 0.02
"""How far a number that is read from a run may be off: a student may round it."""

EXACT = 1e-5
"""How far weights may differ: a share in single precision is 1e-7 off, a mean of means 1e-2."""

ASIDE = 1.06
"""How far from an answer a step must be longer: the answer is then within 3 % of the best."""

STEPS, NUMBERS = 3, 7

_STORE = """
def _labs_look(gradients):
    calls = []
    def updater(key, total, value):
        calls.append(key)
        value -= 0.5 * total
    start = {"a": torch.ones(3, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    store = KVStore(start, updater)
    seen, kept = [], True
    for key, numbers in gradients:
        gradient = torch.tensor(numbers, dtype=torch.float64)
        before = gradient.clone()
        store.push(key, gradient)
        kept = kept and bool(torch.equal(gradient, before))
        into = {name: torch.full_like(value, 7.0) for name, value in start.items()}
        for name in into:
            store.pull(name, into[name])
        seen.append([into["a"], into["b"]])
    return [seen, calls, kept]
import torch
_labs_answer = _labs_look({gradients!r}[rank])
del _labs_look
"""

_TRAIN = """
def _labs_look(parts):
    w = torch.ones({numbers}, dtype=torch.float64)
    velocity = torch.zeros({numbers}, dtype=torch.float64) if rank == 0 else None
    for gradient, samples in parts:
        central_step(w, torch.tensor(gradient, dtype=torch.float64), samples, velocity)
    return [w, velocity]
import torch
_labs_answer = _labs_look({parts!r}[rank])
del _labs_look
"""
"""The right result of both is computed here: the process of an answer only gets its own part."""


@exercise("4.1", "The server's step", where="the engines")
def central_step(c: Check) -> None:
    """Run the step on the engines. Compare weights and optimizer state with one device."""
    have = c.ask("_labs_answer = callable(globals().get('central_step'))")
    c.need(
        all(have),
        "The engines have no function `central_step`.",
        "run the cell of exercise 4.1: it begins with %%distributed",
    )
    parts = _parts(len(have))
    found = c.ask(
        _TRAIN.format(numbers=NUMBERS, parts=parts),
        limit_s=LIMIT_S,
        hint="`velocity` is None on all workers except 0, and `dist` is torch.distributed",
    )
    weights = [np.asarray(worker[0], dtype=float) for worker in found]
    alone, state = _alone(parts)
    c.need(
        all(w.shape == alone.shape for w in weights),
        f"`w` has the shape {weights[0].shape} afterwards, but it must have {alone.shape}.",
        "change the values of `w` in place, not its shape",
    )
    c.need(
        bool((weights[0] != 1).any()),
        "The weights of worker 0 have not changed.",
        "change `w` in place: `w -= ...` does this, `w = w - ...` makes a new tensor that the "
        "caller does not see",
    )
    c.expect(
        all(np.array_equal(w, weights[0]) for w in weights),
        "all workers have the server's weights",
        "the workers' weights are not equal",
        "the server has to send its weights to all workers, in every step",
    )
    held = np.asarray(found[0][1], dtype=float)
    c.expect(
        bool((held != 0).any()),
        "the server keeps the optimizer's state",
        "`velocity` of worker 0 is still zero after three steps",
        "the next step begins with `velocity`: change it in place",
    )
    off = float(np.abs(weights[0] - alone).max())
    c.expect(
        off <= EXACT and float(np.abs(held - state).max()) <= EXACT,
        "three steps equal those of one device with the whole batch",
        f"after three steps a weight of worker 0 differs by {off:.1g} from that of one device",
        "the mean of means is not the mean: weight each gradient by its worker's samples, and "
        "keep the velocity for the next step",
    )


Parts = list[list[tuple[list[float], int]]]


def _parts(workers: int) -> Parts:
    """Return by worker and step a gradient and the samples that it is a mean of."""
    draw = np.random.default_rng(4)
    return [
        [([round(float(x), 6) for x in draw.normal(size=NUMBERS)], 3 + 4 * worker)
         for _ in range(STEPS)]
        for worker in range(workers)
    ]  # fmt: skip


def _alone(parts: Parts) -> tuple[Any, Any]:
    """Return the weights and the velocity of one device that takes the whole batch."""
    weights, velocity = np.ones(NUMBERS), np.zeros(NUMBERS)
    for step in range(STEPS):
        mine = [worker[step] for worker in parts]
        mean = sum(np.array(g) * n for g, n in mine) / sum(n for _, n in mine)
        velocity = 0.9 * velocity + mean
        weights = weights - 0.1 * velocity
    return weights, velocity


def _step_bytes(run: Any) -> float:
    """Return what the workers of a run send in a step."""
    return float(run.summarise().sent_step_bytes)


@exercise("4.2", "What passes the server")
def through_server(c: Check) -> None:
    """Compare the bytes of the server with the counts of the run."""
    known = {name: c.known_run(name) for name in _CENTRAL}
    names = [name for name, run in known.items() if run is not None and run.state == "finished"]
    for name in names or ["central-3"]:
        run = c.run(name)
        value = c.number_from("through_server", run)
        c.need(
            close(value, 2 * _step_bytes(run), SHARE),
            f"through_server of run {name!r} returned {value:.6g} bytes, which is not right.",
            "add up the rows of a single step: the gradients of all workers come in, and the "
            "same number of bytes goes out to them",
        )
    run = c.run((names or ["central-3"])[0])
    gradient_bytes = _step_bytes(run) / run.plan.workers
    c.need(
        gradient_bytes > 0,
        f"In the run {run.name!r} nothing was sent.",
        "run its cell again: in that cell the workers send their gradients to a server",
    )
    for workers in (2, 5):
        value = c.number_from("through_server", NamedRun(run.name, workers, gradient_bytes))
        c.need(
            close(value, 2 * workers * gradient_bytes, SHARE),
            f"For a run with {workers} workers through_server returned {value:.6g} bytes, which is "
            "not right.",
            "count the rows of the run that the function gets: it may have any number of workers",
        )
    c.expect(True, "all bytes that come in and go out in one step are counted", "")


_CENTRAL = ("central-3", "central-1", "central-2", "adam-central")


@exercise("4.3", "Where the curve bends")
def best_workers(c: Check) -> None:
    """Compare the returned number of workers with other numbers of workers."""
    for t1_s, m_bytes, bytes_per_s in ((0.06, 57640, 6e6), (1.0, 4e6, 1e9), (0.5, 1e8, 1e10)):
        asked = f"best_workers({t1_s:g}, {m_bytes:g}, {bytes_per_s:g})"
        n = c.number_from("best_workers", t1_s, m_bytes, bytes_per_s)
        c.need(n > 0, f"{asked} returned {n:g}, but the result must be greater than 0.")
        here_s, less_s, more_s = (
            t1_s / k + 2 * k * m_bytes / bytes_per_s for k in (n, n / ASIDE, n * ASIDE)
        )
        best = (t1_s * bytes_per_s / (2 * m_bytes)) ** 0.5
        c.need(
            n != int(n) or abs(n - best) >= 1 or here_s <= min(less_s, more_s),
            f"{asked} returned {n:g}, a whole number.",
            "do not round: return the exact lowest point of the curve",
        )
        fewer = "fewer" if less_s < here_s else "more"
        c.need(
            here_s <= min(less_s, more_s),
            f"{asked} returned {n:.4g}: with {fewer} workers a step is shorter.",
            "one term falls with N, the other grows, and at the best N their slopes cancel",
        )
    c.expect(True, "with fewer workers and with more a step is longer", "")


@exercise("4.4", "Who holds what")
def holds(c: Check) -> None:
    """Compare the answer with the bytes that the runs counted."""
    central, mirrored = c.run("adam-central").summarise(), c.run("adam-mirrored").summarise()
    m_bytes = central.servers[0]["parameters_bytes"]
    server_bytes = sum(
        central.servers[0][f"{part}_bytes"] for part in ("parameters", "optimizer", "gradients")
    )
    measured = (mirrored.memory_bytes[0], central.memory_bytes[0], server_bytes)
    trials = [((central.workers, 2), [size_bytes / m_bytes for size_bytes in measured])]
    trials += [((n, slots), [2 + slots, 2, 1 + slots + n]) for n, slots in ((1, 0), (2, 1), (8, 2))]
    who = ("a mirrored worker", "a worker of central storage", "the server")
    right = [True] * len(who)
    hints = (
        "a mirrored worker has everything: weights, gradients and the optimizer's state",
        "a worker of central storage computes gradients, but its optimizer takes no step",
        "in a step one gradient arrives from each worker, and the weights and the state exist once",
    )
    said: list[tuple[str, str]] = []
    for (n, slots), truth in trials:
        found = _three(c, n, slots)
        for k in range(len(who)):
            if right[k] and not close(found[k], truth[k], SHARE):
                right[k] = False
                said.append((f"holds({n}, {slots}) gives {found[k]:g} M for {who[k]}", hints[k]))
    for k in range(len(who)):
        if right[k]:
            c.expect(True, f"what {who[k]} holds is right", "")
    for words, hint in said:
        c.expect(False, "", words, hint)


def _three(c: Check, n: int, slots: int) -> list[float]:
    found = c.call("holds", n, slots)
    try:
        values = [number(value) for value in found]
    except (TypeError, ValueError):
        values = []
    c.need(
        len(values) == 3 and all(math.isfinite(value) for value in values),
        f"holds({n}, {slots}) returned {found!r}, but it must return a list of three numbers.",
        "fill in the three variables in the cell: each is a multiple of M",
    )
    return values


_KEYS = ("a", "b", "a", "a")


@exercise("4.5", "Push and pull", where="the engines")
def store(c: Check) -> None:
    """Push four gradients under two keys. Compare what each worker pulls after each push."""
    have = c.ask("_labs_answer = callable(globals().get('KVStore'))")
    c.need(
        all(have),
        "The engines have no class `KVStore`.",
        "run the cell of exercise 4.5: it begins with %%distributed",
    )
    draw = np.random.default_rng(5)
    gradients = [
        [(key, [round(float(x), 6) for x in draw.normal(size=3 if key == "a" else 2)])
         for key in _KEYS]
        for _ in have
    ]  # fmt: skip
    found = c.ask(
        # `format` would read the braces of the code's dictionaries.
        _STORE.replace("{gradients!r}", repr(gradients)),
        limit_s=LIMIT_S,
        hint="all workers call push and pull in the same order; `values` exist on worker 0 only",
    )
    truth = [np.ones(3), np.zeros(2)]
    pulled = [[[np.asarray(one, dtype=float) for one in pair] for pair in w[0]] for w in found]
    for push, key in enumerate(_KEYS):
        place = "ab".index(key)
        truth[place] = truth[place] - 0.5 * sum(np.array(mine[push][1]) for mine in gradients)
        for worker, seen in enumerate(pulled):
            off = max(float(np.abs(a - b).max()) for a, b in zip(seen[push], truth, strict=True))
            c.need(
                off <= EXACT,
                f"After push {push + 1} worker {worker} pulled numbers that are {off:.2g} off.",
                "the updater gets the sum of all workers' gradients, not their mean; pull copies "
                "the server's value into `into` on every worker",
            )
    c.expect(True, "after each push, all workers pull the server's values of both keys", "")
    calls = [list(w[1]) for w in found]
    c.expect(
        calls[0] == [*_KEYS] and not any(calls[1:]),
        "the updater runs once for each push, on worker 0 only",
        f"the updater ran {', '.join(str(len(one)) for one in calls)} times on the workers",
        "only worker 0 keeps the values and calls the updater",
    )
    c.expect(
        all(w[2] for w in found),
        "push leaves the gradient as it was",
        "push changed the gradient of its caller",
        "dist.reduce changes its tensor: give it a copy",
    )
