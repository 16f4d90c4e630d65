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

ASIDE = 1.01
"""How far from an answer a step must be longer: the answer is then within 0.5 % of the best."""

STEPS = 3
TRIALS = (((7,), "float64"), ((3, 4), "float32"))

_STORE = """
def _labs_look(gradients):
    calls = []
    def updater(key, total, value):
        calls.append(key)
        value -= 0.5 * total
    def made():
        return {key: torch.tensor(numbers, dtype=getattr(torch, kind))
                for key, (kind, numbers) in {start!r}.items()}
    def tensors(held):
        if torch.is_tensor(held):
            return [held]
        of = held.values() if isinstance(held, dict) else held
        return sum(map(tensors, of), []) if isinstance(held, (dict, list, tuple)) else []
    start, as_given = made(), made()
    store = KVStore(start, updater)
    copies = sum(held.shape == given.shape and bool((held == given).all())
                 for held in tensors(dict(getattr(store, "__dict__", {})))
                 for given in as_given.values())
    seen, kept = [], True
    for key, numbers in gradients:
        gradient = torch.tensor(numbers, dtype=start[key].dtype)
        before = gradient.clone()
        store.push(key, gradient)
        kept = kept and bool(torch.equal(gradient, before))
        into = {name: torch.full_like(value, {fill}) for name, value in start.items()}
        for name in into:
            store.pull(name, into[name])
        seen.append([into["a"], into["b"]])
    alike = all(bool((start[key] == as_given[key]).all()) for key in as_given)
    return [seen, calls, kept, alike, copies]
import torch
_labs_answer = _labs_look({gradients!r}[rank])
del _labs_look
"""

_TRAIN = """
def _labs_look(trials):
    found = []
    for shape, kind, parts in trials:
        w = torch.ones(shape, dtype=getattr(torch, kind))
        velocity = torch.zeros_like(w) if rank == 0 else None
        for gradient, samples in parts:
            central_step(w, torch.tensor(gradient, dtype=w.dtype), samples, velocity)
        found.append([w, velocity])
    return found
import torch
_labs_answer = _labs_look({parts!r}[rank])
del _labs_look
"""
"""The right result of both is computed here: the process of an answer only gets its own part."""


@exercise("4.1", "The server's step", where="the engines")
def central_step(c: Check) -> None:
    """Run three steps on the engines. Compare weights and optimizer state with one device."""
    have = c.ask("_labs_answer = callable(globals().get('central_step'))")
    c.need(
        all(have),
        "The engines have no function `central_step`.",
        "run the cell of exercise 4.1: it begins with %%distributed",
    )
    c.need_all_engines()
    trials = [(shape, kind, _parts(len(have), shape)) for shape, kind in TRIALS]
    found = c.ask(
        _TRAIN.format(parts=[[(*trial[:2], trial[2][rank]) for trial in trials]
                             for rank in range(len(have))]),
        limit_s=LIMIT_S,
        hint="`w` is a vector or a matrix, `velocity` is None on all workers except 0, and `dist` "
        "is torch.distributed",
    )  # fmt: skip
    weights = [[np.asarray(one[0], dtype=float) for one in worker] for worker in found]
    held = [np.asarray(one[1], dtype=float) for one in found[0]]
    alone = [_alone(shape, parts) for shape, _, parts in trials]
    for worker in weights:
        for w, (shape, _, _) in zip(worker, trials, strict=True):
            c.need(
                w.shape == shape,
                f"`w` has the shape {w.shape} afterwards, but it must have {shape}.",
                "change the values of `w` in place, not its shape",
            )
    c.need(
        all(bool((w != 1).any()) for w in weights[0]),
        "The weights of worker 0 have not changed.",
        "change `w` in place: `w -= ...` does this, `w = w - ...` makes a new tensor that the "
        "caller does not see",
    )
    c.expect(
        all(np.array_equal(w, server, equal_nan=True)
            for worker in weights for w, server in zip(worker, weights[0], strict=True)),
        "all workers have the server's weights",
        "the workers' weights are not equal",
        "the server has to send its weights to all workers, in every step",
    )  # fmt: skip
    c.expect(
        all(bool((velocity != 0).any()) for velocity in held),
        "the server keeps the optimizer's state",
        "`velocity` of worker 0 is still zero after three steps",
        "the next step begins with `velocity`: change it in place",
    )
    off = [float(np.abs(w - true).max()) for w, (true, _) in zip(weights[0], alone, strict=True)]
    state_off = [float(np.abs(v - true).max()) for v, (_, true) in zip(held, alone, strict=True)]
    hint = (
        "the mean of means is not the mean: weight each gradient by its worker's samples of this "
        "step, and keep the velocity for the next step"
    )
    if all(one <= EXACT for one in state_off):
        hint = "the velocity is right: look at the step that `w` takes with it"
    elif all(one <= EXACT for one in off):
        hint = "the weights are right: compare `velocity` with the v in the text"
    c.expect(
        all(one <= EXACT for one in off + state_off),
        "three steps equal those of one device with the whole batch",
        f"after three steps a weight of worker 0 differs by up to {max(off):.1g} from that of one "
        f"device, and a number of its velocity by up to {max(state_off):.1g}",
        hint,
    )


Parts = list[list[tuple[Any, int]]]


def _parts(workers: int, shape: tuple[int, ...]) -> Parts:
    """Return by worker and step a gradient and the samples that it is a mean of."""
    draw = np.random.default_rng(4)
    return [
        [(draw.normal(size=shape).round(6).tolist(), 3 + 4 * ((worker + 2 * step) % workers) + step)
         for step in range(STEPS)]
        for worker in range(workers)
    ]  # fmt: skip


def _alone(shape: tuple[int, ...], parts: Parts) -> tuple[Any, Any]:
    """Return the weights and the velocity of one device that takes the whole batch."""
    weights, velocity = np.ones(shape), np.zeros(shape)
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
    for workers, times in ((2, 3), (5, 2)):
        sent_bytes = times * gradient_bytes
        value = c.number_from("through_server", NamedRun(run.name, workers, sent_bytes))
        c.need(
            close(value, 2 * workers * sent_bytes, SHARE),
            f"For a run with {workers} workers, each of which sends {sent_bytes:.6g} bytes in a "
            f"step, through_server returned {value:.6g} bytes, which is not right.",
            "read everything from the run that the function gets: how many steps and workers it "
            "has, and how many bytes each worker sends",
        )
    c.expect(True, "all bytes that come in and go out in one step are counted", "")


_CENTRAL = ("central-3", "central-1", "central-2", "adam-central")


@exercise("4.3", "Where the curve bends")
def best_workers(c: Check) -> None:
    """Compare the returned number of workers with other numbers of workers."""
    for t1_s, m_bytes, bytes_per_s in (
        (0.06, 57640, 6e6),
        (1.0, 4e6, 1e9),
        (0.5, 1e8, 1e10),
        (10.0, 1e6, 1e10),
    ):
        asked = f"best_workers({t1_s:g}, {m_bytes:g}, {bytes_per_s:g})"
        n = c.number_from("best_workers", t1_s, m_bytes, bytes_per_s)
        c.need(n > 0, f"{asked} returned {n:g}, but the result must be greater than 0.")
        here_s, less_s, more_s = (
            t1_s / k + 2 * k * m_bytes / bytes_per_s for k in (n, n / ASIDE, n * ASIDE)
        )
        best = (t1_s * bytes_per_s / (2 * m_bytes)) ** 0.5
        c.need(
            (n != round(best, 1) and (n != int(n) or abs(n - best) >= 1))
            or here_s <= min(less_s, more_s),
            f"{asked} returned {n:g}, a rounded number.",
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


_VALUES = {"a": ("float64", (2, 3)), "b": ("float32", (2,))}
_KEYS = ("a", "b", "a", "a")
_FILL = 7.0
"""What `into` holds before a pull."""


@exercise("4.5", "Push and pull", where="the engines")
def store(c: Check) -> None:
    """Push four gradients under two keys. Compare what each worker pulls after each push."""
    have = c.ask("_labs_answer = callable(globals().get('KVStore'))")
    c.need(
        all(have),
        "The engines have no class `KVStore`.",
        "run the cell of exercise 4.5: it begins with %%distributed",
    )
    c.need_all_engines()
    draw = np.random.default_rng(5)

    def numbers(shape: tuple[int, ...]) -> Any:
        return draw.normal(size=shape).round(6).tolist()

    gradients = [[(key, numbers(_VALUES[key][1])) for key in _KEYS] for _ in have]
    start = {key: (kind, numbers(shape)) for key, (kind, shape) in _VALUES.items()}
    found = c.ask(
        # `format` would read the braces of the code's dictionaries.
        _STORE.replace("{gradients!r}", repr(gradients))
        .replace("{start!r}", repr(start))
        .replace("{fill}", repr(_FILL)),
        limit_s=LIMIT_S,
        hint="all workers call push and pull in the same order, a value may be a matrix, and only "
        "worker 0 has the values",
    )
    truth = [np.array(values) for _, values in start.values()]
    pulled = [[[np.asarray(one, dtype=float) for one in pair] for pair in w[0]] for w in found]
    for push, key in enumerate(_KEYS):
        place = "ab".index(key)
        truth[place] = truth[place] - 0.5 * sum(np.array(mine[push][1]) for mine in gradients)
        for worker, seen in enumerate(pulled):
            c.need(
                not any((one == _FILL).all() for one in seen[push]),
                f"After push {push + 1} `pull` left `into` as it was on worker {worker}.",
                "copy the server's value into the tensor `into`, on every worker",
            )
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
        f"in {len(_KEYS)} pushes the updater ran {', '.join(str(len(one)) for one in calls)} times "
        "on the workers",
        "worker 0 calls the updater once in each push, the other workers never do",
    )
    c.expect(
        all(w[2] for w in found),
        "push leaves the gradient as it was",
        "push changed the gradient of its caller",
        "dist.reduce changes its tensor: give it a copy",
    )
    c.expect(
        all(w[3] for w in found),
        "the tensors that the store was made of are as they were",
        "after the pushes, the tensors in `values` of the caller have changed",
        "the server keeps a copy of each tensor: a copy of the dictionary has the same tensors",
    )
    keepers = [worker for worker, w in enumerate(found) if worker > 0 and w[4] > 0]
    c.expect(
        not keepers,
        "only worker 0 keeps the values",
        f"worker {keepers[0] if keepers else 0} keeps the values too",
        "only the server has them: another worker gets a value when it pulls",
    )
