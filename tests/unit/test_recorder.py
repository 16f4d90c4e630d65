"""The recorder's ring: rows come out as they went in, or are counted as dropped."""

from __future__ import annotations

import dataclasses
import os
import threading
import tracemalloc

import numpy as np

from workbench.engine.telemetry.recorder import Recorder, StepResult
from workbench.shared.protocol import records_from
from workbench.shared.record import COLUMNS, CURVES, FLAG_UNMEASURED, MEASURED, RARE, RECORD


class Late:
    """A deferred value that becomes ready when told."""

    def __init__(self, loss: float) -> None:
        self.loss, self.done = loss, False

    def ready(self) -> bool:
        return self.done

    def values(self) -> dict[str, float]:
        return {"local_loss": self.loss, "end_s": 9.0}


def add(recorder: Recorder, step: int, **more: object) -> None:
    result = StepResult(8, float(step), 0.5, **more)  # type: ignore[arg-type]
    recorder.add_step(step, result, step + 0.0, step + 1.0, data_wait_s=0.25)


def test_rows_come_out_in_order_with_what_was_measured() -> None:
    recorder = Recorder(run=7, rank=3, flags=1)
    for step in range(5):
        add(recorder, step, ready_s=step + 0.75)
    rows = records_from(recorder.drain())
    assert rows["step"].tolist() == [0, 1, 2, 3, 4]
    assert set(rows["run"]) == {7}
    assert set(rows["rank"]) == {3}
    assert set(rows["flags"]) == {1}
    assert rows["ready_s"].tolist() == [0.75, 1.75, 2.75, 3.75, 4.75]
    assert np.isnan(rows["staleness"]).all()
    assert recorder.drain() == b""


def test_a_full_ring_counts_what_it_drops_and_keeps_the_oldest() -> None:
    recorder = Recorder(0, 0, capacity=4)
    for step in range(7):
        add(recorder, step)
    assert recorder.dropped == 3
    assert records_from(recorder.drain())["step"].tolist() == [0, 1, 2, 3]


def test_the_ring_wraps_without_mixing_rows() -> None:
    recorder = Recorder(0, 0, capacity=4)
    seen: list[int] = []
    for step in range(50):
        add(recorder, step)
        if step % 3 == 2:
            seen += records_from(recorder.drain())["step"].tolist()
    seen += records_from(recorder.drain())["step"].tolist()
    assert seen == list(range(50))
    assert recorder.dropped == 0


def test_a_deferred_row_holds_back_those_after_it() -> None:
    recorder, late = Recorder(0, 0), Late(42.0)
    add(recorder, 0)
    add(recorder, 1, deferred=late)
    add(recorder, 2)
    assert records_from(recorder.drain())["step"].tolist() == [0]
    assert recorder.pending == 2
    late.done = True
    rows = records_from(recorder.drain())
    assert rows["step"].tolist() == [1, 2]
    assert rows["local_loss"].tolist() == [42.0, 2.0]
    assert rows["end_s"].tolist() == [9.0, 3.0]


def test_the_last_drain_waits_for_deferred_values() -> None:
    recorder, late = Recorder(0, 0), Late(1.5)
    add(recorder, 0, deferred=late)
    timer = threading.Timer(0.02, lambda: setattr(late, "done", True))
    timer.start()
    assert records_from(recorder.drain(final=True))["local_loss"].tolist() == [1.5]
    timer.join()
    assert recorder.unmeasured == 0


def test_the_last_drain_ends_also_where_a_device_never_does() -> None:
    recorder = Recorder(0, 0)
    add(recorder, 0, has_loss=True, deferred=Late(1.5))
    add(recorder, 1)
    rows = records_from(recorder.drain(final=True, within_s=0.01))
    assert rows["step"].tolist() == [0, 1]
    assert rows["flags"].tolist() == [FLAG_UNMEASURED, 0]  # nobody saw the loss
    assert recorder.unmeasured == 1


def test_a_deferred_value_that_raises_costs_no_row_and_no_later_one_is_asked() -> None:
    class Failed(Late):
        asked = 0

        def ready(self) -> bool:
            Failed.asked += 1
            raise RuntimeError("CUDA error: device-side assert triggered\nand more")

    recorder = Recorder(0, 0)
    for step in range(3):
        add(recorder, step, deferred=Failed(1.5))
    rows = records_from(recorder.drain())
    assert rows["step"].tolist() == [0, 1, 2]
    assert (rows["flags"] == FLAG_UNMEASURED).all()
    assert (recorder.unmeasured, Failed.asked) == (3, 1)
    assert "(CUDA error: device-side assert triggered)" in recorder.trouble


def test_drain_returns_no_more_rows_than_asked_for() -> None:
    recorder = Recorder(0, 0)
    for step in range(5):
        add(recorder, step)
    assert len(records_from(recorder.drain(2))) == 2
    assert recorder.pending == 3


def test_the_ring_takes_nothing_of_the_heap() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        recorder = Recorder(run=1, rank=0)
        add(recorder, 0)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < 4096 < (1 << 16) * RECORD.itemsize


def test_rows_of_a_process_that_was_forked_are_its_own() -> None:
    recorder = Recorder(run=1, rank=0, capacity=4)
    add(recorder, 0)
    child = os.fork()
    if child == 0:
        try:
            recorder.drain()
            for step in range(6, 10):
                add(recorder, step)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    add(recorder, 1)
    assert records_from(recorder.drain())["step"].tolist() == [0, 1]


def test_every_field_of_a_result_arrives_under_its_name() -> None:
    names = [one.result or one.name for one in MEASURED]
    given = {field.name for field in dataclasses.fields(StepResult)} & set(names) - {"waited_for"}
    numbers = {name: float(place) for place, name in enumerate(sorted(given), 1)}
    result = StepResult(**{**numbers, "samples": 8}, waited_for=2)  # type: ignore[arg-type]
    recorder = Recorder(run=7, rank=3)
    recorder.add_step(5, result, 1.5, 2.5, data_wait_s=0.25)
    (row,) = records_from(recorder.drain())
    read = {one.result or one.name: row[one.name] for one in MEASURED}
    known = {"run": 7, "step": 5, "rank": 3, "flags": 0, "start_s": 1.5, "end_s": 2.5}
    assert read == {**numbers, **known, "samples": 8, "data_wait_s": 0.25, "waited_for": 2}


def test_rows_of_saved_runs_are_read_as_they_were_written() -> None:
    """The layout of 0.1; a new field comes after these."""
    assert RECORD.descr[:17] == [
        ("run", "<u4"), ("step", "<u4"), ("rank", "<u2"), ("flags", "<u2"), ("samples", "<u4"),
        ("start_s", "<f8"), ("end_s", "<f8"), ("ready_s", "<f8"), ("data_wait_s", "<f4"),
        ("compute_s", "<f4"), ("exposed_s", "<f4"), ("wait_s", "<f4"), ("local_loss", "<f8"),
        ("sent_bytes", "<f8"), ("staleness", "<f4"), ("bubble_s", "<f4"), ("waited_for", "<i8"),
    ]  # fmt: skip
    assert RECORD.itemsize == 88


def test_what_is_rare_has_a_course_that_tells_whether_it_was_seen() -> None:
    assert RARE <= set(CURVES) <= set(COLUMNS)
