"""Replaces methods for a time, and puts them back; so a strategy that a cell makes is the run's.

Notebooks that were not written for this one make a strategy for themselves:

    strategy = tf.distribute.MirroredStrategy()     gives the run's own strategy where it is of
    with strategy.scope(): ...                      that kind; else it is refused, with the word
                                                    for the line

TensorFlow refuses to enter a second strategy within the first, and the cell is within the run's.
For the time of a cell each class has a stand-in in `tf.distribute`: its instances are those of the
class, and calling it hands out the run's strategy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ....errors import FitError
from ....shared import events

if TYPE_CHECKING:
    from ....engine.context import RunContext


class Patches:
    """What was replaced; `undo` puts it back, the latest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put what `make` returns for the attribute in its place; an inherited one is shadowed."""
        before, own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, make(before))
        self._undo.append(
            (lambda: setattr(owner, name, before)) if own else lambda: delattr(owner, name)
        )

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()


KINDS = {
    "OneDeviceStrategy": "one_device",
    "MirroredStrategy": "mirrored",
    "MultiWorkerMirroredStrategy": "multi_worker_mirrored",
    "CentralStorageStrategy": "central_storage",
    "ParameterServerStrategy": "parameter_server",
    "TPUStrategy": "tpu",
}
"""TensorFlow's classes, and what the line calls them."""


@contextlib.contextmanager
def stand_ins(context: RunContext, distribution: Any) -> Iterator[None]:
    """Let the cell's own `tf.distribute.XStrategy(...)` give the run's strategy."""
    patches = Patches()
    try:
        for place in (tf.distribute, tf.distribute.experimental):
            for name in KINDS:
                if isinstance(getattr(place, name, None), type):
                    patches.replace(place, name, _maker(context, distribution, name))
        yield
    finally:
        patches.undo()


def _maker(context: RunContext, distribution: Any, name: str) -> Any:
    def make(original: Any) -> Any:
        class StandIn(type(original)):  # type: ignore[misc]
            def __call__(cls, *args: Any, **keywords: Any) -> Any:
                if cls is not stand_in:  # a class of the user's, derived from it
                    return super().__call__(*args, **keywords)
                _check_kind(context, distribution, original, name)
                _say(context, name, given=bool(args or keywords))
                return distribution

            def __instancecheck__(cls, thing: Any) -> bool:
                if cls is stand_in:
                    return isinstance(thing, original)
                return type.__instancecheck__(cls, thing)

            def __subclasscheck__(cls, other: type) -> bool:
                if cls is stand_in:
                    return issubclass(other, original)
                return type.__subclasscheck__(cls, other)

        stand_in = StandIn(name, (original,), {"__module__": original.__module__})
        return stand_in

    return make


def _check_kind(context: RunContext, distribution: Any, original: type, name: str) -> None:
    """Raise FitError unless the run's strategy is of this kind."""
    if isinstance(distribution, original):
        return
    chosen, word = context.entry.name, KINDS[name]
    raise FitError(
        "The cell makes another strategy than the line names, and runs in the scope of the line's.",
        seen=f"tf.distribute.{name}(...) under {chosen}",
        allowed="the name `strategy`, which is there already",
        next_step=f"leave this line of the cell out, or choose {word} in place of {chosen}",
        code="WB-FIT-097",
    )


def _say(context: RunContext, name: str, *, given: bool) -> None:
    replicas = context.spec.world_size
    text = (
        f"tf.distribute.{name} gave the strategy of this run, which has "
        f"{replicas} {'replica' if replicas == 1 else 'replicas'}; `strategy` is there without it."
    )
    if given:
        text += " Its arguments were not used: -n and -o on the line say what they say."
    if context.spec.rank == 0:
        context.emit(events.Noted(rank=0, text=text))
