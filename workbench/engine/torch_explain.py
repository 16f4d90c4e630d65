"""Well-known mistakes whose error says little: what they come from, and the cure."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch

_BATCHES = re.compile(r"input batch_size \((\d+)\) to match target batch_size \((\d+)\)")
_VIEWS = ("ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0")
MOST_NODES = 10_000


def explain(error: BaseException) -> str | None:
    """Return what lies behind an error of a cell, or None where there is nothing to add."""
    found = _BATCHES.search(str(error))
    if found is None:
        return None
    rows, samples = int(found[1]), int(found[2])
    frames = list(_frames(error.__traceback__))
    shape = _folded(frames, rows, samples)
    if shape is None:
        return None
    one, width = math.prod(shape[1:]), math.prod(shape) // rows
    text = (
        f"The loss was given {rows} outputs for {samples} targets, since a view changed the number "
        f"of samples:\n  {tuple(shape)} became ({rows}, {width})"
    )
    line = _line(frames)
    text += f" in: {line}" if line else ""
    text += (
        f"\n  one sample has {' * '.join(map(str, shape[1:]))} = {one} values there, not {width}, "
        f"so view(-1, {width}) makes {one / width:g} rows of each\n"
        "  next: x.flatten(1), which never touches the batch"
    )
    if one == 4 * width and len(shape) == 4:
        text += (
            f", with {one} inputs for the Linear behind it; or a 2x2 max-pool before the view, "
            f"which makes {shape[2]}x{shape[3]} into {shape[2] // 2}x{shape[3] // 2}"
        )
    else:
        text += f", with {one} inputs for the Linear behind it"
    return text


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _folded(frames: list[FrameType], rows: int, samples: int) -> tuple[int, ...] | None:
    """Return the shape that a view folded into the batch, from the graph behind the output."""
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if (
                isinstance(value, torch.Tensor)
                and value.grad_fn is not None
                and value.dim()
                and len(value) == rows
            ):
                return _search(value.grad_fn, rows, samples)
    return None


def _search(root: Any, rows: int, samples: int) -> tuple[int, ...] | None:
    waiting, seen = [root], {root}
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node.name() in _VIEWS:
            shape = tuple(int(size) for size in node._saved_self_sym_sizes)
            if shape[:1] == (samples,) and math.prod(shape) % rows == 0:
                return shape
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    return None


def _line(frames: list[FrameType]) -> str | None:
    """Return the line of a model's forward that has the view, where only one can be meant."""
    lines: set[str] = set()
    models = {
        type(value)
        for frame in frames
        for value in list(frame.f_locals.values())
        if isinstance(value, torch.nn.Module)
    }
    for kind in models:
        if kind.__module__.startswith("torch."):
            continue
        try:
            source = inspect.getsource(kind.forward)
        except (OSError, TypeError):
            continue
        lines |= {
            line.strip() for line in source.splitlines() if ".view(" in line or ".reshape(" in line
        }
    return lines.pop() if len(lines) == 1 else None
