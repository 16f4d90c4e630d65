"""The panel's Compare tab in a real JupyterLab, and what is left of it in the saved notebook."""

import base64
import re

import pytest
from panel_hands import opened, turn

pytestmark = [pytest.mark.browser, pytest.mark.cluster, pytest.mark.torch]

START = "%load_ext workbench\nimport workbench as wb\n%cluster start 2"
TRAIN = """%%distributed one_device,mirrored,parameter_server --seeds 2 --plot off
import torch
from torch import nn
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
wb.fit(model, wb.data.digits("train"), loss=nn.CrossEntropyLoss(), batch_size=128, steps=40,
       optimizer=lambda p: torch.optim.SGD(p, 0.1), eval_data=wb.data.digits("test"),
       metrics={"accuracy": lambda out, y: (out.argmax(1) == y).float().mean()})
"""
CUT = """() => [...document.querySelectorAll(".wbp-barrow > span")]
  .filter((name) => name.scrollWidth > name.clientWidth).map((name) => name.textContent)"""


@pytest.mark.parametrize("front", ["lab", "notebook"])
def test_runs_are_compared_sorted_exported_and_kept(notebook, tmp_path, front):
    cells = [START, TRAIN, "wb.panel()"]
    book = opened(notebook, "panel-compare.ipynb", cells=cells, height=1900, front=front)
    turn(book, "Compare")
    page = book.page
    page.wait_for_selector(".wbp-table tbody tr", timeout=60_000)
    assert page.locator(".wbp-verdict").inner_text()
    assert page.locator(".wbp-chart path").count() == 6
    page.get_by_role("radio", name="by samples").click()
    book.screenshot(tmp_path / "compare.png", ".wbp")
    page.locator(".wbp-table").get_by_role("button", name="samples/s").click()
    column = [t.split("\t") for t in page.locator(".wbp-table").inner_text().splitlines()]
    assert "samples/s ↓" in column[0]
    with page.expect_download() as waiting:
        page.get_by_role("button", name=re.compile("^CSV")).click()
    lines = waiting.value.path().read_text().splitlines()
    assert lines[0].startswith("run,strategy,framework")
    assert len(lines) == 4
    book.dark()
    page.wait_for_timeout(1000)
    book.screenshot(tmp_path / "compare-dark.png", ".wbp")
    for width in (1280, 800):
        page.set_viewport_size({"width": width, "height": 1900})
        page.wait_for_timeout(300)
        assert (width, page.evaluate(CUT)) == (width, [])
    page.set_viewport_size({"width": 520, "height": 1900})
    page.wait_for_timeout(500)
    book.screenshot(tmp_path / "compare-narrow.png", ".wbp")
    kept = [o["data"]["text/html"] for o in book.outputs() if "text/html" in o.get("data", {})]
    (kept,) = [text for text in map("".join, kept) if "Kept" in text]
    picture = re.search('data:image/png;base64,([^"]+)"', kept)[1]
    assert base64.b64decode(picture).startswith(b"\x89PNG")
