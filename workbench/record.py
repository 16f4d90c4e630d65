"""What a step is measured in: one row a replica and step, and what becomes of each of its fields.

`MEASURED` is the one list. The packed row that engines send and that lies on disk (`RECORD`), the
rows and columns of a history and the curves that every view draws are made of it.

To add a column: an entry here (at the end: rows of saved runs begin with what they know), a field
of `engine.recorder.StepResult`, the place that measures it, and its line in docs/metrics.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FLAG_SKEWED_CLOCK = 1
"""`start_s`/`ready_s` come from another host: waits use the min rule over `exposed_s`."""

FLAG_LOSS_SEEN = 2
"""`local_loss` is what the model gave: where it is NaN, the loss is no number. Without it NaN may
only say that nobody saw the loss."""


@dataclass(frozen=True)
class Measured:
    """One field of a row.

    Attributes:
        name: Its unit stands in it.
        type: NumPy's, with its size.
        column: Whether a history keeps it as it was measured, under this name. The others are
            kept as what `metrics.derive` makes of them.
        curve: Whether views draw its course where a run has it.
        rare: Whether a history has the column only where some row has a value.
        result: The field of a `StepResult` that has it, where that is called otherwise.
    """

    name: str
    type: str
    column: bool = False
    curve: bool = False
    rare: bool = False
    result: str = ""


MEASURED = (
    Measured("run", "<u4"),  # sequence number of the run in this cluster
    Measured("step", "<u4", column=True),
    Measured("rank", "<u2", column=True),
    Measured("flags", "<u2"),
    Measured("samples", "<u4", column=True),
    Measured("start_s", "<f8", column=True),  # perf_counter of the engine's host
    Measured("end_s", "<f8"),
    Measured("ready_s", "<f8"),  # when its last gradient was ready; NaN where nothing waits
    Measured("data_wait_s", "<f4"),
    Measured("compute_s", "<f4"),
    Measured("exposed_s", "<f4"),  # time blocked in communication after ready_s
    Measured("wait_s", "<f4"),  # a wait that the strategy measured; NaN: derive it from ready_s
    Measured("local_loss", "<f8", column=True, result="loss"),
    Measured("sent_bytes", "<f8", column=True),
    Measured("staleness", "<f4", column=True, curve=True),
    Measured("bubble_s", "<f4", column=True, curve=True, rare=True),
    Measured("waited_for", "<i8"),  # the rank that wait_s was for, where that is known; else -1
)

RECORD = np.dtype([(one.name, one.type) for one in MEASURED])
"""One row per replica and step as the engine measures it. Times in seconds, sizes in bytes; NaN
marks what could not be measured. Derived columns (sync wait, transfer, other, blame, the global
loss) need the rows of all ranks and are computed in the kernel by `metrics.derive`."""

COLUMNS = {one.name: one.type for one in MEASURED if one.column}
CURVES = tuple(one.name for one in MEASURED if one.curve)
RARE = frozenset(one.name for one in MEASURED if one.rare)
