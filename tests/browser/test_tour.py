"""The README's moving picture: one cell under two strategies, in a real JupyterLab.

`WORKBENCH_WRITE_DOCS=1 python -m pytest tests/browser/test_tour.py` writes docs/tour.gif again.
"""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

import pytest

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

pytestmark = [pytest.mark.browser, pytest.mark.cluster, pytest.mark.torch]

PICTURE = Path(__file__).parents[2] / "docs" / "tour.gif"
START = "%load_ext workbench\n%cluster start 3"
TRAIN = """%%distributed mirrored --steps 150 --inject slow=1:40ms
import torch, torch.nn as nn
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
wb.fit(model, wb.data.digits("train"), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.Adam(p, 1e-3), batch_size=96)"""
FRAME_S = 0.33
COLORS = 96
STILL_MS = 1500
WIDTH, HEIGHT = 900, 960
ENDED = """() => ![...document.querySelectorAll(".jp-InputPrompt")]
  .some(one => one.textContent.includes("*"))"""


class Film:
    """Screenshots with the time for which each is shown; a still page is shown for a moment."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self.frames: list[Any] = []
        self.durations_ms: list[int] = []

    def take(self, shown_s: float = FRAME_S) -> None:
        """Add the page as it is now; a page that did not change is shown for longer."""
        image = Image.open(io.BytesIO(self._page.screenshot())).convert("RGB")
        if self.frames and image.tobytes() == self.frames[-1].tobytes():
            self.durations_ms[-1] = min(self.durations_ms[-1] + int(shown_s * 1e3), STILL_MS)
        else:
            self.frames.append(image)
            self.durations_ms.append(int(shown_s * 1e3))

    def while_the_cell_runs(self) -> int:
        """Take frames until the cell has ended; return how many it took."""
        before = len(self.frames)
        limit = time.monotonic() + 120
        while not self._page.evaluate(ENDED):
            assert time.monotonic() < limit, "the run did not end"
            self.take()
            self._page.wait_for_timeout(FRAME_S * 1e3)
        return len(self.frames) - before

    def save(self, path: Path) -> None:
        """Write all frames as a GIF with one palette for all of them."""
        palette = self.frames[len(self.frames) // 2].quantize(COLORS)
        first, *rest = [one.quantize(palette=palette, dither=0) for one in self.frames]
        first.save(path, save_all=True, append_images=rest, duration=self.durations_ms, loop=0,
                   optimize=True)  # fmt: skip


def test_the_tour_shows_one_cell_under_two_strategies(notebook, tmp_path):
    nb = notebook("tour.ipynb", [START, TRAIN], width=WIDTH, height=HEIGHT)
    film = Film(nb.page)
    nb.page.locator(".jp-CodeCell").first.click()
    film.take(1.5)
    nb.command("notebook:run-cell-and-select-next")
    nb.page.wait_for_function(
        "() => document.querySelector('.jp-OutputArea-output')", timeout=60_000
    )
    nb.wait_idle()
    film.take(1.0)
    nb.page.locator(".jp-CodeCell").nth(1).locator(".cm-line").first.click()
    nb.command("notebook:run-cell")
    nb.page.wait_for_selector(".wb-steps", timeout=60_000)
    assert film.while_the_cell_runs() > 5
    film.take(3.0)
    nb.page.screenshot(path=str(tmp_path / "mirrored.png"))

    line = nb.page.locator(".jp-CodeCell").nth(1).locator(".cm-line").first
    line.click()
    nb.page.keyboard.press("Home")
    for _ in "%%distributed ":
        nb.page.keyboard.press("ArrowRight")
    nb.page.keyboard.press("Shift+Control+ArrowRight")
    film.take(0.7)
    nb.page.keyboard.type("parameter_server")
    film.take(1.2)
    nb.command("notebook:run-cell")
    nb.page.get_by_text("asynchronous data parallelism").wait_for(timeout=60_000)
    assert film.while_the_cell_runs() > 5
    film.take(3.0)
    nb.page.screenshot(path=str(tmp_path / "parameter_server.png"))

    found = tmp_path / "tour.gif"
    film.save(found)
    with Image.open(found) as picture:
        assert picture.n_frames == len(film.frames) > 10
    if os.environ.get("WORKBENCH_WRITE_DOCS"):
        PICTURE.write_bytes(found.read_bytes())
