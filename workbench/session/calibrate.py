"""`wb.calibrate`: injects a known delay and prints what the instrument read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..cookbook import Recipe
from ..errors import RunError
from .cluster import Cluster
from .run import Run

DELAY_S = 0.05
STEPS = 40
SETTLE = 5

RECIPE = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
wb.fit(model, wb.data.synthetic(4096, shape=(64,), classes=10), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=32)
"""


@dataclass(frozen=True)
class Calibration:
    """What was injected and what was read back, in milliseconds."""

    injected_ms: float
    read_ms: float
    own_ms: float
    named_share: float
    steps: int
    run: Run

    @property
    def tolerance_ms(self) -> float:
        """How far off a reading may be: 5 ms or 10 %."""
        return max(5.0, 0.1 * self.injected_ms)

    @property
    def passed(self) -> bool:
        """Whether the instrument can be believed."""
        right = abs(self.read_ms - self.injected_ms) <= self.tolerance_ms
        return right and self.own_ms <= self.tolerance_ms and self.named_share >= 0.95

    def __repr__(self) -> str:
        verdict = "the instrument can be believed" if self.passed else "do NOT trust the waits here"
        return (
            f"injected {self.injected_ms:.0f} ms into worker 1's step; the others' sync wait read "
            f"{self.read_ms:.1f} ms (allowed {self.injected_ms:.0f} ± {self.tolerance_ms:.0f}), "
            f"its own {self.own_ms:.1f} ms, it was named in {self.named_share:.0%} of {self.steps} "
            f"steps: {verdict}"
        )


def calibrate(cluster: Cluster | None = None) -> Calibration:
    """Slow worker 1 by 50 ms a step under `mirrored` and return what the others' waits read.

    Args:
        cluster: Where to measure; the notebook's cluster by default.

    Raises:
        RunError: The cluster has fewer than two engines' worth of answers.
    """
    if cluster is None:
        from .state import session

        cluster = session.need_cluster()
    run = cluster.run(
        Recipe(RECIPE, origin="calibrate"),
        strategy="mirrored",
        workers=max(2, len(cluster.worker_ids)),
        inject=[f"slow=1:{DELAY_S * 1e3:g}ms"],
        steps=STEPS + SETTLE,
        name="calibrate",
    ).wait()
    return read_back(run)


def read_back(run: Run) -> Calibration:
    """Read a run in which worker 1 was slowed by `DELAY_S` each step."""
    history = run.history
    late = history["step"] >= SETTLE
    others = late & (history["rank"] != 1)
    own = late & (history["rank"] == 1)
    if not others.any():
        raise RunError("The run has too few steps to read anything back.", seen=len(history))
    return Calibration(
        injected_ms=DELAY_S * 1e3,
        read_ms=float(np.median(history["sync_wait_s"][others])) * 1e3,
        own_ms=float(np.median(history["sync_wait_s"][own])) * 1e3,
        named_share=float(np.mean(history["blamed_rank"][others] == 1)),
        steps=int(np.unique(history["step"][late]).size),
        run=run,
    )
