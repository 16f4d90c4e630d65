"""Where to cut a chain of layers, so that the slowest stage is as fast as it can be.

Source: the linear partition problem; used for pipelines in Narayanan et al., PipeDream, SOSP 2019,
section 3.1.

A pipeline runs at the pace of its slowest stage. Let T(i, s) be the smallest possible time of the
slowest of s stages that hold the first i layers:

    T(i, 1) = time of layers 0..i-1
    T(i, s) = min over j < i of max(T(j, s-1), time of layers j..i-1 and of moving what crosses j)

The table is filled from small to large in O(layers^2 x stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def stage_times(
    layer_s: Sequence[float], cut_s: Sequence[float], bounds: Sequence[int]
) -> list[float]:
    """Return each stage's seconds: its layers, and what crosses its two borders.

    Args:
        layer_s: Seconds of forward and backward of each layer.
        cut_s: Seconds to move the activations of a cut behind layer i, and their gradients.
        bounds: First layer of each stage, then the number of layers: (stages + 1,).
    """
    return [
        sum(layer_s[a:b])
        + (cut_s[a - 1] if a else 0.0)
        + (cut_s[b - 1] if b < len(layer_s) else 0.0)
        for a, b in pairwise(bounds)
    ]


def balance(layer_s: Sequence[float], cut_s: Sequence[float], stages: int) -> list[int]:
    """Return the bounds whose slowest stage takes least; among equals, those that move least.

    Args:
        layer_s: Seconds of forward and backward of each layer.
        cut_s: Seconds to move what crosses a cut behind layer i; one fewer than layers.
        stages: How many stages; at most as many as layers.
    """
    count = len(layer_s)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers cannot make {stages} stages")
    before = [0.0, *accumulate(layer_s)]

    def crossing(cut: int) -> float:
        return cut_s[cut - 1] if 0 < cut < count else 0.0

    def time(first: int, end: int) -> float:
        return before[end] - before[first] + crossing(first) + crossing(end)

    # best[i]: (slowest stage, total moved, bounds) for the first i layers in s stages
    best: dict[int, tuple[float, float, tuple[int, ...]]]
    best = {i: (time(0, i), 0.0, (0,)) for i in range(1, count + 1)}
    for stage in range(1, stages):
        best = {
            i: min(
                (
                    max(best[j][0], time(j, i)),
                    best[j][1] + crossing(j),
                    (*best[j][2], j),
                )
                for j in range(stage, i)
            )
            for i in range(stage + 1, count + 1)
        }
    return [*best[count][2], count]
