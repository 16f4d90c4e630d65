"""What the functions of closures do, learnt while they are traced: which of them train.

    schedule(step)      asks a tape for gradients, or has an optimizer apply some    it trains
    schedule(score)     neither                                                      it does not

A plain Python function runs only on its worker, and what was traced earlier is not traced again:
nobody sees what these do, so they are taken for functions that train.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from .delays import Delays
from .patches import Patches


class Functions:
    """The functions whose closures are made while this is entered.

    Attributes:
        optimizer: Applied last.
    """

    def __init__(self) -> None:
        self.optimizer: Any = None
        self._seen = 0  # gradients asked for or applied, by whatever was traced
        self._delays = Delays()
        self._trains: Any = weakref.WeakKeyDictionary()
        self._graphs: Any = weakref.WeakKeyDictionary()  # by function: those of alike calls
        self._patches = Patches()

    def __enter__(self) -> Functions:
        """See what is traced from now on."""
        self._patches.replace(keras.optimizers.Optimizer, "apply", self._applies)
        self._patches.replace(tf.GradientTape, "gradient", self._differentiates)
        return self

    def __exit__(self, *error: object) -> None:
        """Undo the patches."""
        self._patches.undo()

    def closure(
        self, function: Any, alike: Hashable, make: Callable[[Any], Any], *, delayed: bool
    ) -> Any:
        """Make a closure of a function; return it, its `trains` set.

        Args:
            alike: Equal for calls of the function that the same graph serves: it is looked up
                once. None: TensorFlow looks at the arguments each time.
            make: Makes the closure of the function, or of its graph; what is new is traced.
            delayed: Whether injected delays are to be in it.
        """
        chosen = self._delays.variant(function) if delayed else function
        before = self._seen
        # What a function does is seen when it is traced, or (a plain one) only when it runs.
        plain = not isinstance(function, polymorphic_function.Function)
        unseen = plain or chosen.experimental_get_tracing_count() > 0
        graphs = {} if plain or alike is None else self._graphs.setdefault(chosen, {})
        known = graphs.get(alike, chosen)
        made = make(known)
        if known is chosen and not plain:
            graphs[alike] = made._concrete_function
        if self._seen > before:
            self._trains[function] = True
        made.trains = plain or self._trains.setdefault(function, unseen)
        return made

    def _applies(self, original: Any) -> Any:
        def apply(optimizer: Any, grads: Any, *args: Any, **keywords: Any) -> Any:
            self.optimizer = optimizer
            self._seen += 1
            held = self._delays.hold(grads)
            return original(optimizer, held, *args, **keywords)

        return tf.autograph.experimental.do_not_convert(apply)

    def _differentiates(self, original: Any) -> Any:
        def gradient(tape: Any, *args: Any, **keywords: Any) -> Any:
            self._seen += 1
            return original(tape, *args, **keywords)

        return tf.autograph.experimental.do_not_convert(gradient)
