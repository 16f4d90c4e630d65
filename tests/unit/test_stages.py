"""A split that leaves open what nobody measured is shown all the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fake_run import fake_pipeline

from workbench.history.snapshot import Split
from workbench.views import text


def test_a_split_without_measured_times_is_shown_without_them() -> None:
    rows = [
        {"stage": i, "rank": i, "layers": layers, "parameters": 10 * i, "microbatch_s": None,
         "handed_bytes": None}
        for i, layers in enumerate(["flatten", "dense"])
    ]  # fmt: skip
    split = Split.of({"stages": rows, "schedule": "naive", "microbatches": 1, "ideal_bubble": 0.5})
    assert text.caption(split) == "2 stages · naive · 1 microbatch · ideal bubble 50 %"
    assert "nan" not in "".join([*text.stage_lines(split), *text.sentences(split)]).lower()
    assert text.sentences(split)[1] == "Stage 1 on worker 1: dense, 10 parameters."


@pytest.mark.parametrize(
    ("bubble", "words"),
    [(0.11, ("11 %", "±0 %")), (0.25, ("25 %", "±0 %")), (0.41, ("41 %", "+16 %"))],
)
def test_nobody_is_shown_to_be_better_than_the_ideal(bubble: float, words: tuple[str, str]) -> None:
    """A worker with more to do than the others has a smaller bubble: that is no gain of its own."""
    shot = fake_pipeline(4)
    assert shot.split is not None
    split = replace(shot.split, ideal_bubble=0.25)
    found = text.bubble(replace(shot.workers[0], bubble=bubble), split)
    assert found.words == words
    assert found.excess >= 0
    assert math.isclose(found.ideal + found.excess, bubble)
