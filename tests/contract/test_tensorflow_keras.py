"""Keras' own `model.fit`, unchanged, under a strategy."""

from __future__ import annotations

import numpy as np
import pytest
from needs import need
from tf_cells import FIT_CALLS, KERAS_MODEL
from tf_harness import clean, run

from workbench import metrics

need("tensorflow")
pytestmark = pytest.mark.tensorflow


# Several steps per execution meet data of each origin in the same function of Keras'.
@pytest.mark.parametrize(
    ("call", "every"),
    [*((call, 1) for call in FIT_CALLS), ("validation_split", 2), ("tf.data", 2)],
)
def test_keras_fit_works_unchanged(call: str, every: int) -> None:
    source = KERAS_MODEL + FIT_CALLS[call] + "\nscores = model.evaluate(x, y, batch_size=24)\n"
    source += "out = model.predict(x, batch_size=24)\n"
    report = clean(run("mirrored", source, 2, names={"EVERY": every}))
    assert report.trained == 8
    assert len(report.rows) == 8
    assert np.isfinite(report.rows["local_loss"]).all()
    assert report.rows["samples"].sum() == (72 if call == "validation_split" else 96) * 2
    assert len(report.names["seen"]) == 8 // every
    assert report.names["out"].shape == (96, 10)
    history = report.names["h"].history
    assert len(history["loss"]) == 2
    evals = report.emitted("eval")
    assert len(evals) == (2 if "val_loss" in history else 0)
    for fields, loss in zip(evals, history.get("val_loss", ()), strict=True):
        assert fields["values"]["loss"] == pytest.approx(loss)
    # What Keras shows is the mean over the epoch; the rows hold each batch's own.
    first = metrics.derive(report.rows).loss[:4]
    assert first.mean() == pytest.approx(history["loss"][0], rel=1e-4)


def test_what_xla_compiles_is_recorded_without_its_parts() -> None:
    source = KERAS_MODEL.replace("EVERY", "1, jit_compile=True") + FIT_CALLS["arrays"]
    report = clean(run("one_device", source))
    assert report.trained == 8
    assert (report.rows["samples"] == 24).all()
    assert np.isfinite(report.rows["local_loss"]).all()
    assert np.isnan(report.rows["compute_s"]).all()
    (unseen,) = report.emitted("unmeasured")
    assert "jit_compile" in unseen["columns"]["compute_s"]


def test_the_lines_overrides_win() -> None:
    overrides = {"steps": 7, "batch_size": 12, "seed": 5}
    source = KERAS_MODEL + FIT_CALLS["arrays"]
    report = clean(run("mirrored", source, 2, overrides=overrides, names={"EVERY": 1}))
    assert report.rows.shape == (7, 2)
    assert (report.rows["samples"] == 6).all()
    overrides = {"epochs": 3}
    report = clean(run("mirrored", source, 2, overrides=overrides, names={"EVERY": 1}))
    assert report.rows.shape == (12, 2)


def test_a_model_of_the_cell_before_trains_on() -> None:
    first = clean(run("mirrored", KERAS_MODEL + FIT_CALLS["arrays"], 2, names={"EVERY": 1}))
    names = {"model": first.names["model"], "x": first.names["x"], "y": first.names["y"]}
    report = clean(run("mirrored", "model.fit(x, y, batch_size=24)", 2, names=names))
    assert report.trained == 4
    assert np.isfinite(report.rows["compute_s"]).all()
    assert any("trained by an earlier run" in e["text"] for e in report.emitted("warning"))
