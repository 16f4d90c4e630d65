"""A split that leaves open what nobody measured is shown all the same."""

from __future__ import annotations

from workbench.history.snapshot import Split
from workbench.views import stages


def test_a_split_without_measured_times_is_shown_without_them() -> None:
    rows = [
        {"stage": i, "rank": i, "layers": layers, "parameters": 10 * i, "microbatch_s": None,
         "handed_bytes": None}
        for i, layers in enumerate(["flatten", "dense"])
    ]  # fmt: skip
    split = Split.of({"stages": rows, "schedule": "naive", "microbatches": 1, "ideal_bubble": 0.5})
    assert stages.caption(split) == "2 stages · naive · 1 microbatch · ideal bubble 50 %"
    assert "nan" not in "".join([*stages.lines(split), *stages.sentences(split)]).lower()
    assert stages.sentences(split)[1] == "Stage 1 on worker 1: dense, 10 parameters."
