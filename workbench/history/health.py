"""Whether a loss is a number, and still is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class LossWatch:
    """Finds the first step whose loss is infinite, or no number although somebody saw it.

    A loss that nobody has ever seen is just not measured; that is not for this to say.

    Attributes:
        step: That step; None so far.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._was_finite = False
        self._at_first = True
        self._never = False

    def look(
        self,
        steps: NDArray[np.integer[Any]],
        loss: NDArray[np.floating[Any]],
        seen: NDArray[np.bool_] | None = None,
    ) -> None:
        """Look at losses of shape (steps,), in the order of steps.

        Args:
            seen: Whether the model gave each of them (`record.FLAG_LOSS_SEEN`): then one that is
                no number is bad from the first step on.
        """
        if self.step is not None or not len(loss):
            return
        finite = np.isfinite(loss)
        bad = np.isinf(loss)
        if self._was_finite or finite.any():
            first = 0 if self._was_finite else int(np.argmax(finite))
            bad = bad | (np.isnan(loss) & (np.arange(len(loss)) >= first))
        if seen is not None:
            bad = bad | (np.isnan(loss) & seen)
        if bad.any():
            at = int(np.argmax(bad))
            self.step = int(steps[at])
            self._never = self._at_first and at == 0 and bool(np.isnan(loss[0]))
        self._was_finite |= bool(finite.any())
        self._at_first = False

    @property
    def note(self) -> str:
        """What the user should know; empty while all is well."""
        if self.step is None:
            return ""
        if self._never:
            return (
                f"The loss is no number from the first step on (step {self.step}), so nothing is "
                "learned: look for NaN in the data, and for a loss that does not fit the model's "
                "output; training goes on."
            )
        return (
            f"The loss is no number since step {self.step}, so nothing is learned any more: "
            "look for NaN in the data; else lower the learning rate, or wb.fit(..., "
            "clip_norm=1.0); training goes on."
        )
