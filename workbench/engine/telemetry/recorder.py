"""The engine's recorder: one packed row per step, written by the training thread in about 1 µs.

The rows are in a preallocated ring: the training thread writes, and the control thread drains.
Neither thread waits for the other. When the ring is full, a new row is counted as dropped. Rows are
88 bytes (`record.RECORD`).

The ring has its own memory mapping. Pages that no row reached take no memory, and the whole mapping
is returned to the system at once. On malloc's heap, each run left a hole of 5.8 MB if a small
object behind the ring lived longer than the ring.
"""

from __future__ import annotations

import math
import mmap
import struct
import time
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from ...shared.record import (
    FLAG_DEVICE_CLOCK,
    FLAG_LOSS_SEEN,
    FLAG_UNMEASURED,
    MEASURED,
    RECORD,
)

_CODES = {"<u2": "H", "<u4": "I", "<i8": "q", "<f4": "f", "<f8": "d"}
_ROW = struct.Struct("<" + "".join(_CODES[one.type] for one in MEASURED))
_AFTER = [one.name for one in MEASURED].index("data_wait_s") + 1
_rest = attrgetter(*(one.result or one.name for one in MEASURED[_AFTER:]))
"""The fields of a `StepResult` that a row holds in addition to the fields from the loop."""

NAN = float("nan")

FINAL_S = 5.0
"""How long the end of a run waits for the last rows. A device that hangs completes no row."""

POLL_S = 1e-3


class Deferred(Protocol):
    """Values that are known only later: times from a device's events, a loss on the device."""

    def ready(self) -> bool:
        """Whether `values` would return without waiting; may raise the device's error."""

    def values(self) -> dict[str, float]:
        """Return the fields of RECORD to overwrite."""


@dataclass
class StepResult:
    """The measurements of one optimizer step on this worker; `record.RECORD` explains them.

    Attributes:
        loss: The mean loss of this worker, as a float; NaN if `deferred` gives it later.
        has_loss: Whether `loss` is the loss that the model returned; then NaN is a real NaN.
        device_clock: Whether the times come from the clock of an accelerator.
        deferred: Completes the record later, off the training thread (from a device's events, and
            from losses that are on the device).
        replicas: One result per replica if this engine holds several. Then `samples` and `loss` are
            those of the whole engine, and each replica has its own row.
        waited_for: The rank for which the worker waited `wait_s`, if the strategy knows it;
            otherwise -1.
        set_up_s: Seconds spent once, before the step, for example to trace the step as a graph.
            They belong to no step.
        aside_s: Seconds that were not spent on training, for example to compare replicas. They
            belong to no step, and not to the training time.
            step, and not to the time of training.
    """

    samples: int
    loss: float
    compute_s: float
    ready_s: float = NAN
    exposed_s: float = NAN
    wait_s: float = NAN
    sent_bytes: float = NAN
    staleness: float = NAN
    bubble_s: float = NAN
    waited_for: int = -1
    deferred: Deferred | None = None
    replicas: tuple[StepResult, ...] = ()
    set_up_s: float = 0.0
    aside_s: float = 0.0
    has_loss: bool = False
    device_clock: bool = False


class Recorder:
    """Collects one worker's rows of one run.

    Args:
        run: Sequence number of the run.
        rank: This worker.
        capacity: Number of rows that fit before the control thread must drain some. It is rounded
            up to a power of two. At 1,000 steps/s and 10 drains/s, 65,536 rows are enough for 65 s.
        flags: Written into each row.
        first: The recorder leaves out rows of steps before this step.
        original_rank: The rank in the rows, if it differs from `rank` (see
            `RunSpec.original_rank`).

    Attributes:
        dropped: Number of rows for which there was no room.
        unmeasured: Number of rows that were drained without the device's measurements.
        trouble: The reason for the first such row; after that row no device is asked any more.
    """

    def __init__(
        self,
        run: int,
        rank: int,
        capacity: int = 1 << 16,
        flags: int = 0,
        row_rank: int | None = None,
        first: int = 0,
    ) -> None:
        size = 1 << (capacity - 1).bit_length()
        # A private mapping, because data loaders fork this process.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._buffer = mmap.mmap(-1, size * RECORD.itemsize, flags=private)
        self._mask = size - 1
        self._head = 0  # rows written so far; only the training thread changes it
        self._tail = 0  # rows drained so far; only the control thread changes it
        self._deferred: dict[int, Deferred] = {}
        self._run, self._rank, self._flags = run, rank if row_rank is None else row_rank, flags
        self._shift, self._first = self._rank - rank, first
        self.dropped = self.unmeasured = 0
        self.trouble = ""

    def add_step(
        self,
        step: int,
        result: StepResult,
        start_s: float,
        end_s: float,
        *,
        data_wait_s: float,
        rank: int | None = None,
    ) -> None:
        """Write one row; never waits.

        Args:
            rank: The row's rank, if this engine holds several replicas.
        """
        head = self._head
        if step < self._first:
            return
        if head - self._tail > self._mask:
            self.dropped += 1
            return
        if result.deferred is not None:
            self._deferred[head] = result.deferred
        named = self._rank if rank is None else rank + self._shift
        flags = self._flags | (FLAG_LOSS_SEEN if result.has_loss else 0)
        if result.device_clock:
            flags |= FLAG_DEVICE_CLOCK
        _ROW.pack_into(
            self._buffer, (head & self._mask) * RECORD.itemsize,
            self._run, step, named, flags, result.samples, start_s, end_s, result.ready_s,
            data_wait_s, *_rest(result),
        )  # fmt: skip
        self._head = head + 1  # last, so that a half-written row is never drained

    def drain(self, limit: int = 4096, *, final: bool = False, within_s: float = FINAL_S) -> bytes:
        """Return up to `limit` complete rows as packed bytes, oldest first.

        A device that fails, or that has not finished in time, loses no row. Its row is sent as
        recorded, with `FLAG_UNMEASURED`, and later rows are sent in the same way.

        Args:
            limit: Most rows to return.
            final: Wait for deferred values. Otherwise stop at the first row whose values are not
                ready.
            within_s: The time limit for the whole call.
        """
        tail, rows = self._tail, bytearray()
        size = RECORD.itemsize
        stop = min(self._head, tail + limit)
        until_s = time.monotonic() + within_s if final else -math.inf
        while tail < stop:
            late = self._deferred.get(tail)
            at = (tail & self._mask) * size
            row: bytes | bytearray = self._buffer[at : at + size]
            if late is not None:
                values = self._values_of(late, until_s)
                if values is None and not (final or self.trouble):
                    break
                del self._deferred[tail]
                row = self._unmeasured(row) if values is None else _overwrite(row, values)
            rows += row
            tail += 1
        self._tail = tail
        return bytes(rows)

    def _values_of(self, late: Deferred, until_s: float) -> dict[str, float] | None:
        """Return the deferred values, or None; `trouble` is set if they will never arrive."""
        if self.trouble:
            return None
        try:
            while not late.ready():
                if time.monotonic() >= until_s:
                    if until_s > -math.inf:
                        self.trouble = "the device had not finished its work when the run ended"
                    return None
                time.sleep(POLL_S)
            return late.values()
        except Exception as error:  # after an error, a device gives errors until the process ends
            said = (str(error) or type(error).__name__).splitlines()[0]
            self.trouble = f"the device failed ({said})"
            return None

    def _unmeasured(self, row: bytes | bytearray) -> bytearray:
        import numpy as np

        self.unmeasured += 1
        flags = int(np.frombuffer(row, RECORD)["flags"][0])
        return _overwrite(row, {"flags": (flags | FLAG_UNMEASURED) & ~FLAG_LOSS_SEEN})

    @property
    def written(self) -> int:
        """Rows written so far."""
        return self._head

    @property
    def drained(self) -> int:
        """Rows drained so far."""
        return self._tail

    @property
    def pending(self) -> int:
        """Rows written and not drained yet."""
        return self._head - self._tail


def _overwrite(row: bytes | bytearray, values: dict[str, float]) -> bytearray:
    import numpy as np

    record = np.frombuffer(row, RECORD).copy()
    for name, value in values.items():
        record[name] = value
    return bytearray(record.tobytes())
