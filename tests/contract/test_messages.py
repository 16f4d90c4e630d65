"""The formulas of the message diagrams agree with the bytes that a real run counts."""

from __future__ import annotations

from typing import Any

import cells
import numpy as np
import pytest
from worker_reports import Report, failures, joined
from workers import Workers

from workbench.catalog.diagrams import messages
from workbench.history.analysis.step_picture import handed_bytes, part_bytes
from workbench.history.snapshot import Split

pytestmark = pytest.mark.torch

NUMBER_BYTES = 8  # float64
STEPS = 4

ALL_REDUCES = ("backend", "ring", "hierarchical", "reduce_to_one", "recursive_doubling")
CASES: list[tuple[str, int, dict[str, Any]]] = [
    *(("mirrored", 3, {"allreduce": name}) for name in ALL_REDUCES),
    ("central_storage", 2, {}),
    ("parameter_server", 2, {}),
    ("parameter_server", 2, {"servers": 2, "sync": True}),
    ("local_sgd", 3, {"every": 2}),
    ("local_sgd", 3, {"every": 2, "outer": "nesterov"}),
    ("local_sgd", 2, {"every": 4, "fragments": 2, "outer": "nesterov"}),
    ("local_sgd", 3, {"every": 3, "fragments": 2}),  # turns at unequal distances
    ("gossip", 3, {"graph": "ring"}),
    ("gossip", 3, {"graph": "exponential"}),
    ("model_split", 2, {"schedule": "gpipe", "microbatches": 4}),
    ("one_device", 1, {}),
]


def units(reports: list[Report]) -> dict[str, float]:
    """Return the sizes of the network in `cells.train` and of what its stages hand on."""
    parameters = (8 * 16 + 16 + 16 * 3 + 3) * NUMBER_BYTES
    split = [Split.of(fields) for fields in reports[0].emitted("split")]
    held = {fields["server"]: fields for fields in reports[0].emitted("server")}
    handed = handed_bytes(split[0] if split else None)
    return {"M": parameters, "P": parameters, **handed, **part_bytes(held)}


@pytest.mark.parametrize(
    ("strategy", "count", "options"), CASES,
    ids=[f"{name} {' '.join(map(str, options.values()))}".strip() for name, _, options in CASES],
)  # fmt: skip
def test_what_is_counted_is_what_the_diagram_says(
    workers: Workers, strategy: str, count: int, options: dict[str, Any]
) -> None:
    reports = workers.run(
        strategy, cells.train, workers=count, options=options,
        keywords={"batch": 24, "steps": STEPS},
    )  # fmt: skip
    assert failures(reports) == []
    drawn, known = messages(strategy, count, options), units(reports)
    expected = [
        [drawn.sent_bytes(f"w{rank}", known, step) for rank in range(count)]
        for step in range(STEPS)
    ]
    # Chunks of a ring differ by a number each: 195 numbers do not divide by the workers.
    slack = 2 * NUMBER_BYTES * count
    assert joined(reports)["sent_bytes"] == pytest.approx(np.array(expected), abs=slack)
    assert (np.array(expected).sum() > 10 * slack) == (count > 1)


def test_sharded_layers_count_as_drawn(workers: Workers) -> None:
    reports = workers.run("sharded", cells.train, workers=2, keywords={"batch": 20, "steps": STEPS})
    assert failures(reports) == []
    # Small layers are one unit, which is kept for backward; 3 rows are filled up to 4.
    known = {"M": (8 * 16 + 16 + 16 * 4 + 4) * NUMBER_BYTES, "U": 0}
    drawn = messages("sharded", 2)
    expected = [drawn.sent_bytes(f"w{rank}", known, 0) for rank in range(2)]
    assert joined(reports)["sent_bytes"] == pytest.approx(np.tile(expected, (STEPS, 1)))


def test_a_divided_layer_pair_counts_as_drawn(workers: Workers) -> None:
    keywords = {"batch": 20, "steps": STEPS}
    reports = workers.run("tensor_parallel", cells.train, workers=2, keywords=keywords)
    assert failures(reports) == []
    # One pair: its output is added up; it is the first layer, so no gradient of its input is.
    known = {"Y": 20 * 3 * NUMBER_BYTES, "X": 0}
    drawn = messages("tensor_parallel", 2)
    expected = [drawn.sent_bytes(f"w{rank}", known, 0) for rank in range(2)]
    assert joined(reports)["sent_bytes"] == pytest.approx(np.tile(expected, (STEPS, 1)))


def test_a_grid_of_pipelines_counts_as_drawn(workers: Workers) -> None:
    options = {"stages": 2, "schedule": "gpipe", "microbatches": 2}
    reports = workers.run(
        "hybrid", cells.train, workers=4, options=options, keywords={"batch": 24, "steps": STEPS}
    )
    assert failures(reports) == []
    clocks = 2 * 2 * NUMBER_BYTES  # two numbers for each holder of a stage ride along
    held = [sum(w.nbytes for w in report.weights.values()) for report in reports[:2]]
    known = units(reports) | {f"G{place}": size + clocks for place, size in enumerate(held)}
    drawn = messages("hybrid", 4, options)
    expected = [drawn.sent_bytes(f"w{rank}", known, 0) for rank in range(4)]
    assert joined(reports)["sent_bytes"] == pytest.approx(np.tile(expected, (STEPS, 1)))
