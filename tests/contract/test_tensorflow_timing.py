"""What the measured times of TensorFlow's strategies must honour: all replicas in one engine."""

from __future__ import annotations

import numpy as np
import pytest
import tf_cells
from needs import need
from tf_cases import CASES, SEVERAL, in_every_way
from tf_harness import clean, run

from workbench import catalog
from workbench.shared import record

need("tensorflow")
pytestmark = [pytest.mark.tensorflow, pytest.mark.timing]


@pytest.mark.parametrize(("entry", "count", "way"), in_every_way(CASES))
def test_records_cover_the_run(entry: catalog.Strategy, count: int, way: str) -> None:
    cell = tf_cells.SLEEPY_WAYS[way]
    report = clean(run(entry.name, cell, count, names={"MILLIS": 12, "STEPS": 30}))
    rows = report.rows
    assert rows.shape == (30, count)
    assert (rows["step"] == np.arange(30)[:, None]).all()
    assert (rows["rank"] == np.arange(count)).all()
    assert (rows["samples"].sum(axis=1) == 12).all()
    derived = record.derive(rows)
    assert derived.step_s[0].max() < 10 * np.median(derived.step_s)  # tracing is no part of it
    named = (1 - derived.other_s / derived.step_s)[1:]  # of the first one the data wait is unknown
    assert np.median(named) >= 0.95
    assert named.max() <= 1.001
    for step_s in derived.step_s.T:
        assert step_s.sum() == pytest.approx(report.train_s, rel=0.01)
    begun = report.emitted("run_started")
    assert [fields["rank"] for fields in begun] == list(range(count))
    assert {fields["batch_size"] for fields in begun} == {12}


@pytest.mark.parametrize(("entry", "count", "way"), in_every_way(SEVERAL))
def test_an_injected_delay_is_read_back_as_the_others_wait(
    entry: catalog.Strategy, count: int, way: str
) -> None:
    cell, names = tf_cells.SLEEPY_WAYS[way], {"MILLIS": 2, "STEPS": 30}
    report = clean(run(entry.name, cell, count, faults=("slow=1:50ms",), names=names))
    derived = record.derive(report.rows)
    wait_ms = np.median(derived.sync_wait_s, axis=0) * 1e3
    others = [rank for rank in range(count) if rank != 1]
    assert wait_ms[others] == pytest.approx(50, abs=5)
    assert wait_ms[1] == pytest.approx(0, abs=1)
    assert (derived.blamed_rank[:, others] == 1).mean() >= 0.95


def test_how_long_tracing_took_is_said() -> None:
    source = tf_cells.KERAS_MODEL + tf_cells.FIT_CALLS["arrays"]
    report = clean(run("mirrored", source, 3, names={"EVERY": 1}))
    texts = [fields["text"] for fields in report.emitted("note")]
    assert any("traced the step once" in text for text in texts), texts
    step_s = (report.rows["end_s"] - report.rows["start_s"])[:, 0]
    assert report.train_s == pytest.approx(step_s.sum(), rel=1e-6)


def test_a_function_traced_in_an_earlier_run_is_still_seen() -> None:
    names = {"MILLIS": 1, "STEPS": 4}
    first = clean(run("mirrored", tf_cells.SLEEPY_WAYS["loop"], 2, names=names))
    kept = {name: first.names[name] for name in ("train_step", "data")}
    again = "for batch in strategy.experimental_distribute_dataset(data):\n    train_step(batch)"
    report = clean(run("mirrored", again, 2, names=kept, faults=("slow=1:30ms",)))
    assert report.trained == 4
    wait_ms = 1e3 * np.median(record.derive(report.rows).sync_wait_s, axis=0)
    assert wait_ms == pytest.approx([30, 0], abs=5)
    first.names.clear()
