"""Lab 8: things break."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ...catalog import lookup
from ..answers import exercise, number

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

    def line(seed):  # a linear model, SGD with momentum
        model = torch.nn.Linear(8, 1).double()
        with torch.no_grad():
            given = torch.tensor(begun[seed], dtype=torch.float64)
            model.weight.copy_(given[:8].reshape(1, 8))
            model.bias.copy_(given[8:])
        return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def normed(seed):  # buffers beside the parameters, and Adam
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
        ).double()
        with torch.no_grad():
            for p in model.parameters():
                numbers = torch.arange(1.0, 1 + p.numel(), dtype=torch.float64)
                p.copy_(torch.sin(numbers + 2 * seed).reshape(p.shape))
        return model, torch.optim.Adam(model.parameters(), 0.02)

    def train(model, optimizer, first, last):
        for step in range(first, last):
            if step == 5 and isinstance(optimizer, torch.optim.Adam):
                optimizer.param_groups[0]["lr"] = 0.008
            x = torch.tensor(batches[step], dtype=torch.float64)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()

    def held(model):
        return torch.cat([one.detach().flatten().double() for one in model.state_dict().values()])

    def tried(what, function, *args):
        try:
            return function(*args), ""
        except Exception as error:
            return None, f"{{what}} raised {{type(error).__name__}}: {{error}}"

    def trained(begin, at, total):
        model, optimizer = begin(0)
        train(model, optimizer, 0, total)
        whole = held(model)
        model, optimizer = begin(0)
        train(model, optimizer, 0, at)
        then = held(model)
        saved, error = tried("save", save, model, optimizer, at)
        if error or saved is None or saved is Ellipsis:
            return {{"error": error, "saved": False}}
        train(model, optimizer, at, at + 3)
        tried("save", save, model, optimizer, at + 3)
        train(model, optimizer, at + 3, total)
        went_on = held(model)
        fresh, optimizer = begin(1)
        unloaded = held(fresh)
        step, error = tried("load", load, saved, fresh, optimizer)
        if error:
            return {{"error": error, "saved": True}}
        back, training = held(fresh), fresh.training
        train(fresh, optimizer, at, total)
        return {{
            "saved": True, "step": step, "unloaded": unloaded, "then": then, "back": back,
            "whole": whole, "went_on": went_on, "end": held(fresh), "training": training,
        }}

    missing = [name for name in ("save", "load") if not callable(globals().get(name))]
    if missing:
        return {{"missing": missing[0]}}
    return {{"first": trained(line, 12, 20), "second": trained(normed, 9, 16)}}
_labs_answer = _labs_answer()
"""


@exercise("8.1", "What belongs in a checkpoint", where="the engines")
def by_hand(c: Check) -> None:
    """Save, end and load the student's trainings. Compare them with some that never stopped."""
    begun, batches = _task()
    found: dict[str, Any] = c.ask(_TRAIN.format(begun=begun, batches=batches))[0]
    if name := found.get("missing"):
        c.wrong(
            f"The engines have no function `{name}`.",
            "run the cell of exercise 8.1 on the engines: it begins with %%distributed",
        )
    first = _loaded(
        c, found["first"], 12, "the check runs save(model, optimizer, step) and load(saved, "
        "model, optimizer): do your functions work with these arguments?", "the next update "
        "depends on more than the weights: which object besides the model has a state? Does "
        "`save` return a copy of this state?",
    )  # fmt: skip
    c.need(
        _is_near(first["then"], _trained(begun[0], batches, 12))
        and _is_near(first["whole"], _trained(begun[0], batches, 20)),
        "The check trains a small model on the engines. The weights of this model were wrong "
        "before the check ran `load`.",
        "a cell may have changed torch on the engines: run %cluster restart in a new cell, then "
        "the cell of exercise 8.1 again",
    )
    if any(not finding.right for finding in c.findings):
        return
    _loaded(
        c, found["second"], 9, "this training has a BatchNorm layer and Adam: `save` and "
        "`load` must handle all entries of the model's and the optimizer's state, whatever their "
        "names are", "in this training the learning rate becomes smaller before `save` is called: "
        "which other values does the optimizer object hold, besides its moments?",
        "with BatchNorm and Adam, ",
    )  # fmt: skip


def _loaded(
    c: Check, found: dict[str, Any], at: int, raised: str, forgot: str, words: str = ""
) -> dict[str, Any]:
    """Look at one training that was saved and loaded; return what the model held, by moment.

    Args:
        at: The step at which it was saved.
        raised: The hint if `save` or `load` raised an error.
        forgot: The hint if the training ends with other weights.
        words: What each sentence begins with.
    """
    if error := found.get("error"):
        c.wrong(f"{words}{error}", raised)
    c.need(
        found["saved"],
        f"{words}`save` returned None.",
        "write the body of `save` in the cell of exercise 8.1, return everything that `load` "
        "needs, and run the cell",
    )
    names = ("unloaded", "then", "back", "whole", "went_on", "end")
    held = {name: np.asarray(found[name], dtype=float) for name in names}
    c.need(
        not _same(held["back"], held["unloaded"]),
        f"{words}`load` did not change the new model.",
        "model.load_state_dict(...) puts weights into a model",
    )
    c.need(
        bool(found["training"]),
        f"{words}`load` put the new model into evaluation mode. But after `load` the "
        "training continues, so the model must be in training mode.",
        "in evaluation mode, layers such as BatchNorm and dropout do not behave as in training: "
        "does `load` call model.eval()?",
    )
    c.need(
        _same(held["went_on"], held["whole"]),
        f"{words}a training that calls `save` ended with different weights than the same training "
        "without `save`.",
        "`save` must only read: does it change the model or the optimizer?",
    )
    is_back = c.expect(
        _same(held["back"], held["then"]),
        f"{words}the loaded model is the same as when `save` was called",
        f"{words}the loaded model differs from the model at the moment when `save` was called",
        "after the first `save`, training continued and `save` was called again: did this change "
        "the first result? Does the result hold everything that model.state_dict() holds?",
    )
    c.expect(
        _is_number(found["step"], at),
        f"{words}`load` returns the right step",
        f"{words}`load` returned {found['step']}, but the training must continue with step {at}",
        "`save` gets the step as an argument, and `load` can read the step only from the result of "
        "`save`",
    )
    if is_back:
        off = float(np.abs(held["end"] - held["whole"]).max())
        c.expect(
            _same(held["end"], held["whole"]),
            f"{words}the weights at the end are those of a training without a break, to the last "
            "bit",
            f"{words}the weights at the end differ by {off:.2g} from those of a training without "
            "a break",
            forgot,
        )
    return held


def _is_number(value: Any, truth: int) -> bool:
    try:
        return number(value) == truth
    except (TypeError, ValueError, OverflowError):
        return False


@exercise("8.2", "What a death costs")
def lost(c: Check) -> None:
    """Check the numbers of steps against the run."""
    goes_on, again, count = (c.whole(n) for n in ("goes_on_with", "done_again", "that_count"))
    c.expect(
        goes_on == SAVED,
        "the run continues with the right step",
        f"the run does not continue with step {goes_on}",
        "after the death all workers load the last checkpoint: after how many steps was it saved?",
    )
    c.expect(
        again == STEPS - SAVED,
        "the steps between the checkpoint and the death are done again",
        f"{again} is not the number of steps that are done again",
        "count the steps that were done before the death but are not in the checkpoint",
    )
    c.expect(
        count == TOTAL,
        "each step counts once in the final weights",
        f"the final weights are not the result of {count} updates",
        "some steps are done twice. When a step is done again, do the weights still contain the "
        "update from the first time this step was done?",
    )


@exercise("8.3", "Resume with two workers")
def resumed(c: Check) -> None:
    """Check the run `resumed` and compare its weights with the undisturbed run."""
    known = c.known_run("resumed")
    c.need(
        known is not None and known.state == "finished",
        "There is no run named 'resumed' yet."
        if known is None
        else f"The run 'resumed' is {known.state}, but it must be finished.",
        'start the run "resumed" with wb.resume(..., name="resumed") and wait for its end with '
        ".wait(), in the same cell",
    )
    run, whole = c.run("resumed"), c.run("undisturbed")
    began = int(np.min(run.history["step"])) if len(run.history["step"]) else TOTAL
    c.need(
        began < TOTAL,
        "The run 'resumed' took no steps, because it began from the checkpoint of the last step.",
        "an earlier call of wb.resume started a run, and this run wrote the checkpoint to "
        'lab_8/broken. Pass checkpoint="lab_8/resumed" to wb.resume. Then run two cells again: '
        "first the cell that trains `broken`, then the cell of exercise 8.3",
    )
    c.expect(
        began > 0,
        "the run continues from the checkpoint",
        f"the first step of the run is {began}, which is not the step of a checkpoint",
        'wb.resume("lab_8/broken", ...) continues from the step of the checkpoint',
    )
    workers = len(run.engines)
    c.expect(
        workers == 2,
        "the run has two workers",
        f"the run has {workers} workers, but it must have two",
        "without workers=..., wb.resume takes as many workers as the interrupted run had",
    )
    truth = _apart(run.weights(), whole.weights())
    c.expect(
        truth <= ROUNDING,
        "the run ends with the weights of the undisturbed run, apart from rounding",
        f"the weights of the run differ by {truth:.2g} from those of the undisturbed run",
        "besides the weights, a checkpoint holds the momentum and the place in the data: does the "
        "run load both?",
    )
    gap = c.number_of("gap")
    c.expect(
        math.isclose(gap, truth, rel_tol=0.01, abs_tol=1e-18),
        "`gap` is the largest difference between the weights of the runs `resumed` and "
        "`undisturbed`",
        f"`gap` is {gap:.3g}, which is not the largest difference between the weights of the runs "
        "`resumed` and `undisturbed`",
        "call the function `difference` of section 3 with the runs `resumed` and `undisturbed`",
    )


@exercise("8.4", "Continue with fewer workers")
def fewer(c: Check) -> None:
    """Check samples before and after the death, repeated steps and the result."""
    before, after = c.number_of("samples_before"), c.number_of("samples_after")
    again, same = c.whole("done_again_by_two"), c.value("same_result")
    c.need(
        isinstance(same, (bool, np.bool_)),
        f"`same_result` is {same!r}, but it must be True or False.",
        "write True or False, without quotes",
    )
    c.expect(
        before == BATCH / 3,
        "before the death each of the three workers takes a third of the batch",
        f"`samples_before` is {before:g}, but this is not the share of each of the three workers",
        "the global batch consists of the samples of one step, on all workers together",
    )
    c.expect(
        after == BATCH / 2,
        "after the death the two workers share the whole batch",
        f"`samples_after` is {after:g}, but this is not the share of worker 0 after the death",
        "the batch size of a run is the global batch: does it change with the number of workers?",
    )
    c.expect(
        again == 0,
        "`done_again_by_two` is the right number of steps",
        f"{again} is not the number of steps that are done again",
        "with `mirrored`, which workers have the weights of the last complete step?",
    )
    c.expect(
        bool(same),
        "`same_result` is right",
        f"`same_result` is {same}, which is not right",
        "which samples does the update of step 30 use with three workers, and which with two?",
    )


@exercise("8.5", "How often to save")
def interval(c: Check) -> None:
    """Call `best_interval_s` with several numbers, and compare the losses near its results."""
    cases = (
        (30.0, 10800.0, 1), (7.0, 50000.0, 1), (2.0, 86400.0, 16), (10.0, 1.8e8, 16384),
    )  # fmt: skip
    for c_s, m_s, n in cases:
        value = c.number_from("best_interval_s", c_s, m_s, n)
        shown = f"best_interval_s({c_s:g}, {m_s:g}, {n})"
        c.need(
            value > 0,
            f"{shown} returned {value:g}, but an interval must be positive.",
            "return the time between two checkpoints, in seconds",
        )
        whole_s = m_s / n

        def loss(w: float, c_s: float = c_s, whole_s: float = whole_s) -> float:
            return c_s / w + w / (2 * whole_s)

        least = loss(math.sqrt(2 * c_s * whole_s))
        good = loss(value) <= (1 + 1e-4) * least  # also in whole seconds, or found on a grid
        if not good and n == 1:
            side = "shorter" if loss(value * 0.99) < loss(value) else "longer"
            c.wrong(
                f"{shown} returned {value:.4g}, but a {side} interval loses less time.",
                "the lost fraction of the time is L(W) = C/W + W/(2M). At the best W, the "
                "derivative of L with respect to W is zero. Section 6 explains C, W and M",
            )
        c.need(
            good,
            f"{shown} returned {value:.4g}, which is not the best interval for {n} machines.",
            "for one machine the result is right. How often is there a failure with n machines?",
        )
    c.expect(True, "the returned intervals are the best ones, for one machine and for many", "")


@exercise("8.6", "Heal a run")
def healed(c: Check) -> None:
    """Check repeated steps, samples of worker 0 and the weights of the healed run."""
    again = c.whole("redone")
    then, later = c.number_of("samples_in_20"), c.number_of("samples_healed")
    same = c.value("same_weights")
    c.need(
        isinstance(same, (bool, np.bool_)),
        f"`same_weights` is {same!r}, but it must be True or False.",
        "write True or False, without quotes",
    )
    c.expect(
        again == 0,
        "`redone` is the right number of steps",
        f"{again} is not the number of steps that are done again",
        "when worker 1 died before step 20, which steps were complete on every worker?",
    )
    c.expect(
        then == BATCH / 2,
        "the two remaining workers share the batch of step 20",
        f"`samples_in_20` is {then:g}, but this is not the share of worker 0 in step 20",
        "the global batch does not change: how many workers take step 20?",
    )
    c.expect(
        later == BATCH / 3,
        "after the new worker has joined, every worker has the same share as before the death",
        f"`samples_healed` is {later:g}, but this is not the share of worker 0 after the new "
        "worker has joined",
        "how many workers share the batch after the new worker has joined?",
    )
    c.expect(
        bool(same),
        "`same_weights` is right",
        f"`same_weights` is {same}, which is not right",
        "an update uses the mean over the global batch: does it matter which worker takes which "
        "sample of a step?",
    )


@exercise("8.7", "What healing costs")
def lost_time(c: Check) -> None:
    """Call `lost_by_healing` with several numbers, and compare its results."""
    cases = (
        (
            (2.0, 0.0, 1, 5e5),
            "at each failure all workers pause twice: at the death, and when a new worker joins. "
            "Return a fraction of the time, not a number of seconds and not a percentage",
        ),
        ((2.0, 0.0, 10, 5e5), "how often is there a failure with n machines?"),
        ((0.5, 90.0, 3, 9e6), "while one of n workers is away, how much slower is the run?"),
    )
    for (pause_s, away_s, n, m_s), hint in cases:
        value = c.number_from("lost_by_healing", pause_s, away_s, n, m_s)
        shown = f"lost_by_healing({pause_s:g}, {away_s:g}, {n}, {m_s:g})"
        c.need(
            math.isclose(value, (2 * pause_s + away_s / n) * n / m_s, rel_tol=1e-3),
            f"{shown} returned {value:.4g}, which is not the lost fraction of the time.",
            hint,
        )
    c.expect(
        True,
        "the fraction is right: it includes the failures of all machines. For each failure, it "
        "includes the pauses and the time in which a worker is away",
        "",
    )


@exercise("8.8", "Which strategies can heal")
def promises(c: Check) -> None:
    """Compare each answer with the catalog of strategies."""
    found = c.value("lost_under")
    names = ("mirrored", "sharded", "local_sgd", "tensor_parallel", "central_storage")
    c.need(
        isinstance(found, dict) and set(found) == set(names),
        "`lost_under` is not a dictionary of the five strategies.",
        f"its keys must be {', '.join(names)}",
    )
    for name in names:
        entry = lookup(name, "torch")
        right = "b" if not entry.heals else "c" if entry.dies_with else "a"
        given = str(found[name]).strip().lower()
        c.need(
            given in ("a", "b", "c"),
            f"The answer for `{name}` is {found[name]!r}, which is not one of the three letters.",
            'write "a", "b" or "c"',
        )
        c.expect(
            given == right,
            f"the answer for `{name}` is right",
            f"{given!r} is not the right answer for `{name}`",
            "after an average, every worker trains its own model until the next average. Does any "
            "other process have the results of the steps that the dead worker took since the last "
            "average?"
            if right == "c"
            else f"with `{name}`, which processes hold the model? See wb.strategies() and "
            "docs/strategies.md",
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
