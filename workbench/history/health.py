"""Whether a loss is still a number."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class LossWatch:
    """Finds the first step whose loss is infinite, or no number although one before it was.

    A loss that was never a number may just not be measured; that is not for this to say.

    Attributes:
        step: That step; None so far.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._was_finite = False

    def look(self, steps: NDArray[np.integer[Any]], loss: NDArray[np.floating[Any]]) -> None:
        """Look at losses of shape (steps,), in the order of steps."""
        if self.step is not None or not len(loss):
            return
        finite = np.isfinite(loss)
        bad = np.isinf(loss)
        if self._was_finite or finite.any():
            first = 0 if self._was_finite else int(np.argmax(finite))
            bad = bad | (np.isnan(loss) & (np.arange(len(loss)) >= first))
        self._was_finite |= bool(finite.any())
        if bad.any():
            self.step = int(steps[int(np.argmax(bad))])

    @property
    def note(self) -> str:
        """What the user should know; empty while all is well."""
        if self.step is None:
            return ""
        return (
            f"The loss is no number since step {self.step}, so nothing is learned any more: lower "
            "the learning rate, or wb.fit(..., clip_norm=1.0); training goes on."
        )
