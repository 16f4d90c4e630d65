"""The picture of scaling: what it shows, and that its words never lie on each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from any_page import illegible, is_on_paper, is_transparent
from figure_words import words_of
from made_up_scaling import amdahl, run_of, strong

from workbench.history.analysis.scaling.curves import Scaling
from workbench.history.analysis.scaling.of_runs import scaling
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


def scaled_of(case: str, price: float | None = 2.5) -> Scaling:
    found = scaling(CASES[case](), price=price)
    assert found is not None
    return found


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("case", CASES)
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
