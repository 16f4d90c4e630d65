"""Lab 7: the same strategies in TensorFlow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..answers import Check, RunFacts, as_read, exercise, number

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
        "does this strategy keep a copy of the variables on each device, or make copies in each "
        "forward pass?",
    ),
    "MultiWorkerMirroredStrategy": (
        "DistributedDataParallel",
        "each worker has a permanent copy of the variables; the processes do an all-reduce",
    ),
    "CentralStorageStrategy": (
        "DataParallel",
        "where is the only permanent copy of the variables, and when do the other devices get "
        "their copies?",
    ),
    "ParameterServerStrategy": (
        "rpc",
        "workers run at their own pace, and call another process that holds the parameters",
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
        f"In a step of the run 'per-replica' the shares were {samples} samples. But there must be "
        f"two shares, and their sum must be {batch} samples.",
        "run the whole cell of exercise 7.1 again",
    )
    c.expect(
        samples == [_PER_REPLICA] * 2,
        "each replica got as many samples as the single GPU",
        f"in a step the two replicas got {samples} samples, but each replica must get "
        f"{_PER_REPLICA}, like the single GPU",
        "the strategy divides the batch of `fit` among the replicas",
    )


@exercise("7.2", "The step with unequal shares")
def odd_step(c: Check) -> None:
    """Compare the answers with the shares that the run recorded."""
    steps = _by_step(c.run("mirrored"))
    odd = [step for step, samples in enumerate(steps) if len(set(samples)) > 1]
    c.need(
        bool(odd),
        "The run 'mirrored' must have a step with unequal shares, but it has none.",
        "run the cells of section 1 again, exactly as they are in the original lab",
    )
    shares = steps[odd[0]]
    given = c.whole("odd_step")
    known = 0 <= given < len(steps)
    c.expect(
        given == odd[0],
        "`odd_step` is the first step with unequal shares",
        f"step {given} is not the first step with unequal shares: "
        + (f"its shares are {steps[given]}" if known else "the run has no such step"),
        "steps are counted from 0: for each step, compare the samples of both ranks",
    )
    mine = c.items("odd_shares", 2)
    c.expect(
        _equal(mine, shares),
        "`odd_shares` are the shares of the first step with unequal shares",
        f"`odd_shares` is {mine}, which does not agree with the history of the run 'mirrored'",
        "in the history of the run, select the rows of the first step with unequal shares, and "
        "take the values of `samples`",
    )
    c.expect(
        as_read(c.number_of("factor"), sum(shares) / (2 * min(shares)), least=3),
        "a sample of the smaller share counts `factor` times as much as on one device",
        f"`factor` is {c.number_of('factor'):.5g}, which is not right for the first step with "
        "unequal shares",
        "let a be the smaller share and b the larger share: divide 1/(2a) by 1/(a+b), and keep "
        "three decimals or more",
    )


@exercise("7.3", "Equal to one device", where="the engines")
def even(c: Check) -> None:
    """Check the two runs: their shares and their weights."""
    alone, together = c.run("even-one_device"), c.run("even-mirrored")
    steps = _by_step(together)
    for run, workers in ((alone, 1), (together, 2)):
        count, same = len(_by_step(run)), run.plan.workers == workers
        c.need(
            count == _STEPS and same,
            f"The run {run.name!r} must have {_STEPS} steps and workers={workers}, but it has "
            f"{count} steps and workers={run.plan.workers}.",
            "the data ended early, or the first line of the cell was changed. Keep "
            f"--steps {_STEPS} in the first line. Choose the number of images for `fit` so that "
            "all batches are full. Do not pass `steps_per_epoch`"
            if same
            else f"do not change the first line of the cell: it has --steps {_STEPS} and -n 2",
        )
    most = max(sum(samples) for samples in steps)
    c.need(
        most == _BATCH,
        f"The largest batch has {most} samples, but `batch_size` must stay {_BATCH}.",
        "change the number of images that you pass to `fit`, not `batch_size`",
    )
    losses = np.asarray(alone.history["loss"], dtype=float)
    c.need(
        bool(np.any(np.diff(losses) >= 0)),
        "In the run 'even-one_device' the loss fell in every step. This happens if all steps use "
        "the same few images.",
        "pass at least 1400 of the images to `fit`",
    )
    odd = [step for step, samples in enumerate(steps) if len(set(samples)) > 1]
    where = f"in step {odd[0]} the replicas got unequal shares: {steps[odd[0]]}" if odd else ""
    c.expect(
        not odd,
        "all batches are divided evenly among the replicas",
        where,
        "how many images are in the last batch of the epoch? Choose the number of images for "
        "`fit` so that all batches are full",
    )
    if not odd:
        c.expect(
            _largest(alone.weights(), together.weights()) < _FAR,
            "`mirrored` ends with the same weights as `one_device`",
            "the final weights of 'even-mirrored' differ from those of 'even-one_device' by more "
            "than rounding errors",
            "both runs must read the same images in the same order: keep shuffle=False",
        )


@exercise("7.4", "The counterparts in PyTorch")
def in_pytorch(c: Check) -> None:
    """Check the PyTorch name of each strategy."""
    found = c.value("in_pytorch")
    if not isinstance(found, Mapping):
        c.wrong(
            f"`in_pytorch` is a {type(found).__name__}, but it must be a dictionary.",
            "keep the dictionary in the cell, and write a PyTorch tool in place of each None",
        )
    for name, (counterpart, hint) in _MAPS.items():
        given = found.get(name)
        c.need(
            given is not None,
            f"`in_pytorch` has no PyTorch tool for {name}.",
            f"choose one of {', '.join(_KNOWN)}",
        )
        c.need(
            isinstance(given, str),
            f"{name}: {given!r} is not a name in quotes.",
            "write the name of the tool as a string. Do not write the class or the module itself. "
            "Choose one of " + ", ".join(map(repr, _KNOWN)),
        )
        word = str(given).strip().lower().rpartition(".")[2]  # also with its module
        c.need(
            word in [known.lower() for known in _KNOWN],
            f"{name}: {given!r} is not one of the four PyTorch tools.",
            f"choose one of {', '.join(_KNOWN)}",
        )
        c.expect(
            word == counterpart.lower(),
            f"{name}: this is the right tool",
            f"{name}: {given} does not do the same work as this strategy",
            hint,
        )


@exercise("7.5", "The same weights in another layout")
def apart(c: Check) -> None:
    """Call the student's function with random layers, also of equal shapes, then with the runs."""
    draw = np.random.default_rng(7)
    for sizes in ((3, 3), (4, 2, 5), (3, 3, 3)):
        for place in range(2 * len(sizes) - 2):
            for sign in (1, -1):
                keras, torch = _made_up(draw, sizes, place, sign)
                layers = f"layers of the sizes {', '.join(map(str, sizes))}"
                far = f" The largest difference is in a {'bias' if place % 2 else 'matrix'}."
                _compare(c, keras, torch, f"the weights of a network with {layers}", far)
    c.expect(
        True,
        "`apart` compares each number in the Keras weights with the corresponding number in the "
        "PyTorch weights",
        "",
    )
    keras, torch = (dict(c.run(name).weights()) for name in ("keras", "torch"))
    _compare(c, keras, torch, "the weights of the runs 'keras' and 'torch'")
    c.expect(
        _largest({n: v.T for n, v in keras.items()}, dict(zip(keras, torch.values(), strict=True)))
        < _FAR * 10,
        "the runs 'keras' and 'torch' end with the same weights",
        "the runs 'keras' and 'torch' do not end with the same weights",
        "run the cells of section 5 in order",
    )


def _compare(
    c: Check, keras: dict[str, Any], torch: dict[str, Any], what: str, far: str = ""
) -> None:
    truth = max(float(np.abs(k.T - t).max()) for k, t in zip(keras.values(), torch.values(),
                                                             strict=True))  # fmt: skip
    found = c.number_from("apart", keras, torch, given=what)
    c.need(
        math.isclose(found, truth, rel_tol=1e-4, abs_tol=1e-9),
        f"For {what}, `apart` returned {found:.4g}, which is not the largest difference.{far}",
        "pair the weights by their order, not by their shapes: several weights can have the same "
        "shape. Transpose Keras' matrices, because Keras and PyTorch store them in different "
        "layouts. Return the largest absolute difference over all matrices and biases",
    )


def _made_up(
    draw: Any, sizes: tuple[int, ...], place: int, sign: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return one network in both layouts, a little apart, and farther apart in one place.

    Layers of equal shapes begin with equal numbers, so the nearest matrix may be of another layer.
    """
    keras: dict[str, Any] = {}
    torch: dict[str, Any] = {}
    drawn: dict[tuple[int, ...], Any] = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        kernel, bias = (
            drawn.setdefault(shape, draw.normal(size=shape))
            for shape in ((inputs, outputs), (outputs,))
        )
        keras |= {f"dense_{layer}/kernel": kernel, f"dense_{layer}/bias": bias}
        torch |= {f"{layer}.weight": kernel.T + 0.01, f"{layer}.bias": bias + 0.01}
    far = list(torch.values())[place]
    far[(-1, 0) if far.ndim == 2 else -1] += 0.5 * sign
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
        return [number(one) for one in given] == truth
    except (TypeError, ValueError, OverflowError):
        return False


def _largest(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    if list(a) != list(b) or any(a[name].shape != b[name].shape for name in a):
        return math.inf
    return float(np.max([np.abs(a[name] - b[name]).max() for name in a]))  # NaN stays NaN
