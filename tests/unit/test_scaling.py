"""Runs over several numbers of workers: speed-up, laws and their serial share, and the verdict."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from made_up_runs import make_run

from workbench.history.analysis.scaling.of_runs import mode_of, scaling, why_not, worth_showing
from workbench.history.analysis.summary import RunSummary

SERIAL_S, DIVIDED_S = 0.02, 0.08


def strong(
    workers: int, serial_s: float = SERIAL_S, *, strategy: str = "mirrored", **given: Any
) -> RunSummary:
    """Return a run whose step takes a serial part and a share of the rest; batch 64."""
    compute_s = DIVIDED_S / workers
    return make_run(
        f"{strategy}-n{workers}", workers, strategy=strategy, compute_s=compute_s,
        transfer_s=serial_s, data_s=0.0, other_s=0.0, **given,
    )  # fmt: skip


def test_a_known_serial_share_is_read_back_from_strong_scaling() -> None:
    found = scaling([strong(1, strategy="one_device"), *(strong(n) for n in (2, 4, 8))])
    (curve,) = found.curves
    assert curve.law.fits
    assert curve.law.name == "Amdahl"
    assert curve.law.serial == pytest.approx(0.2, abs=1e-3)
    assert curve.law.low <= 0.2 + 1e-6
    assert curve.law.high >= 0.2 - 1e-6
    assert [point.speedup for point in curve.points] == pytest.approx(
        [1 / (0.2 + 0.8 / n) for n in (1, 2, 4, 8)], rel=1e-3
    )
    assert curve.law.limit == pytest.approx(5.0, rel=0.01)
    assert found.distribute
    assert "20 % of one worker's step cannot be divided" in found.verdict
    assert "5.0x" in found.verdict
