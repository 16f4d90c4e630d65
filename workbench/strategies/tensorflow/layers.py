"""The chain of layers of a Keras model, and where it is cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import keras
import numpy as np

from ...errors import FitError


@dataclass(frozen=True)
class Chain:
    """The layers of a model in the order in which they are called, and the stages.

    Attributes:
        layers: A model inside the model counts as one layer.
        bounds: First layer of each stage, then the number of layers: (stages + 1,).
    """

    layers: list[Any]
    bounds: list[int]

    def table(self) -> list[dict[str, Any]]:
        """Return one row per stage."""
        rows = []
        for stage, (first, end) in enumerate(pairwise(self.bounds)):
            names = [layer.name for layer in self.layers[first:end]]
            rows.append(
                {
                    "stage": stage,
                    "rank": stage,
                    "layers": names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
                    "parameters": sum(map(count, self.layers[first:end])),
                    "microbatch_s": None,
                    "handed_bytes": None,
                }
            )
        return rows

    def stage_of(self) -> list[tuple[Any, int]]:
        """Return every layer with its stage."""
        spans = enumerate(pairwise(self.bounds))
        return [(layer, stage) for stage, (a, b) in spans for layer in self.layers[a:b]]


def table_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return the stages as lines of text."""
    return "\n".join(
        f"  stage {row['stage']}: {row['layers']} ({row['parameters']:,} parameters)"
        for row in rows
    )


def count(layer: Any) -> int:
    """Return how many numbers a layer holds."""
    return sum(int(np.prod(variable.shape)) for variable in layer.variables)


def cut(model: Any, stages: int, split_at: str = "") -> Chain:
    """Decide the stages of a built model.

    Args:
        split_at: Layers that begin a stage, by name or number; empty: parameters are balanced.

    Raises:
        FitError: The model cannot be cut, or not so.
    """
    if not isinstance(model, (keras.Sequential, keras.src.models.Functional)):
        raise FitError(
            "Only models whose layers are known can be split.",
            seen=type(model).__name__,
            allowed="keras.Sequential, or a functional keras.Model(inputs, outputs)",
            next_step="write the model so, or train it under mirrored",
            code="WB-FIT-075",
        )
    layers = [one for one in model.layers if not isinstance(one, keras.layers.InputLayer)]
    if stages > len(layers):
        raise FitError(
            "There are more stages than layers.",
            seen=f"{stages} stages, {len(layers)} layers",
            allowed=f"at most {len(layers)} stages",
            next_step=f"use -n {len(layers)}",
            code="WB-FIT-076",
        )
    if split_at:
        return Chain(layers, given_bounds(layers, stages, split_at))
    return Chain(layers, balance([count(layer) for layer in layers], stages))


def given_bounds(layers: Sequence[Any], stages: int, split_at: str) -> list[int]:
    """Return the bounds that `split_at` names.

    Raises:
        FitError: A layer does not exist, or their number does not fit.
    """
    names = [layer.name for layer in layers]
    starts = []
    for word in (part.strip() for part in split_at.split(",")):
        number = int(word) if word.isdigit() else names.index(word) if word in names else -1
        if not 0 < number < len(layers):
            raise FitError(
                "A stage cannot begin there.",
                seen=f"split_at={word}",
                allowed=", ".join(f"{i} or {name}" for i, name in enumerate(names) if i),
                next_step="name layers of the model, but the first",
                code="WB-FIT-077",
            )
        starts.append(number)
    if starts != sorted(set(starts)):
        raise FitError(
            "The layers that begin a stage must be in the model's order, each once.",
            seen=f"split_at={split_at}",
            next_step=f"-o split_at={','.join(map(str, sorted(set(starts))))}",
            code="WB-FIT-078",
        )
    if len(starts) + 1 != stages:
        raise FitError(
            "split_at does not make one stage per device.",
            seen=f"{len(starts) + 1} stages for {stages} devices",
            allowed=f"{stages - 1} layers in split_at",
            next_step=f"use -n {len(starts) + 1}",
            code="WB-FIT-079",
        )
    return [0, *starts, len(layers)]


def balance(costs: Sequence[int], stages: int) -> list[int]:
    """Return bounds of `stages` runs of layers, none empty, whose largest sum is the least.

    Of equal ones the one with the smallest squares is taken, so that layers without parameters do
    not decide.
    """
    total = [0, *accumulate(costs)]
    # best[end]: (largest sum, sum of squares, bounds) of the layers before `end`
    best = {end: (total[end], total[end] ** 2, [0, end]) for end in range(1, len(costs) + 1)}
    for stage in range(1, stages):
        best = {
            end: min(
                (max(top, total[end] - total[at]), squares + (total[end] - total[at]) ** 2,
                 [*bounds, end])
                for at, (top, squares, bounds) in best.items()
                if at < end
            )
            for end in range(stage + 1, len(costs) + 1)
        }  # fmt: skip
    return best[len(costs)][2]
