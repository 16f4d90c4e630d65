"""Frames: what a browser holds after deltas is what a full frame would have brought."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_run import curve, empty_snapshot, fake_pipeline, fake_snapshot

from workbench.history.snapshot import Timeline
from workbench.views.live.frames import make_frame
from workbench.views.live.svg import run_svg
from workbench.views.text import report


class Browser:
    """Merges frames as `dashboard.js` does."""

    def __init__(self) -> None:
        self.seq, self.head, self.tables = -1, {}, {}

    def receive(self, frame: Any, buffer: bytes) -> None:
        frame = json.loads(json.dumps(frame, allow_nan=False))
        assert frame["full"] or frame["base"] == self.seq
        if frame["full"]:
            self.head, self.tables = {}, {}
        self.seq = frame["seq"]
        self.head.update(frame["head"])
        floats = np.frombuffer(buffer, np.float32)
        for table in frame["arrays"]:
            width, at = table["columns"], table["offset"]
            new = floats[at : at + table["rows"] * width].reshape(-1, width)
            old = self.tables.get(table["key"], np.zeros((0, width), np.float32))
            kept = old[table["skip"] : table["skip"] + table["keep"]].reshape(-1, width)
            self.tables[table["key"]] = np.concatenate([kept, new])


def play(snapshots: list) -> Browser:
    browser, previous = Browser(), None
    for seq, snapshot in enumerate(snapshots):
        browser.receive(*make_frame(snapshot, previous, seq, seq - 1))
        previous = snapshot
    return browser


def assert_same(one: Browser, other: Browser) -> None:
    assert one.head == other.head
    assert one.tables.keys() >= other.tables.keys()
    for key, table in other.tables.items():
        np.testing.assert_array_equal(one.tables[key], table)


def rows(frame: Any) -> dict[str, int]:
    return {table["key"]: table["rows"] for table in frame["arrays"]}


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_deltas_add_up_to_the_full_frame(workers):
    story = [empty_snapshot(workers)]
    story += [fake_snapshot(workers, step) for step in (1, 2, 30, 39, 80, 81, 300)]
    story += [fake_snapshot(workers, 310, state="paused", logged=True, extra=True)]
    assert_same(play(story), play(story[-1:]))


def test_decimation_of_a_curve_replaces_it_as_a_whole():
    one, two = fake_snapshot(step=400), fake_snapshot(step=410)
    step = np.arange(0, 410, 2)
    halved = replace(two, loss_curve=curve(step, 1.0 / (1 + step), 0.1))
    assert_same(play([one, halved]), play([halved]))


def test_the_last_bucket_of_a_curve_may_change_in_place():
    one = fake_snapshot(step=50)
    mean = one.loss_curve.mean.copy()
    mean[-1] += 0.5
    two = replace(one, loss_curve=replace(one.loss_curve, mean=mean))
    frame, _ = make_frame(two, one, 1, 0)
    assert rows(frame)["loss"] == 1
    assert_same(play([one, two]), play([two]))


def test_only_what_changed_is_sent():
    one, two = fake_snapshot(step=500), fake_snapshot(step=503)
    frame, buffer = make_frame(two, one, 1, 0)
    _, whole = make_frame(two, None, 1)
    found = {"loss": 3, "throughput": 3, "timeline": 3, "workers": 4, "more:eval accuracy": 1}
    assert rows(frame) == found
    assert len(buffer) < len(whole) / 20
    assert "title" not in frame["head"]
    assert "progress" in frame["head"]


def test_nothing_new_sends_no_rows_but_the_workers():
    same = fake_snapshot(step=90)
    frame, _ = make_frame(same, same, 1, 0)
    assert frame["head"] == {}
    assert {key: count for key, count in rows(frame).items() if count} == {"workers": 4}


def test_unknown_numbers_are_nan_in_tables_and_absent_in_the_head():
    nan = float("nan")
    shot = replace(fake_snapshot(step=60), loss=nan, evals=[{"step": 5, "loss": nan}])
    holes = replace(shot.loss_curve, mean=np.full(60, nan))
    browser = play([shot, replace(shot, loss_curve=holes)])
    assert np.isnan(browser.tables["loss"][:, 1]).all()
    assert browser.head["evals"] == [{"step": 5}]
    assert browser.head["figures"]["loss"] == "–"


def test_unknown_points_that_stay_unknown_are_not_sent_again():
    shot = fake_snapshot(step=60)
    mean = shot.loss_curve.mean.copy()
    mean[10] = float("nan")
    shot = replace(shot, loss_curve=replace(shot.loss_curve, mean=mean))
    frame, _ = make_frame(shot, shot, 1, 0)
    assert rows(frame)["loss"] == 0


def test_starts_keep_microseconds_after_ten_hours():
    shot = fake_snapshot(step=40)
    line = shot.timeline
    late = replace(shot, timeline=Timeline(line.step, line.start_s + 36_000, line.parts_s))
    browser = play([shot, late])
    starts = browser.tables["timeline"][:, 1].astype(float) + browser.head["origin_s"]
    np.testing.assert_allclose(starts, late.timeline.start_s[:, 0], rtol=0, atol=8e-6)


def test_a_run_that_changes_its_number_of_workers_starts_its_timeline_anew():
    story = [fake_snapshot(2, 50), fake_snapshot(4, 52)]
    assert_same(play(story), play(story[-1:]))


def test_a_pipelines_stages_are_sent_once_and_its_bubbles_as_they_change():
    story = [empty_snapshot(4), *(fake_pipeline(4, step) for step in (1, 30, 90))]
    assert_same(play(story), play(story[-1:]))
    frame, _ = make_frame(story[3], story[2], 1, 0)
    assert "split" not in frame["head"]
    browser = play(story)
    assert browser.head["bubbles"][1] == ["22 %", "±0 %"]
    assert len(browser.head["split"]["rows"]) == 4
    assert browser.tables["workers"][:, 9] == pytest.approx([w.bubble for w in story[-1].workers])
    assert play([fake_snapshot(4)]).head["split"] is None


def test_each_metric_of_the_evaluations_is_a_curve_of_its_own():
    found = [
        {"step": step, "epoch": 0, "loss": 1.0, "seconds": 0.1, "accuracy": step / 100}
        for step in (20, 40)
    ]
    shot = replace(fake_snapshot(step=60, logged=True), evals=[*found, {"step": 50, "f1": 0.5}])
    browser = play([replace(shot, evals=found[:1]), shot])
    assert browser.head["curves"] == ["more:lr", "more:grad norm", "more:eval accuracy"]
    np.testing.assert_allclose(browser.tables["more:eval accuracy"][:, :2], [[20, 0.2], [40, 0.4]])
    assert "eval accuracy" in report(shot)
    assert "eval accuracy" in run_svg(shot)
    assert "eval f1" not in shot.more  # a single value is no curve
