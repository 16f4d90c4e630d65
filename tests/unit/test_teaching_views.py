"""Pictures for teaching: well-formed, readable without a kernel, honest about what is unknown."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from history_rows import make_history, make_rows

from workbench import catalog
from workbench.catalog.diagrams import messages
from workbench.history.analysis import blame, counterfactual, step_picture
from workbench.notebook.compare import diagram
from workbench.views.explain.blame import BlameMatrix, WhatIfPicture
from workbench.views.explain.diagram import StepDrawing
from workbench.views.theme import KIND_COLORS, Picture

SVG = "{http://www.w3.org/2000/svg}"


def figures() -> list[Picture]:
    history = make_history(make_rows(30, 3, slow_rank=1, slow_s=0.05))
    drawn = messages("mirrored", 3)
    return [
        BlameMatrix(**vars(blame.blame(history))),
        WhatIfPicture(**vars(counterfactual.what_if(history))),
        StepDrawing(step_picture.step_picture(history, drawn, run="<base>")),
        diagram("parameter_server", 8, servers=2),
    ]


@pytest.mark.parametrize("picture", figures(), ids=lambda p: type(p).__name__)
def test_a_picture_is_svg_html_and_text(picture: Picture) -> None:
    bundle = picture._repr_mimebundle_()
    assert set(bundle) == {"text/html", "image/svg+xml", "text/plain"}
    root = ElementTree.fromstring(bundle["image/svg+xml"])
    assert root.get("role") == "img"
    named = root.get("aria-labelledby").split()
    texts = {e.get("id"): e.text for e in root if e.tag in (f"{SVG}title", f"{SVG}desc")}
    assert all(texts[name] for name in named)
    assert "<script" not in bundle["text/html"]
    assert repr(picture) == bundle["text/plain"]
    assert "prefers-color-scheme:dark" in bundle["image/svg+xml"]


@pytest.mark.parametrize("entry", catalog.CATALOG, ids=lambda e: f"{e.framework}-{e.name}")
def test_eight_workers_fit_a_phone_with_letters_that_can_be_read(entry: catalog.Strategy) -> None:
    picture = diagram(entry.name, 8, framework=entry.framework)
    root = ElementTree.fromstring(picture.svg())
    _, _, width, height = (float(v) for v in root.get("viewBox").split())
    assert width <= 380  # at 320 pixels a letter loses a sixth of its size
    for text in root.iter(f"{SVG}text"):
        assert float(text.get("font-size", "11")) >= 9
        assert 0 < float(text.get("x")) < width
        assert 0 < float(text.get("y")) < height
    arrows = {e.get("data-arrow") for e in root.iter(f"{SVG}g") if e.get("data-arrow")}
    assert arrows == {
        f"{p}.{a}" for p, phase in enumerate(picture.data.phases)
        for a in range(len(phase.arrows))
    }  # fmt: skip


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("name", KIND_COLORS)
@pytest.mark.parametrize("paper", ["#ffffff", "#111418"])
def test_colours_stand_out_from_light_and_dark_pages(name: str, paper: str) -> None:
    bright, dim = sorted((luminance(KIND_COLORS[name]), luminance(paper)), reverse=True)
    assert (bright + 0.05) / (dim + 0.05) >= 3


def test_what_was_not_measured_is_a_dash() -> None:
    rows = make_rows(5, 2)
    rows["sent_bytes"] = np.nan
    drawn = StepDrawing(step_picture.step_picture(make_history(rows), messages("mirrored", 2)))
    assert "worker 0 -> worker 1: – (" in drawn.text()
    assert "sent –" in drawn.text()
    rows["exposed_s"] = rows["ready_s"] = np.nan
    matrix = BlameMatrix(**vars(blame.blame(make_history(rows))))
    assert "not measured" in matrix.sentence()
    assert re.search(r"worker 0 +– +– +–", matrix.text())


def test_names_of_runs_are_text_not_markup() -> None:
    history = make_history(make_rows(5, 2))
    drawn = StepDrawing(
        step_picture.step_picture(history, messages("mirrored", 2), run="<script>x</script>")
    )
    assert "<script>" not in drawn.html()
