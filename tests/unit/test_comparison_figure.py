"""The picture of a comparison: what it shows, and that its words never lie on each other."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import combinations

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from any_page import illegible, is_on_paper, is_transparent
from figure_words import words_of
from made_up_runs import CASES, compared, eight, make_run
from matplotlib.figure import Figure

from workbench.history.analysis.comparison import compare
from workbench.views.comparison import picture
from workbench.views.drawing import clipped, ticks_alike, width_in, wrapped
from workbench.views.tables import comparison_table


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def panel(figure, title: str):
    return next(axes for axes in figure.axes if axes.get_title(loc="left") == title)


@pytest.mark.parametrize("case", CASES)
def test_words_never_overlap_and_stay_on_the_page(case: str) -> None:
    figure = picture.draw(compared(case))
    words = words_of(figure)
    assert len(words) > 15
    page = figure.bbox
    for text, box in words:
        assert box.x0 >= page.x0, text
        assert box.x1 <= page.x1, text
        assert box.y0 >= page.y0, text
        assert box.y1 <= page.y1, text
    for (one, a), (other, b) in combinations(words, 2):
        inside = min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
        assert not inside, (one, other)


def test_it_is_a_png_with_the_tables_text() -> None:
    comparison = compared("two")
    made = picture.comparison_bundle(comparison)
    assert set(made) == {"image/png", "text/plain"}
    assert made["text/plain"] == comparison_table(comparison).text()
    pixels = matplotlib.image.imread(io.BytesIO(made["image/png"]))
    assert pixels.shape[1] > 900
    assert pixels[..., :3].std() > 0.05


def test_loss_is_drawn_by_time_samples_and_steps() -> None:
    comparison = compared("two")
    figure = picture.draw(comparison)
    by = [panel(figure, title) for title in ("Loss by time", "by samples", "by steps")]
    for axes, field in zip(by, ("t_s", "samples", "step"), strict=True):
        assert len(axes.lines) == 2
        for line, named in zip(axes.lines, comparison.curves, strict=True):
            assert line.get_xdata()[-1] == getattr(named.curve, field)[-1]
    assert by[0].lines[0].get_color() != by[0].lines[1].get_color()


def test_seeds_are_lines_of_one_colour() -> None:
    figure = picture.draw(compared("seeds"))
    lines = panel(figure, "Loss by time").lines
    assert len(lines) == 9
    assert len({line.get_color() for line in lines}) == 3


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    comparison = compared("two")
    figure = picture.draw(comparison)
    rates = [bar.get_width() for bar in panel(figure, "Samples per second").patches]
    assert rates == pytest.approx([row.samples_per_s.mean for row in comparison.rows])
    ends = [
        bar.get_x() + bar.get_width() for bar in panel(figure, "Where a step's time goes").patches
    ]
    assert max(ends) == pytest.approx(1.0)
    labels = {text.get_text() for text in panel(figure, "Speed-up").texts}
    assert labels == {"1.00x", f"{comparison.rows[1].relative:.2f}x"}


def test_waits_and_the_bubble_are_hatched() -> None:
    figure = picture.draw(compared("eight"))
    hatches = {bar.get_hatch() for bar in panel(figure, "Where a step's time goes").patches}
    assert len(hatches - {None}) == 2


def test_panels_appear_where_there_is_something_to_show() -> None:
    many, few = (titles(picture.draw(compared(case))) for case in ("eight", "two"))
    assert any("Staleness" in title for title in many)
    assert not any("Staleness" in title for title in few)
    assert "Eval accuracy" in many
    alone = titles(picture.draw(compare([make_run("alone")])))
    assert "Speed-up" not in alone
    assert not any("Sent per" in title for title in alone)


def test_without_one_device_speed_is_relative_and_efficiency_is_left_out() -> None:
    figure = picture.draw(compared("without a baseline"))
    assert "Relative speed" in titles(figure)
    assert not {"Speed-up", "Efficiency"} & set(titles(figure))


def test_runs_without_measurements_say_so() -> None:
    comparison = compared("nothing at all")
    figure = picture.draw(comparison)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts.count("not measured") >= 3
    assert "0" not in {text for text in texts if text}
    assert len(picture.comparison_png(comparison)) > 1000


def test_what_stays_in_a_notebook_fits_white_and_dark_pages_and_files_have_paper() -> None:
    comparison = compare(eight())
    assert is_transparent(picture.comparison_bundle(comparison)["image/png"])
    assert is_on_paper(picture.comparison_png(comparison))
    assert illegible(picture.draw(comparison)) == []


def test_the_line_of_the_baseline_strikes_no_number_out() -> None:
    runs = [make_run("one_device", 1, compute_s=0.02, transfer_s=0.0)]
    runs += [make_run(f"run{k}", 2, compute_s=0.02, transfer_s=0.004 * k) for k in range(1, 6)]
    axes = panel(picture.draw(compare(runs)), "Speed-up")
    boxes = {round(t.xy[1]): t for t in axes.texts}
    renderer = axes.figure.canvas.get_renderer()
    rows = [line for line in axes.lines if list(line.get_xdata()) == [1, 1]]
    assert 0 < len(rows) < len(runs)
    at = axes.transData.transform((1, 0))[0]
    for line in rows:
        box = boxes[round(float(np.mean(line.get_ydata())))].get_window_extent(renderer)
        assert not box.x0 + 3 < at < box.x1 - 3


def test_many_runs_get_a_figure_that_fits_them() -> None:
    runs = [make_run(f"run{i}", 2, strategy="mirrored") for i in range(10)]
    tall = picture.draw(compare(runs)).get_size_inches()[1]
    short = picture.draw(compare(runs[:2])).get_size_inches()[1]
    assert tall > short + 2


def test_the_users_own_settings_neither_change_it_nor_are_changed() -> None:
    comparison = compare(eight()[:2])
    plain = picture.comparison_png(comparison)
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black"}):
        before = dict(matplotlib.rcParams)
        assert picture.comparison_png(comparison) == plain
        assert dict(matplotlib.rcParams) == before


def test_names_are_drawn_as_they_are_written() -> None:
    names = [text for text, _ in words_of(picture.draw(compared("long names")))]
    assert "costs $5 or $6 <b>&amp;</b> | `x` *y*" in names


def test_a_number_and_its_unit_stay_on_one_line() -> None:
    for most_in in np.arange(0.5, 4.0, 0.1):
        lines = wrapped("its 2 workers compute 9 % of the time, 21 ms a step", 10, most_in)
        assert not [line for line in lines if line.startswith(("%", "ms"))], most_in


def test_ticks_have_equally_many_decimals() -> None:
    axes = Figure().subplots()
    ticks_alike(axes, [1.79, 1.8, 1.81])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1.79", "1.80", "1.81"]
    ticks_alike(axes, [500.0, 1000.0])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["500", "1k"]


def test_words_are_cut_in_the_middle_and_wrapped_to_a_width() -> None:
    text = "a_very_long_name_that_ends_in_one"
    short = clipped(text, 9, 1.2)
    assert width_in(short, 9) <= 1.2
    assert short.startswith("a_v")
    assert short.endswith("one")
    assert clipped("short", 9, 1.2) == "short"
    lines = wrapped("several words in some lines", 9, 1.0)
    assert " ".join(lines) == "several words in some lines"
    assert len(lines) > 1
    assert np.all([width_in(line, 9) <= 1.0 for line in lines])


def test_losses_that_four_digits_do_not_tell_apart_lie_together():
    runs = [replace(make_run(name), final_loss=loss) for name, loss in (("a", 2.0), ("b", 2.0001))]
    axes = panel(picture.draw(compare(runs)), "Final loss")
    labels = [label.get_text() for label in axes.get_xticklabels() if label.get_text()]
    assert len(labels) == len(set(labels)) >= 2
