"""Lab 8: things break."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ...catalog import lookup
from ..answers import exercise

if TYPE_CHECKING:
    from ..answers import Check

STEPS, SAVED, TOTAL = 38, 20, 60
BATCH = 48
ROUNDING = 1e-10
"""The largest difference of runs that differ only in the order of their sums (float64)."""

_TRAIN = """
def _labs_answer():
    import torch

    begun, batches = {begun!r}, {batches!r}

    def begin(seed):
        model = torch.nn.Linear(8, 1).double()
        with torch.no_grad():
            given = torch.tensor(begun[seed], dtype=torch.float64)
            model.weight.copy_(given[:8].reshape(1, 8))
            model.bias.copy_(given[8:])
        return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def train(model, optimizer, first, last):
        for step in range(first, last):
            x = torch.tensor(batches[step], dtype=torch.float64)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()

    def weights(model):
        return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()

    def tried(what, function, *args):
        try:
            return function(*args), ""
        except Exception as error:
            return None, f"{{what}} raised {{type(error).__name__}}: {{error}}"

    missing = [name for name in ("save", "load") if not callable(globals().get(name))]
    if missing:
        return {{"missing": missing[0]}}
    model, optimizer = begin(0)
    train(model, optimizer, 0, 20)
    whole = weights(model)
    model, optimizer = begin(0)
    train(model, optimizer, 0, 12)
    then = weights(model)
    saved, error = tried("save", save, model, optimizer, 12)
    if error or saved is None or saved is Ellipsis:
        return {{"error": error, "saved": False}}
    train(model, optimizer, 12, 17)
    fresh, optimizer = begin(1)
    unloaded = weights(fresh)
    step, error = tried("load", load, saved, fresh, optimizer)
    if error:
        return {{"error": error, "saved": True}}
    back = weights(fresh)
    train(fresh, optimizer, 12, 20)
    return {{
        "saved": True, "step": step if isinstance(step, (int, float)) else None,
        "unloaded": unloaded, "then": then, "back": back, "whole": whole, "end": weights(fresh),
    }}
_labs_answer = _labs_answer()
"""


@exercise("8.1", "What belongs in a checkpoint", where="the engines")
def by_hand(c: Check) -> None:
    """Save, end and load the student's training. Compare it with one that never stopped."""
    begun, batches = _task()
    found: dict[str, Any] = c.ask(_TRAIN.format(begun=begun, batches=batches))[0]
    if name := found.get("missing"):
        c.wrong(
            f"The engines have no function `{name}`.",
            "run the cell of exercise 8.1 on the engines: it begins with %%distributed",
        )
    if error := found.get("error"):
        c.wrong(
            f"{error}",
            "save gets (model, optimizer, step); load gets (saved, model, optimizer)",
        )
    c.need(
        found["saved"],
        "`save` returns nothing.",
        "write its body in the cell of exercise 8.1, return what is needed, and run the cell",
    )
    unloaded, then, back, whole, end = (
        np.asarray(found[name], dtype=float)
        for name in ("unloaded", "then", "back", "whole", "end")
    )
    c.need(
        _is_near(then, _trained(begun[0], batches, 12))
        and _is_near(whole, _trained(begun[0], batches, 20)),
        "The engines did not train as in the check.",
        "a cell may have changed torch: restart the engines (labs.begin(8)), and run the cell "
        "again",
    )
    c.need(
        not _same(back, unloaded),
        "`load` does not change the fresh model.",
        "model.load_state_dict(...) puts weights into a model",
    )
    c.expect(
        _same(back, then),
        "the loaded weights are those of the moment of saving",
        "the loaded weights are not those of the moment of saving",
        "training continued after `save`: did the result of `save` change with the model?",
    )
    c.expect(
        found["step"] == 12,
        "`load` returns the right step",
        f"`load` returned {found['step']} as the step to continue with",
        "`save` gets the step, and `load` can only know it from the result of `save`",
    )
    if _same(back, then):
        c.expect(
            _same(end, whole),
            "the training ends with the same weights, to the last bit",
            f"the weights at the end differ by {np.abs(end - whole).max():.2g} from those of a "
            "training without a break",
            "the next update depends on more than the weights: which other object has a state?",
        )


@exercise("8.2", "What a death costs")
def lost(c: Check) -> None:
    """Check the numbers of steps against the run."""
    goes_on, again, count = (c.whole(n) for n in ("goes_on_with", "done_again", "that_count"))
    c.expect(
        goes_on == SAVED,
        "the run continues with the right step",
        f"the run does not continue with step {goes_on}",
        "after the death, what is left of the steps after the last checkpoint?",
    )
    c.expect(
        again == STEPS - SAVED,
        "the steps between checkpoint and death are done again",
        f"{again} is not the number of steps that are done again",
        "count the steps that were done when the worker died and are not in the checkpoint",
    )
    c.expect(
        count == TOTAL,
        "each step counts once",
        f"the result is not that of {count} steps",
        "are the weights from the first time that those steps were done still used?",
    )


@exercise("8.3", "Resume with two workers")
def resumed(c: Check) -> None:
    """Check the run `resumed` and compare its weights with the undisturbed run."""
    c.need(
        c.known_run("resumed") is not None,
        "There is no run named 'resumed' yet.",
        'start it with wb.resume(..., name="resumed") and wait for its end with .wait()',
    )
    run, whole = c.run("resumed"), c.run("undisturbed")
    began = int(np.min(run.history["step"])) if len(run.history["step"]) else TOTAL
    c.expect(
        0 < began < TOTAL,
        "the run continues from the checkpoint",
        f"the first step of the run is {began}",
        'wb.resume("lab_8/broken", ...) continues from the step of the checkpoint',
    )
    workers = len(run.engines)
    c.expect(
        workers == 2,
        "the run has two workers",
        f"the run has {workers} workers",
        "without workers=..., wb.resume takes as many as before",
    )
    truth = _apart(run.weights(), whole.weights())
    c.expect(
        truth <= ROUNDING,
        "the run ends with the weights of the undisturbed run, apart from rounding",
        f"the weights of the run differ by {truth:.2g} from those of the undisturbed run",
        "weights alone are not a checkpoint: momentum and the place in the data are part of it",
    )
    gap = c.number_of("gap")
    c.expect(
        math.isclose(gap, truth, rel_tol=0.01, abs_tol=1e-18),
        "`gap` is the largest difference",
        f"`gap` is {gap:.3g}, which is not the difference of the two runs",
        "call difference(one, other) of section 3 with this run and the undisturbed one",
    )


@exercise("8.4", "Continue with fewer workers")
def fewer(c: Check) -> None:
    """Check samples before and after the death, repeated steps and the result."""
    before, after = c.number_of("samples_before"), c.number_of("samples_after")
    again, same = c.whole("done_again_by_two"), c.value("same_result")
    c.need(
        isinstance(same, (bool, np.bool_)),
        f"`same_result` is {same!r}.",
        "write True or False",
    )
    c.expect(
        before == BATCH / 3,
        "before the death each worker takes its share of the batch",
        f"{before:g} samples are not the share of one of three workers",
        "the global batch is the samples of one step, on all workers together",
    )
    c.expect(
        after == BATCH / 2,
        "after the death the two workers share the whole batch",
        f"after the death worker 0 does not take {after:g} samples",
        "the batch size of a run is the global batch: does it change with the workers?",
    )
    c.expect(
        again == 0,
        "the right number of steps is done again",
        f"{again} is not the number of steps that are done again",
        "with mirrored, which workers have the weights of the last complete step?",
    )
    c.expect(
        bool(same),
        "`same_result` is right",
        f"`same_result` is {same}: compare the samples of one update before and after the death",
        "which samples go into step 30, with three workers and with two?",
    )


@exercise("8.5", "How often to save")
def interval(c: Check) -> None:
    """Call `best_interval_s` with several numbers, and compare the losses near its results."""
    for c_s, m_s, n in ((30.0, 10800.0, 1), (2.0, 86400.0, 16), (10.0, 1.8e8, 16384)):
        value = c.number_from("best_interval_s", c_s, m_s, n)
        shown = f"best_interval_s({c_s:g}, {m_s:g}, {n})"
        c.need(
            value > 0,
            f"{shown} returned {value:g}.",
            "an interval is a positive number of seconds",
        )
        whole_s = m_s / n

        def loss(w: float, c_s: float = c_s, whole_s: float = whole_s) -> float:
            return c_s / w + w / (2 * whole_s)

        good = math.isclose(value, math.sqrt(2 * c_s * whole_s), rel_tol=1e-3)
        if not good and n == 1:
            side = "shorter" if loss(value * 0.99) < loss(value) else "longer"
            c.wrong(
                f"{shown} returned {value:.4g}, but a {side} interval loses less.",
                "at the lowest point the derivative of C/W + W/(2M) by W is zero",
            )
        c.need(
            good,
            f"{shown} returned {value:.4g}, which is not the best for {n} machines.",
            "for one machine the result is right: how often does any one of n machines fail?",
        )
    c.expect(True, "no other interval loses less, on one machine and on many", "")


@exercise("8.6", "Heal")
def healed(c: Check) -> None:
    """Check repeated steps, samples of worker 0 and the weights of the healed run."""
    again = c.whole("redone")
    then, later = c.number_of("samples_in_20"), c.number_of("samples_healed")
    same = c.value("same_weights")
    c.need(
        isinstance(same, (bool, np.bool_)),
        f"`same_weights` is {same!r}.",
        "write True or False",
    )
    c.expect(
        again == 0,
        "the right number of steps is done again",
        f"{again} is not the number of steps that are done again",
        "which steps were complete on every worker when one died before step 20?",
    )
    c.expect(
        then == BATCH / 2,
        "the two workers that are left share the batch of the step",
        f"{then:g} samples are not worker 0's share of step 20",
        "the global batch does not change: how many workers take step 20?",
    )
    c.expect(
        later == BATCH / 3,
        "with the fresh worker, every worker has the same share as before",
        f"{later:g} samples are not the share of one of three workers",
        "how many workers share the batch when the fresh one has joined?",
    )
    c.expect(
        bool(same),
        "`same_weights` is right",
        f"`same_weights` is {same}: does it matter which worker takes which sample of a step?",
        "an update uses the mean over the global batch",
    )


@exercise("8.7", "What healing costs")
def lost_time(c: Check) -> None:
    """Call `lost_by_healing` with several numbers, and compare its results."""
    cases = (
        ((2.0, 0.0, 1, 5e5), "all workers pause twice: at the death, and when a worker joins"),
        ((2.0, 0.0, 10, 5e5), "how often does any one of n machines fail?"),
        ((0.5, 90.0, 3, 9e3), "while one of n workers is away, which part of the work is missing?"),
    )
    for (pause_s, away_s, n, m_s), hint in cases:
        value = c.number_from("lost_by_healing", pause_s, away_s, n, m_s)
        shown = f"lost_by_healing({pause_s:g}, {away_s:g}, {n}, {m_s:g})"
        c.need(
            math.isclose(value, (2 * pause_s + away_s / n) * n / m_s, rel_tol=1e-3),
            f"{shown} returned {value:.4g}, which is not the fraction of the time that is lost.",
            hint,
        )
    c.expect(True, "pauses, the missing share and the rate of failures are all counted", "")


@exercise("8.8", "Who can heal")
def promises(c: Check) -> None:
    """Compare each answer with the catalog of strategies."""
    found = c.value("lost_under")
    names = ("mirrored", "sharded", "local_sgd", "tensor_parallel", "central_storage")
    c.need(
        isinstance(found, dict) and set(found) == set(names),
        "`lost_under` is not a dictionary of the five strategies.",
        f"its keys are {', '.join(names)}",
    )
    for name in names:
        entry = lookup(name, "torch")
        right = "b" if not entry.heals else "c" if entry.dies_with else "a"
        given = str(found[name]).strip().lower()
        c.need(given in ("a", "b", "c"), f"{name} has {found[name]!r}.", 'write "a", "b" or "c"')
        c.expect(
            given == right,
            f"{name} is right",
            f"{name} is not {given!r}",
            f"look at wb.strategies() and docs/strategies.md: where is the model with {name}?",
        )


def _apart(weights: Any, others: Any) -> float:
    if set(weights) != set(others):
        return math.inf
    apart = [np.abs(weights[name] - others[name]).max() for name in others]
    return float(np.max(apart))  # NaN stays NaN


def _task() -> tuple[list[list[float]], list[list[list[float]]]]:
    """Return the weights that two models begin with, and the batches of twenty steps."""
    draw = np.random.default_rng(8)
    begun = draw.uniform(-0.35, 0.35, (2, 9)).round(4).tolist()
    return begun, draw.normal(size=(20, 16, 8)).round(2).tolist()


def _trained(begun: list[float], batches: list[list[list[float]]], steps: int) -> Any:
    """Return the weights after some steps; computed here, not where answers ran."""
    weights, velocity = np.array(begun), np.zeros(9)
    for batch in batches[:steps]:
        x = np.array(batch)
        inputs = np.c_[x, np.ones(len(x))]
        error = inputs @ weights - x.sum(1)
        velocity = 0.9 * velocity + 2 * error @ inputs / len(x)
        weights = weights - 0.05 * velocity
    return weights


def _same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other))


def _is_near(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=0, atol=1e-9))
