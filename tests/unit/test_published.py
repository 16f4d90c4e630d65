"""Published curves: each says where it is from, and is what its numbers give."""

from __future__ import annotations

import io
import re

import pytest
from made_up_scaling import strong
from matplotlib.image import imread

from workbench.errors import PlanError
from workbench.notebook.scaling import scaled
from workbench.views.scaling.published import chosen, curves, published_table

NUMBERS = {
    "bert-ddp": [(1, 122 / 122), (2, 115 / 122), (4, 111 / 122), (8, 110 / 122), (16, 80 / 122)],
    "faster-rcnn-horovod": [(1, 1), (8, 25 / 5 / 8), (16, 41 / 5 / 16), (32, 80 / 5 / 32)],
    "resnet101-horovod": [(1, 1), (512, 0.90)],
    "vgg16-horovod": [(1, 1), (128, 0.79), (512, 0.68)],
    "resnet50-caffe2": [(8, 1), (256, 0.90)],
    "gpt2-megatron-weak": [(1, 1), (8, 0.77), (512, 0.74)],
    "gpt2-megatron-strong": [(1, 1), (2, 1.64 / 2), (4, 2.34 / 4), (8, 2.98 / 8)],
}
"""Efficiencies, worked out here from the numbers of the texts."""


def test_every_curve_is_what_the_published_numbers_give() -> None:
    assert {one.key for one in curves()} == set(NUMBERS)
    for one in curves():
        assert [workers for workers, _ in one.points] == [n for n, _ in NUMBERS[one.key]]
        assert [value for _, value in one.points] == pytest.approx(
            [value for _, value in NUMBERS[one.key]], abs=6e-5
        )
        assert one.points[0] == (one.relative_to, 1.0)


def test_every_curve_says_where_it_is_from() -> None:
    for one in curves():
        assert re.fullmatch(r"https://(github\.com|arxiv\.org)/\S+", one.url)
        assert one.source
        assert one.hardware
        assert re.search(r"\d", one.made_from)
        assert 2015 < one.year < 2027
    shown = published_table(curves())
    assert len(shown.rows) == len(curves())
    assert any("issue 17159" in row[-1] for row in shown.rows)


def test_curves_are_drawn_beside_ones_own_on_request_only() -> None:
    shown = scaled(strong())
    assert shown.figure().published == ()
    assert [one.key for one in shown.figure("bert-ddp").published] == ["bert-ddp"]
    assert len(shown.figure(True).published) == len(curves())
    plain, beside = (
        imread(io.BytesIO(picture._repr_mimebundle_()["image/png"]))
        for picture in (shown.figure(), shown.figure(published=["vgg16-horovod"]))
    )
    assert beside.shape[0] > 1.2 * plain.shape[0]
    svg = shown.figure(published=["vgg16-horovod"])
    assert svg.published[0].name == "VGG-16, Horovod"


def test_a_curve_that_is_none_is_named() -> None:
    with pytest.raises(PlanError, match=r"bert-ddp"):
        chosen("bert")
    with pytest.raises(PlanError, match="WB-PLAN-280"):
        chosen([17159])  # type: ignore[list-item]
