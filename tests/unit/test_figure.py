"""The final picture."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise

import matplotlib
import pytest
from any_page import illegible, is_on_paper, is_transparent
from fake_run import empty_snapshot, fake_pipeline, fake_snapshot
from matplotlib.image import imread

from workbench.views import text
from workbench.views.live import figure


def all_texts(made) -> str:
    from matplotlib.text import Text

    return "\n".join(found.get_text() for found in made.findobj(Text))


def test_the_bundle_holds_a_picture_and_text_of_the_same_content():
    shot = fake_snapshot(4, 120, state="finished", extra=True)
    bundle = figure.run_bundle(shot)
    assert set(bundle) == {"image/png", "text/plain"}
    assert imread(io.BytesIO(bundle["image/png"])).shape[1] > 800
    assert bundle["text/plain"] == text.report(shot)


def test_the_picture_names_run_workers_phases_and_who_is_slow():
    said = all_texts(figure.run_figure(fake_snapshot(4, 120, extra=True, logged=True)))
    for words in (
        "base · mirrored", "rank 3 · cpu", "sync wait", "makes the other workers wait 48 ms",
        "staleness", "grad norm", "Throughput, samples/s", "step", "ms",
    ):  # fmt: skip
        assert words in said


WORDY = {
    "name": "a run whose name its user has made as long as the names of runs may become in a class",
    "strategy": "multi_worker_mirrored",
    "state": "finished",
    "evals": ({"step": 60, **{f"accuracy of part {part}": 0.9389 for part in range(9)}},),
}
"""A headline of several lines."""


@pytest.mark.parametrize("changes", [{}, {"evals": WORDY["evals"]}, WORDY])
def test_a_headline_fits_the_picture_however_long(changes):
    drawn = figure.run_figure(replace(fake_pipeline(2, 60), **changes))
    drawn.draw_without_rendering()
    head = drawn.subfigs[0]
    boxes = [found.get_window_extent() for found in head.texts if found.get_text()]
    assert len(boxes) >= 2
    assert max(box.x1 for box in boxes) <= drawn.bbox.x1
    assert min(box.y0 for box in boxes) >= head.bbox.y0
    boxes.sort(key=lambda box: -box.y0)
    assert all(above.y0 >= below.y1 - 2 for above, below in pairwise(boxes))
    said = " ".join(found.get_text() for found in head.texts)
    if "evals" in changes:
        assert "accuracy of part 8 0.939" in said


@pytest.mark.parametrize("workers", [1, 8])
def test_pictures_grow_with_the_workers_and_a_run_without_steps_has_one(workers):
    tall = imread(io.BytesIO(figure.run_png(fake_snapshot(workers, 50)))).shape[0]
    none = imread(io.BytesIO(figure.run_png(empty_snapshot(workers, "failed")))).shape[0]
    assert abs(tall - none) <= 2
    assert tall > 400 + 40 * workers


def test_the_users_matplotlib_settings_are_neither_used_nor_changed():
    plain = figure.run_png(fake_snapshot(2, 20))
    with matplotlib.rc_context({"hatch.linewidth": 9, "axes.facecolor": "black"}):
        before = dict(matplotlib.rcParams)
        styled = figure.run_png(fake_snapshot(2, 20))
        assert dict(matplotlib.rcParams) == before
    assert styled == plain


@pytest.mark.parametrize("shot", [
    pytest.param(fake_snapshot(3, 60, extra=True, logged=True), id="run"),
    pytest.param(fake_pipeline(3, 60), id="pipeline"),
    pytest.param(empty_snapshot(2, "failed"), id="without steps"),
])  # fmt: skip
def test_what_stays_in_a_notebook_fits_white_and_dark_pages_and_files_have_paper(shot):
    assert is_transparent(figure.run_bundle(shot)["image/png"])
    assert is_on_paper(figure.run_png(shot))
    assert illegible(figure.run_figure(shot)) == []


def test_the_placeholder_is_a_valid_picture_with_the_given_text():
    bundle = figure.placeholder_bundle("run base")
    assert imread(io.BytesIO(bundle["image/png"])).shape[:2] == (1, 1)
    assert bundle["text/plain"] == "run base"


def test_a_picture_shows_and_saves_itself(tmp_path):
    picture = figure.RunPicture(fake_snapshot(2, 20))
    assert picture._repr_mimebundle_()["text/plain"] == repr(picture)
    picture.save(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"


def test_the_picture_of_a_pipeline_shows_bubbles_and_stages():
    said = all_texts(figure.run_figure(fake_pipeline(4, 120, logged=True)))
    for words in (
        text.TITLE,
        "41 % · +14 %", "22 % · ±0 %",
        "ideal bubble", "excess bubble",
        "ideal bubble 27 %", "layers.6 to layers.7", "787,968", "64.0 KiB", "grad norm",
    ):  # fmt: skip
        assert words in said
    tall = figure.run_figure(fake_pipeline(4, 120)).get_figheight()
    assert tall > figure.run_figure(fake_snapshot(4, 120)).get_figheight() + 2
    figure.run_png(replace(fake_pipeline(4), workers=empty_snapshot(4).workers))  # no step yet


@pytest.mark.parametrize("steps", [1, 2, 5, 120])
def test_steps_are_whole_numbers_and_the_throughput_has_room_above(steps: int) -> None:
    drawn = figure.run_figure(fake_snapshot(2, steps))
    drawn.draw_without_rendering()
    curves = {axes.get_title(loc="left"): axes for axes in drawn.axes}
    for title in ("Loss", "Throughput, samples/s"):
        axes = curves[title]
        low, high = axes.get_xlim()
        ticks = [value for value in axes.get_xticks() if low <= value <= high]
        assert ticks, title
        assert all(value % 1 == 0 for value in ticks), title
    axes = curves["Throughput, samples/s"]
    assert axes.get_ylim()[1] > max(axes.lines[0].get_ydata())
