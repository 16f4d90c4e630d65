"""Lab 4: central storage."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..answers import Check, close, exercise, number
from ..plain import NamedRun

LIMIT_S = 8.0
"""Steps on a few numbers take milliseconds: an answer that takes longer probably never ends."""

SHARE = 0.02
"""How far a number that is read from a run may be off: a student may round it."""

EXACT = 1e-5
"""How far weights may differ: rounding changes them by about 1e-7, a wrong mean by about 1e-2."""

ASIDE = 1.0002
"""If a step is longer with N times this and N divided by this, N is within 0.01 % of the best."""

STEPS = 3
TRIALS = (((7,), "float64", 0.0), ((3, 4), "float32", 0.5))
"""The shape and type of `w`, and all numbers of `velocity` before the first step."""

_STORE = """
def _labs_look(gradients):
    calls = []
    def updater(key, total, value):
        calls.append(key)
        value -= 0.5 * total
    def made():
        return {key: torch.tensor(numbers, dtype=getattr(torch, kind))
                for key, (kind, numbers) in {start!r}.items()}
    def tensors(held, met):
        if id(held) in met:
            return []
        met[id(held)] = held
        if torch.is_tensor(held):
            return [held]
        if type(held).__name__ == "ndarray":
            return [torch.as_tensor(held)] if held.dtype.kind in "biuf" else []
        if isinstance(held, dict):
            of = list(held.values())
        elif isinstance(held, (list, tuple, set)):
            of = list(held)
        elif callable(held) and not isinstance(held, torch.nn.Module):
            of = [cell.cell_contents for cell in getattr(held, "__closure__", None) or ()]
        else:
            of = list(getattr(held, "__dict__", {}).values())
        return sum((tensors(one, met) for one in of), [])
    start, as_given = made(), made()
    store = KVStore(start, updater)
    def of_store():
        return tensors([store, dict(vars(KVStore))], {id(updater): updater})
    shapes = [given.shape for given in as_given.values()]  # other numbers take memory too
    copies = sum(held.shape in shapes and held.device.type != "meta" for held in of_store())
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
    copies += sum(torch.equal(held, one.to(held.dtype)) for held in of_store()
                  for one in into.values() if held.device.type != "meta")
    alike = all(bool((start[key] == as_given[key]).all()) for key in as_given)
    return [seen, calls, kept, alike, copies]
import torch
_labs_answer = _labs_look({gradients!r}[rank])
del _labs_look
"""

_TRAIN = """
def _labs_look(trials):
    found = []
    for shape, kind, begin, parts in trials:
        w = torch.ones(shape, dtype=getattr(torch, kind))
        velocity = torch.full_like(w, begin) if rank == 0 else None
        for gradient, samples in parts:
            central_step(w, torch.tensor(gradient, dtype=w.dtype), samples, velocity)
        found.append([w, velocity])
    return found
import torch
_labs_answer = _labs_look({parts!r}[rank])
del _labs_look
"""
"""The right results are computed here: an engine only gets its own part of the numbers."""


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
    trials = [(*trial, _parts(len(have), trial[0])) for trial in TRIALS]
    found = c.ask(
        _TRAIN.format(parts=[[(*trial[:3], trial[3][rank]) for trial in trials]
                             for rank in range(len(have))]),
        limit_s=LIMIT_S,
        hint="`w` can be a vector or a matrix. `velocity` is a tensor on worker 0, and None on the "
        "other workers. Your function must work in all these cases. `dist` is torch.distributed",
    )  # fmt: skip
    weights = [[np.asarray(one[0], dtype=float) for one in worker] for worker in found]
    held = [np.asarray(one[1], dtype=float) for one in found[0]]
    alone = [_alone(shape, begin, parts) for shape, _, begin, parts in trials]
    for worker in weights:
        for w, (shape, *_) in zip(worker, trials, strict=True):
            c.need(
                w.shape == shape,
                f"After the call `w` has the shape {w.shape}, but its shape must still be {shape}.",
                "change the values of `w` in place, not its shape",
            )
    c.need(
        all(bool((w != 1).any()) for w in weights[0]),
        "The weights of worker 0 have not changed.",
        "change `w` in place with `w -= ...`: `w = w - ...` makes a new tensor that the caller "
        "does not see",
    )
    c.expect(
        all(np.array_equal(w, server, equal_nan=True)
            for worker in weights for w, server in zip(worker, weights[0], strict=True)),
        "all workers have the server's weights",
        "after the call, `w` is not the same on all workers",
        "in every step, the server has to send its new weights to all workers",
    )  # fmt: skip
    c.expect(
        all(bool((v != begin).any()) for v, (_, _, begin) in zip(held, TRIALS, strict=True)),
        "the server keeps the optimizer's state",
        "`velocity` of worker 0 has not changed after three steps",
        "the next step needs the new velocity: change the tensor `velocity` in place",
    )
    off = [float(np.abs(w - true).max()) for w, (true, _) in zip(weights[0], alone, strict=True)]
    state_off = [float(np.abs(v - true).max()) for v, (_, true) in zip(held, alone, strict=True)]
    hint = (
        "multiply each worker's gradient by this worker's number of samples in this step, as in "
        "the formula for g. Also keep `velocity` for the next step"
    )
    if all(one <= EXACT for one in state_off):
        hint = "`velocity` is right: check the line that changes `w`"
    elif all(one <= EXACT for one in off):
        hint = "`w` is right: compare `velocity` with the formula for v"
    elif max(off[0], state_off[0]) <= EXACT:
        hint = (
            "if `velocity` is zero before the first step, your results are right. If `velocity` is "
            f"{TRIALS[1][2]:g}, they are wrong. Does your step use the old velocity?"
        )
    c.expect(
        all(one <= EXACT for one in off + state_off),
        "after three steps, `w` and `velocity` equal those of one device with the whole batch",
        "after three steps, `w` and `velocity` of worker 0 do not both equal those of one device. "
        f"The largest difference is {max(off):.1g} for `w` and {max(state_off):.1g} for "
        "`velocity`",
        hint,
    )


Parts = list[list[tuple[Any, int]]]


def _parts(workers: int, shape: tuple[int, ...]) -> Parts:
    """Return for each worker and step a gradient and the number of its samples."""
    draw = np.random.default_rng(4)
    return [
        [(draw.normal(size=shape).round(6).tolist(), 3 + 4 * ((worker + 2 * step) % workers) + step)
         for step in range(STEPS)]
        for worker in range(workers)
    ]  # fmt: skip


def _alone(shape: tuple[int, ...], begin: float, parts: Parts) -> tuple[Any, Any]:
    """Return the weights and the velocity of one device that takes the whole batch."""
    weights, velocity = np.ones(shape), np.full(shape, begin)
    for step in range(STEPS):
        mine = [worker[step] for worker in parts]
        mean = sum(np.array(g) * n for g, n in mine) / sum(n for _, n in mine)
        velocity = 0.9 * velocity + mean
        weights = weights - 0.1 * velocity
    return weights, velocity


def _step_bytes(run: Any) -> float:
    """Return the bytes that all workers of a run send in a step."""
    return float(run.summarise().sent_step_bytes)


@exercise("4.2", "Bytes through the server's link")
def through_server(c: Check) -> None:
    """Compare the bytes of the server with the counts of the run."""
    known = {name: c.known_run(name) for name in _CENTRAL}
    names = [name for name, run in known.items() if run is not None and run.state == "finished"]
    for name in names or ["central-3"]:
        run = c.run(name)
        value = c.number_from("through_server", run)
        c.need(
            close(value, 2 * _step_bytes(run), SHARE),
            f"For the run {name!r}, through_server returned {value:.6g} bytes, which is not right.",
            "add up `sent_bytes` over the rows of a single step: the server receives this number "
            "of bytes. The server also sends the same number of bytes to the workers: count both "
            "directions",
        )
    run = c.run((names or ["central-3"])[0])
    gradient_bytes = _step_bytes(run) / run.plan.workers
    c.need(
        gradient_bytes > 0,
        f"In the run {run.name!r} the workers sent 0 bytes.",
        "run the cell that trains this run again: its strategy must be central_storage",
    )
    for workers, times in ((2, 3), (5, 2)):
        sent_bytes = times * gradient_bytes
        value = c.number_from("through_server", NamedRun(run.name, workers, sent_bytes))
        c.need(
            close(value, 2 * workers * sent_bytes, SHARE),
            f"The check ran through_server on an invented run: each of {workers} workers "
            f"sends {sent_bytes:.6g} bytes in a step. For this run, through_server returned "
            f"{value:.6g} bytes, which is not right.",
            "take all numbers from `run.history`: the number of steps, the number of workers, and "
            "the bytes that each worker sends",
        )
    c.expect(
        True, "`through_server` counts all bytes that the server receives and sends in one step", ""
    )


_CENTRAL = ("central-3", "central-1", "central-2", "adam-central")


@exercise("4.3", "The best number of workers")
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
        c.need(
            n > 0,
            f"{asked} returned {n:g}, but the result must be greater than 0.",
            "return a number of workers",
        )
        here_s, less_s, more_s = (
            t1_s / k + 2 * k * m_bytes / bytes_per_s for k in (n, n / ASIDE, n * ASIDE)
        )
        best = (t1_s * bytes_per_s / (2 * m_bytes)) ** 0.5
        c.need(
            (n != round(best, 1) and (n != int(n) or abs(n - best) >= 1))
            or here_s <= min(less_s, more_s),
            f"{asked} returned {n:g}, which is a rounded number.",
            "do not round: return the exact N with the shortest step, even if N is not a whole "
            "number",
        )
        fewer = "fewer" if less_s < here_s else "more"
        c.need(
            here_s <= min(less_s, more_s),
            f"{asked} returned {n:.4g}, but with {fewer} workers a step is shorter.",
            "if N grows, T₁/N becomes smaller and 2NM/B becomes larger. At the best N, the "
            "derivative of their sum is 0",
        )
    c.expect(True, "with fewer or more workers than `best_workers` returns, a step is longer", "")


@exercise("4.4", "The memory of each process")
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
        "a worker of central storage computes gradients, but the server has the optimizer",
        "the server holds the weights, the optimizer's state, and one gradient from each worker",
    )
    said: list[tuple[str, str]] = []
    for (n, slots), truth in trials:
        found = _three(c, n, slots)
        for k in range(len(who)):
            if right[k] and not close(found[k], truth[k], SHARE):
                right[k] = False
                said.append(
                    (
                        f"holds({n}, {slots}) says that {who[k]} holds {found[k]:g} times the size "
                        "of the weights, which is not right",
                        hints[k],
                    )
                )
    for k in range(len(who)):
        if right[k]:
            c.expect(True, f"the memory of {who[k]} is right", "")
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
        "fill in the three variables in the cell, in units of M: the number 4 means 4M",
    )
    return values


_VALUES = {"a": ("float64", (2, 3)), "b": ("float32", (2,))}
_KEYS = ("a", "b", "a", "a")
_FILL = 7.0
"""The value of all numbers in `into` before a pull."""


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
        hint="all workers call `push` and `pull` in the same order. A tensor in `values` may be a "
        "matrix. In your class, only worker 0 may keep copies of these tensors",
    )
    truth = [np.array(values) for _, values in start.values()]
    pulled = [[[np.asarray(one, dtype=float) for one in pair] for pair in w[0]] for w in found]
    for push, key in enumerate(_KEYS):
        place = "ab".index(key)
        truth[place] = truth[place] - 0.5 * sum(np.array(mine[push][1]) for mine in gradients)
        for worker, seen in enumerate(pulled):
            c.need(
                not any((one == _FILL).all() for one in seen[push]),
                f"After push {push + 1}, `pull` did not change `into` on worker {worker}.",
                "copy the server's value into the tensor `into`, on every worker",
            )
            off = max(float(np.abs(a - b).max()) for a, b in zip(seen[push], truth, strict=True))
            c.need(
                off <= EXACT,
                f"After push {push + 1}, worker {worker} pulled numbers that differ by up to "
                f"{off:.2g} from the right values.",
                "call the updater with the sum of all workers' gradients, not with their mean. "
                "`pull` copies the server's value into `into` on every worker",
            )
    c.expect(True, "after each push, all workers pull the server's values of both keys", "")
    calls = [list(w[1]) for w in found]
    c.expect(
        calls[0] == [*_KEYS] and not any(calls[1:]),
        "the updater runs once for each push, on worker 0 only",
        f"in {len(_KEYS)} pushes, the updater ran "
        + ", ".join(f"{len(one)} times on worker {r}" for r, one in enumerate(calls)),
        "worker 0 must call the updater once in each push, and the other workers must never call "
        "it",
    )
    c.expect(
        all(w[2] for w in found),
        "`push` does not change `gradient`",
        "`push` changed its argument `gradient` in place",
        "`dist.reduce` changes the tensor that it gets: call it with a copy of `gradient`",
    )
    c.expect(
        all(w[3] for w in found),
        "a push does not change the tensors in `values`",
        "the pushes changed the tensors in the argument `values` of KVStore",
        "copy each tensor: a copy of the dictionary still contains the same tensors",
    )
    keepers = [worker for worker, w in enumerate(found) if worker > 0 and w[4] > 0]
    c.expect(
        not keepers,
        "only worker 0 keeps the values",
        f"only worker 0 may keep the values, but worker {keepers[0] if keepers else 0} also keeps "
        "them, or tensors of the same shapes",
        "the other workers need no copy: `pull` gives them the server's value",
    )
