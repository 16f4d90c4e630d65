"""Lab 7: the same in TensorFlow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..answers import Check, RunFacts, close, exercise

_SHARE = 0.01
"""How far a ratio may be off: a student may round it."""

_FAR = 1e-5
"""Weights that differ by less differ by the rounding of float32."""

_PER_REPLICA = 48
_BATCH = 64
_STEPS = 40

_KNOWN = ("plain", "DataParallel", "DistributedDataParallel", "rpc")
_MAPS = {
    "OneDeviceStrategy": ("plain", "one device needs no wrapper in either framework"),
    "MirroredStrategy": (
        "DistributedDataParallel",
        "does it keep a copy on each device, or make one in each forward pass?",
    ),
    "MultiWorkerMirroredStrategy": (
        "DistributedDataParallel",
        "each worker has a permanent copy, and there is an all-reduce between processes",
    ),
    "CentralStorageStrategy": (
        "DataParallel",
        "where is the only permanent copy, and when do the other devices get theirs?",
    ),
    "ParameterServerStrategy": (
        "rpc",
        "workers run at their own pace and call a process that has the parameters",
    ),
}


@exercise("7.1", "The global batch", where="the engines", cell="the notebook")
def global_batch(c: Check) -> None:
    """Compare the answers with the samples that the run recorded."""
    batch = c.whole("batch")
    run = c.run("per-replica")
    samples = _by_step(run)[0]
    c.need(
        len(samples) == 2 and sum(samples) == batch,
        f"The run 'per-replica' does not have two replicas and batch={batch}.",
        "run the whole cell again",
    )
    c.expect(
        samples == [_PER_REPLICA] * 2,
        "each replica got as many samples as the single GPU",
        f"the replicas got {samples} samples in a step",
        "the batch size of `fit` is divided among the replicas",
    )


@exercise("7.2", "The step that is not equal")
def odd_step(c: Check) -> None:
    """Compare the answers with the shares that the run recorded."""
    steps = _by_step(c.run("mirrored"))
    odd = [step for step, samples in enumerate(steps) if len(set(samples)) > 1]
    c.need(bool(odd), "All shares of the run 'mirrored' are equal.", "run the cell of section 1")
    shares = steps[odd[0]]
    given = c.whole("odd_step")
    c.expect(
        given == odd[0],
        "`odd_step` is the first step whose shares are unequal",
        f"the shares of step {given} are {steps[given] if 0 <= given < len(steps) else 'unknown'}: "
        "this is not the first step with unequal shares",
        "steps count from 0: compare the rows of both ranks, step by step",
    )
    mine = c.items("odd_shares", 2)
    c.expect(
        _equal(mine, shares),
        "`odd_shares` are the shares of this step",
        f"`odd_shares` is {mine}, which does not agree with the history",
        "select the rows of that step, and take their column `samples`",
    )
    c.expect(
        close(c.number_of("factor"), sum(shares) / (2 * min(shares)), _SHARE),
        "a sample of the smaller share counts `factor` times as much",
        f"with a factor of {c.number_of('factor'):.4g}, the smaller share's samples would not "
        "count 1/(2a) each",
        "divide a sample's weight in this step, 1/(2a), by its weight on one device, 1/(a+b)",
    )


@exercise("7.3", "Equal to one device", where="the engines")
def even(c: Check) -> None:
    """Check the two runs: their shares and their weights."""
    alone, together = c.run("even-one_device"), c.run("even-mirrored")
    steps = _by_step(together)
    c.need(
        len(steps) == _STEPS and len(_by_step(alone)) == _STEPS,
        f"The run 'even-mirrored' has {len(steps)} steps.",
        "do not change `--steps` and `-n` in the cell's first line",
    )
    most = max(sum(samples) for samples in steps)
    c.need(
        most == _BATCH,
        f"The largest batch has {most} samples.",
        "change the number of images, not `batch_size`",
    )
    odd = [step for step, samples in enumerate(steps) if len(set(samples)) > 1]
    where = f"the shares of step {odd[0]} are {steps[odd[0]]}" if odd else ""
    c.expect(
        not odd,
        "all batches are divided evenly among the replicas",
        where,
        "how many images are in the epoch's last batch? Pass only whole batches to `fit`",
    )
    if not odd:
        c.expect(
            _largest(alone.weights(), together.weights()) < _FAR,
            "the weights of the replicas are those of one device",
            "the weights of the two runs differ by more than rounding",
            "both runs must read the same images in the same order",
        )


@exercise("7.4", "What maps to what")
def in_pytorch(c: Check) -> None:
    """Check the PyTorch name of each strategy."""
    found = c.value("in_pytorch")
    if not isinstance(found, Mapping):
        c.wrong(
            f"`in_pytorch` is a {type(found).__name__}, but it must be a dictionary.",
            "fill in the cell: a name on the left, its counterpart on the right",
        )
    for name, (counterpart, hint) in _MAPS.items():
        given = found.get(name)
        c.need(
            given is not None,
            f"{name} is still empty.",
            f"choose one of {', '.join(_KNOWN)}",
        )
        word = str(given).strip().lower()
        c.need(
            word in [known.lower() for known in _KNOWN],
            f"{name}: {given!r} is not one of the four PyTorch tools.",
            f"choose one of {', '.join(_KNOWN)}",
        )
        c.expect(
            word == counterpart.lower(),
            f"{name}: right",
            f"{name}: {given} works in another way",
            hint,
        )


@exercise("7.5", "The same weights in another layout")
def apart(c: Check) -> None:
    """Call the student's function with random layers, then with the two runs."""
    draw = np.random.default_rng(7)
    for sizes in ((3, 3), (4, 2, 5)):
        keras, torch = _made_up(draw, sizes)
        _compare(c, keras, torch, "layers of {} numbers".format(" x ".join(map(str, sizes))))
    c.expect(True, "`apart` compares each number with its counterpart", "")
    keras, torch = (dict(c.run(name).weights()) for name in ("keras", "torch"))
    _compare(c, keras, torch, "the two runs")
    c.expect(
        _largest({n: v.T for n, v in keras.items()}, dict(zip(keras, torch.values(), strict=True)))
        < _FAR * 10,
        "the two runs end with the same weights",
        "the two runs do not end with the same weights",
        "run the cells of section 5 in order",
    )


def _compare(c: Check, keras: dict[str, Any], torch: dict[str, Any], what: str) -> None:
    truth = max(float(np.abs(k.T - t).max()) for k, t in zip(keras.values(), torch.values(),
                                                             strict=True))  # fmt: skip
    number = c.number_from("apart", keras, torch)
    c.need(
        math.isclose(number, truth, rel_tol=1e-4, abs_tol=1e-9),
        f"apart(...) of {what} returned {number:.4g}, which is not the largest difference.",
        "return the largest absolute difference; transpose the matrices first, because the two "
        "frameworks store the same numbers in different places",
    )


def _made_up(draw: Any, sizes: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return one network in both layouts, a little apart: the largest difference is negative."""
    keras: dict[str, Any] = {}
    torch: dict[str, Any] = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        kernel, bias = draw.normal(size=(inputs, outputs)), draw.normal(size=outputs)
        keras |= {f"dense_{layer}/kernel": kernel, f"dense_{layer}/bias": bias}
        torch |= {f"{layer}.weight": kernel.T + 0.01, f"{layer}.bias": bias.copy()}
    last = f"{len(sizes) - 2}.weight"
    torch[last] = torch[last].copy()
    torch[last][-1, 0] += 0.5
    return keras, torch


def _by_step(run: RunFacts) -> list[list[int]]:
    """Return the samples of each step, by rank."""
    history = run.history
    found: dict[int, dict[int, int]] = {}
    for step, rank, samples in zip(
        history["step"], history["rank"], history["samples"], strict=True
    ):
        found.setdefault(int(step), {})[int(rank)] = int(samples)
    return [[by[rank] for rank in sorted(by)] for _, by in sorted(found.items())]


def _equal(given: list[Any], truth: list[int]) -> bool:
    try:
        return [float(one) for one in given] == [float(one) for one in truth]
    except (TypeError, ValueError):
        return False


def _largest(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    if list(a) != list(b) or any(a[name].shape != b[name].shape for name in a):
        return math.inf
    return float(np.max([np.abs(a[name] - b[name]).max() for name in a]))  # NaN stays NaN
