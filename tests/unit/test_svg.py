"""SVG frames."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from fake_run import empty_snapshot, fake_pipeline, fake_snapshot

from workbench.views import text
from workbench.views.drawing import width_in
from workbench.views.live.svg import run_svg
from workbench.views.theme import PHASE_COLORS

NS = "{http://www.w3.org/2000/svg}"


def words(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(svg).iter(f"{NS}text")]


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_frame_is_well_formed_and_names_every_worker(workers):
    shown = words(run_svg(fake_snapshot(workers, 90, extra=True, logged=True)))
    assert shown.count("rank 0 · cpu") == 2
    assert shown.count(f"rank {workers - 1} · cpu") == 2
    assert "staleness" in shown
    assert "median wait" in shown


def test_a_headline_fits_the_frame_however_long():
    note = "2 stages, one after the other: each stands idle 50% of the time if they are equal. " * 3
    shot = replace(
        fake_pipeline(2, 60), name="a run whose name is as long as the names of runs may become",
        strategy="multi_worker_mirrored", notes=(note + "\n  stage 0: dense (100 parameters)",),
        evals=({"step": 60, **{f"accuracy of part {part}": 0.9389 for part in range(9)}},),
    )  # fmt: skip
    root = ET.fromstring(run_svg(shot))
    for node in root.iter(f"{NS}text"):
        if node.get("text-anchor") == "start":
            weight = "bold" if node.get("font-weight") else "normal"
            width = 96 * width_in(node.text, 9, weight)  # 12 pixels are 9 points
            assert float(node.get("x")) + width <= float(root.get("width")), node.text
    shown = words(run_svg(shot))
    assert any("accuracy of part 8 0.939" in line for line in shown)
    assert "stage 0: dense (100 parameters)" in shown


def test_waiting_is_hatched_and_computing_is_not():
    boxes = [r.get("fill") for r in ET.fromstring(run_svg(fake_snapshot(2, 30))).iter(f"{NS}rect")]
    assert boxes.count("url(#wb-hatch)") >= 12
    assert boxes.count(PHASE_COLORS["compute_s"]) >= 24


def test_names_and_notes_are_escaped():
    shot = replace(fake_snapshot(), name="<script>x</script>", notes=("a < b & c",))
    svg = run_svg(shot)
    assert "<script" not in svg
    assert "a < b & c" in words(svg)


def test_unknown_numbers_never_reach_a_coordinate():
    shot = fake_snapshot(3, 60)
    mean = shot.loss_curve.mean.copy()
    mean[5:9] = np.nan
    holes = replace(shot.loss_curve, mean=mean, low=mean, high=mean)
    starts = shot.timeline.start_s.copy()
    starts[-1, 0] = np.nan
    svg = run_svg(replace(shot, loss_curve=holes, timeline=replace(shot.timeline, start_s=starts)))
    assert "nan" not in svg.lower()
    assert "nan" not in run_svg(empty_snapshot()).lower()


def test_the_drawing_is_described_for_screen_readers():
    root = ET.fromstring(run_svg(fake_snapshot(4, 90)))
    assert root.get("role") == "img"
    assert "48 ms" in root.get("aria-label")


def test_long_runs_do_not_make_long_frames():
    short, long = (len(run_svg(fake_snapshot(4, step))) for step in (240, 1990))
    assert long < 1.5 * short


def test_a_pipeline_has_its_bubbles_and_its_stages():
    shot = fake_pipeline(4, 90)
    svg = run_svg(shot)
    shown = words(svg)
    for word in (text.TITLE, "above ideal", "+14 %", "±0 %", "1,050,624", "4.2 ms"):
        assert word in shown
    assert "4 stages · 1f1b · 8 microbatches of 32 samples · ideal bubble 27 %" in shown
    full = [r for r in ET.fromstring(svg).iter(f"{NS}rect") if r.get("class") == "w"]
    assert sum(float(r.get("width")) > 0 for r in full) == 3  # the slow one has no excess
    assert text.TITLE not in words(run_svg(fake_snapshot(4, 90)))


def test_where_workers_went_or_came_is_marked_and_said():
    changes = (
        {"event": "healed", "step": 20, "ranks": [1], "workers": 2, "seconds": 0.1},
        {"event": "joined", "step": 40, "ranks": [1], "workers": 3, "seconds": 0.1},
        {"event": "healed", "step": 500, "ranks": [2], "workers": 2, "seconds": 0.1},
    )
    svg = run_svg(replace(fake_snapshot(step=60), changes=changes))
    titles = [one.text for one in ET.fromstring(svg).iter() if one.tag.endswith("title")]
    assert titles.count("rank 1 died at step 20") == 2  # in both curves
    assert titles.count("rank 1 joined at step 40") == 2
    assert not any("500" in one for one in titles if one)  # beyond what is drawn
    shown = words(svg)
    assert shown.count("rank 1 died") == shown.count("rank 1 joined") == 2


def test_the_words_of_many_marks_are_left_to_the_pointer():
    changes = tuple(
        {"event": "joined", "step": 5 + 7 * rank, "ranks": [rank], "workers": 9, "seconds": 0.1}
        for rank in range(text.MOST_LABELS + 1)
    )
    svg = run_svg(replace(fake_snapshot(step=60), changes=changes))
    titles = [one.text for one in ET.fromstring(svg).iter() if one.tag.endswith("title")]
    assert titles.count("rank 6 joined at step 47") == 2
    assert not any("joined" in one for one in words(svg))
