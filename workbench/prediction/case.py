"""What is to be computed, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .exchange import Cost
    from .probe import Setting
    from .work import Work

Floats = NDArray[np.float64]
CAUSES = ("own work", "waiting", "messages")


@dataclass(frozen=True, eq=False)
class Computed:
    """Runs that were computed.

    Attributes:
        step_s: (draws,) mean seconds of a step.
        share: Of a step that is each of `CAUSES`; adds up to 1.
    """

    step_s: Floats
    share: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """What is to be computed.

    Attributes:
        message_bytes: Of a worker's gradients as they travel; NaN where nothing is sent.
        scale: (draws,) factor on own work: other samples of a worker than those seen.
        steps: Of the run that is predicted.
        seen_workers: Most workers of a run that it is predicted from.
    """

    setting: Setting
    work: Work
    message_bytes: float
    scale: Floats
    cost: Cost
    steps: int
    seen_workers: int
    first: int = 0
