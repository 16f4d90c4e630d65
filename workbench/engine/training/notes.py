"""`wb.log` and `wb.options`: the values that a cell can log and read during a run.

This module also reports to the kernel that training begins, once per replica that this engine
holds.
"""

from __future__ import annotations

import time
from typing import Any

from ...errors import FitError, nearest
from ...shared import events
from ..context import RunContext, current, require
from . import fit_arguments


def log(**values: Any) -> None:
    """Add columns to the run's history and dashboard, at the current step.

    Args:
        values: Names and their numbers. A number can be a tensor of one element; if it is on a GPU,
            the call waits until the tensor is computed.

    Raises:
        RunError: There is no run.
        FitError: A value is not a number.
    """
    context = require("wb.log")
    numbers = {name: _number(name, value) for name, value in values.items()}
    place = context.membership.place
    for rank in range(place, place + context.spec.replicas):
        context.emit(events.Logged(rank=rank, step=context.step, values=numbers))


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FitError(
            f"wb.log takes only numbers, but `{name}` is not a number.",
            seen=type(value).__name__,
            next_step=f"pass {name}=float(...)",
            code="WB-FIT-008",
        ) from error


class Options:
    """The settings in the cell's first line: `--epochs` and similar flags, `-o`, `--set`.

    The flags that a cell can read are `epochs`, `steps`, `batch_size` and `seed`.
    `wb.options.epochs` returns one setting. `wb.options.get("epochs", 5)` returns 5 if the first
    line does not contain the setting, or if the cell is not part of a run.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        values = self._values()
        if name in values:
            _read(name)
            return values[name]
        guess = nearest(name, values)
        hint = f"did you mean {guess!r}?" if guess else f"use wb.options.get({name!r}, default)"
        raise AttributeError(f"the cell's first line does not set {name!r}; {hint}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return the setting of the cell's first line, or `default`."""
        values = self._values()
        _read(name)
        return values.get(name, default)

    def __dir__(self) -> list[str]:
        return ["get", *self._values()]

    def __repr__(self) -> str:
        return f"options({', '.join(f'{k}={v!r}' for k, v in self._values().items())})"

    def _values(self) -> dict[str, Any]:
        context = current()
        if context is None:
            return {}
        context.options_read = True
        return {**context.spec.options, **context.spec.overrides, **context.spec.values}


def _read(name: str) -> None:
    """Remember that the cell has read a setting with this name."""
    context = current()
    if context is not None:
        context.unread.discard(name)


options = Options()


def announce(
    context: RunContext,
    parameters: int,
    *,
    batch_size: int | None,
    total_steps: int | None = None,
    epochs: int | None = None,
    epoch_samples: int | None = None,
) -> None:
    """Emit `run_started` for each replica.

    Args:
        parameters: How many numbers the model trains.
        batch_size: Global batch size; None if it is not known.
        epoch_samples: How many samples an epoch has; None if that is not known.
    """
    spec = context.spec
    label = fit_arguments.support(spec.framework).device_label
    workers = spec.world_size if context.entry.data_parallel else 1
    devices = spec.devices or (spec.device,) * len(spec.held)
    labels = context.remote_devices or spec.labels or tuple(label(one) for one in devices)
    for rank, device in zip(spec.held, labels, strict=True):
        context.emit(
            events.RunStarted(
                rank=rank,
                t_s=time.perf_counter(),
                total_steps=total_steps,
                epochs=epochs,
                batch_size=batch_size,
                local_batch=None if batch_size is None else -(-batch_size // workers),
                parameters=parameters,
                device=device,
                threads=spec.threads,
                epoch_samples=epoch_samples,
            )
        )
