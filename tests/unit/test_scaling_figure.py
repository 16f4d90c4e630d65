"""The picture of scaling: what it shows, and that its words never lie on each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from any_page import illegible, is_on_paper, is_transparent
from figure_words import words_of
from made_up_scaling import amdahl, run_of, strong
from matplotlib.collections import PolyCollection
from predicted_runs import scaled_runs, summary_of

from workbench.history.analysis.scaling.curves import Scaling
from workbench.history.analysis.scaling.of_runs import scaling
from workbench.notebook.scaling import scaled
from workbench.views.drawing import own_style
from workbench.views.scaling import picture
from workbench.views.scaling.published import curves
from workbench.views.theme import PAPER


def failed_one() -> list[Any]:
    runs = strong()
    runs[2] = run_of(4, amdahl(4), state="failed", steps=0)
    return runs


def two_plans() -> list[Any]:
    more = [
        replace(run_of(n, amdahl(n, 0.5), strategy="parameter_server"),
                options={"a_rather_long_name": f"{'x' * 60}"})
        for n in (2, 4, 8)
    ]  # fmt: skip
    return [*strong(), *more, *(run_of(n, 0.3, strategy="sharded") for n in (2, 4))]


def wide() -> list[Any]:
    return strong((2, 4, 8, 16, 32, 64))


CASES: dict[str, Any] = {
    "strong": strong,
    "two counts": lambda: strong((2,)),
    "failed in the middle": failed_one,
    "several plans": two_plans,
    "to 64 workers": wide,
    "without one worker": lambda: [run_of(n, amdahl(n)) for n in (2, 4, 8)],
    "slower": lambda: [run_of(1, 0.1), run_of(2, 0.2), run_of(4, 0.3)],
    "ends close together": lambda: [
        run_of(1, 0.1, strategy="one_device"),
        *(
            run_of(n, amdahl(n) * (1 + 0.01 * k), strategy=name)
            for k, name in enumerate(("mirrored", "sharded", "central_storage", "local_sgd"))
            for n in (2, 4)
        ),
    ],
    "nothing": lambda: [run_of(n, 0.1, state="failed", steps=0) for n in (1, 2)],
}


PREDICTED: dict[str, Any] = {
    "predicted": scaled_runs,
    "predicted from all there is": lambda: scaled_runs((2,)),
    "predicted to 32, all of it run": lambda: scaled_runs((2, 4, 8, 16, 32)),
    "predicted without one worker": lambda: scaled_runs((2, 4, 8))[1:],
    "predicted weak": lambda: scaled_runs((2, 4, 8), weak=True),
    "one predicted, one not": lambda: [
        *scaled_runs((2, 4)),
        *scaled_runs((2, 4), steps=12, name="short", compress="fp16")[1:],
    ],
    "none predicted": lambda: scaled_runs((2, 4), steps=12),
}


def predicted_of(case: str) -> Scaling:
    runs = PREDICTED[case]()
    return scaled([summary_of(run) for run in runs], price=2.5, runs=runs).scaling


def scaled_of(case: str, price: float | None = 2.5) -> Scaling:
    if case in PREDICTED:
        return predicted_of(case)
    found = scaling(CASES[case](), price=price)
    assert found is not None
    return found


PAGES = [*((case, beside) for case in CASES for beside in (False, True)),
         *((case, False) for case in PREDICTED)]  # fmt: skip


@pytest.mark.parametrize(("case", "beside"), PAGES)
def test_words_never_overlap_and_stay_on_the_page(case: str, beside: bool) -> None:
    with own_style({}):
        figure = picture.draw(scaled_of(case), curves() if beside else ())
        words = words_of(figure)
    assert len(words) > 8
    page = figure.bbox
    for text, box in words:
        assert box.x0 >= 0, text
        assert box.x1 <= page.width, text
        assert box.y0 >= 0, text
        assert box.y1 <= page.height, text
    for (one, a), (other, b) in combinations(words, 2):
        apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0
        assert apart, (one, other)


def test_it_is_legible_on_light_and_dark_pages() -> None:
    found = scaled_of("several plans")
    assert illegible(picture.draw(found, curves())) == []
    assert is_transparent(picture.scaling_png(found, PAPER["any"]))
    assert is_on_paper(picture.scaling_png(found))


def test_predicted_curves_are_legible_on_light_and_dark_pages() -> None:
    assert illegible(picture.draw(scaled_of("one predicted, one not"))) == []


def rings(axes: Any) -> list[Any]:
    """Lines of markers without a face: what was predicted."""
    return [line for line in axes.lines if line.get_markerfacecolor() == "none"]


def bands(axes: Any) -> list[Any]:
    return [one for one in axes.collections if isinstance(one, PolyCollection)]


def test_a_predicted_curve_is_rings_in_a_band_from_the_run_it_was_predicted_from_on() -> None:
    found = scaled_of("predicted")
    (curve,) = found.curves
    figure = picture.draw(found)
    for axes, per in ((figure.axes[0], lambda n: 1), (figure.axes[1], lambda n: n)):
        (line,) = rings(axes)
        assert list(line.get_xdata()) == [4, 8, 16]
        expected = [one.speedup / per(one.workers) for one in curve.ahead]
        assert list(line.get_ydata()) == pytest.approx(expected)
        (band,) = bands(axes)
        corners = band.get_paths()[0].vertices
        assert corners[:, 0].min() == 2
        last = curve.ahead[-1]
        at_last = corners[corners[:, 0] == 16][:, 1]
        assert (at_last.min(), at_last.max()) == pytest.approx(
            (last.low / per(16), last.high / per(16))
        )


@pytest.mark.parametrize("case", [*CASES, "none predicted"])
def test_what_is_not_predicted_has_no_ring_no_band_and_no_shade(case: str) -> None:
    for axes in picture.draw(scaled_of(case)).axes[:2]:
        assert (rings(axes), bands(axes), list(axes.patches)) == ([], [], [])


@pytest.mark.parametrize("case", PREDICTED)
def test_what_was_measured_keeps_half_of_the_axis(case: str) -> None:
    found = scaled_of(case)
    axes = picture.draw(found).axes[0]
    ends = [(count, 1) for count in (min(found.workers), max(found.workers), max(found.axis))]
    least, most, last = axes.transData.transform(ends)[:, 0]
    assert most - least >= 0.499 * (last - least)
    shades = axes.patches
    assert bool(shades) == (last > most)
    assert all(axes.transData.transform((one.get_x(), 1))[0] > most for one in shades)


def test_the_keys_say_what_rings_are_and_why_there_are_none() -> None:
    said = [text.get_text() for text in picture.draw(scaled_of("one predicted, one not")).texts]
    assert any("2 workers" in words for words in said)
    assert any(
        words.startswith("Not predicted (mirrored compress=fp16): the run has too few steps")
        for words in said
    )
    said = [text.get_text() for text in picture.draw(scaled_of("none predicted")).texts]
    assert any(words.startswith("Not predicted: the run has too few steps") for words in said)
    assert not any("Circles" in words for words in said)


def test_words_of_the_higher_curve_stand_above_those_of_the_lower() -> None:
    runs = [*scaled_runs((2, 4)), *scaled_runs((2, 4), seed=9, name="half", compress="fp16")[1:]]
    found = scaled([summary_of(run) for run in runs], runs=runs).scaling
    for axes in picture.draw(found).axes[:2]:
        said = [text for text in axes.texts if text.get_weight() == "bold"]
        assert len(said) == 2
        points = sorted(said, key=lambda text: text.xy[1])
        words = sorted(said, key=lambda text: text.get_window_extent().y0)
        assert points == words


def dotted(figure: Any) -> list[Any]:
    return [line for line in figure.axes[0].lines if line.get_linestyle() == ":"]


def test_a_law_is_drawn_as_far_as_was_measured_and_only_where_it_fits() -> None:
    (law,) = dotted(picture.draw(scaled_of("strong")))
    assert (min(law.get_xdata()), max(law.get_xdata())) == pytest.approx((1, 8))
    for case in ("slower", "two counts", "without one worker", "nothing"):
        assert dotted(picture.draw(scaled_of(case))) == []


def test_a_missing_number_of_workers_is_marked_and_bridged_by_no_line() -> None:
    figure = picture.draw(scaled_of("failed in the middle"))
    words = [text.get_text() for text in figure.axes[0].texts]
    assert "missing" in words
    line = next(one for one in figure.axes[0].lines if len(one.get_xdata()) == 4)
    assert [value == value for value in line.get_ydata()] == [True, True, False, True]


def test_costs_are_drawn_where_there_is_a_price() -> None:
    titles = [axes.get_title(loc="left") for axes in picture.draw(scaled_of("strong")).axes]
    assert titles[-1] == "Cost of 1M samples"
    free = picture.draw(scaled_of("strong", price=None))
    assert len(free.axes) == len(titles) - 1
