"""A line with several numbers of workers in a real JupyterLab: the figure, and the panel's tab."""

import re

import pytest
from panel_hands import OVERLAPS, opened, press, turn

pytestmark = [pytest.mark.browser, pytest.mark.cluster, pytest.mark.torch]

START = "%load_ext workbench\nimport workbench as wb\n%cluster start 2"
SWEEP = """%%distributed one_device,mirrored -n 1,2,3 --price 2.5
import time, torch
from torch import nn
def step(model, batch):
    x, y = batch
    time.sleep(0.01 + 0.04 * len(x) / 60)
    return nn.functional.cross_entropy(model(x), y)
wb.fit(nn.Linear(8, 2), wb.data.synthetic(600, shape=(8,), classes=2), step_fn=step,
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=60, steps=20)
"""
BESIDE = "wb.compare('one_device', 'mirrored-n2', 'mirrored-n3').scaling().figure(published=True)"


def test_scaling_is_seen_below_the_cell_and_in_the_panel(notebook, tmp_path):
    cells = [START, SWEEP, BESIDE, "wb.panel()"]
    book = notebook("scaling.ipynb", cells, height=2400)
    book.run_all()
    page = book.page
    page.wait_for_selector(".wbp .wbp-top button", timeout=240_000)
    turn(book, "Scaling")
    page.wait_for_selector(".wbp-scaling .wbp-table tbody tr", timeout=60_000)
    verdict = page.locator(".wbp-scaling .wbp-verdict").inner_text()
    assert "one worker (one_device)" in verdict
    assert page.locator(".wbp-scaling .wbp-chart circle").count() == 6
    assert page.locator(".wbp-scaling .wbp-table tbody tr").count() == 4
    page.get_by_label("Published curves").check()
    page.wait_for_selector(".wbp-dashkey")
    page.get_by_label("Price of a worker-hour").fill("nothing")
    page.get_by_label("Price of a worker-hour").blur()
    page.get_by_text("price must be a number above 0.").wait_for()
    page.get_by_label("Price of a worker-hour").fill("2.5")
    page.get_by_label("Price of a worker-hour").blur()
    page.get_by_role("columnheader", name="cost").wait_for()
    for width in (1280, 800):
        page.set_viewport_size({"width": width, "height": 2400})
        page.wait_for_timeout(500)
        assert page.evaluate(OVERLAPS) == []
        book.screenshot(tmp_path / f"panel-{width}.png", ".wbp")
        for at in range(2):
            picture = page.locator(".jp-OutputArea-output img").nth(at)
            picture.scroll_into_view_if_needed()
            page.screenshot(path=tmp_path / f"figure-{at}-{width}.png")
        page.locator(".wbp-scaling").scroll_into_view_if_needed()
    with page.expect_download() as waiting:
        page.locator(".wbp-scaling").get_by_role("button", name=re.compile("^CSV")).click()
    lines = waiting.value.path().read_text().splitlines()
    assert lines[0].startswith("curve,strategy,framework,scaling,workers")
    assert len(lines) == 5
    book.dark()
    page.wait_for_timeout(1000)
    book.screenshot(tmp_path / "panel-dark.png", ".wbp")
    page.set_viewport_size({"width": 1280, "height": 2400})
    page.wait_for_timeout(500)
    page.locator(".jp-OutputArea-output img").first.scroll_into_view_if_needed()
    page.screenshot(path=tmp_path / "figure-dark.png")
    pictures = [o for o in book.outputs() if "image/png" in o.get("data", {})]
    assert len(pictures) >= 2
    texts = ["".join(o["data"].get("text/plain", "")) for o in pictures]
    assert any("should not" in t or "The fastest" in t for t in texts)


ASLEEP = """@wb.recipe
def asleep():
    import time, torch
    from torch import nn
    def step(model, batch):
        x, y = batch
        time.sleep(0.02 + 0.06 * len(x) / 60)
        return nn.functional.cross_entropy(model(x), y)
    wb.fit(nn.Linear(8, 2), wb.data.synthetic(600, shape=(8,), classes=2), step_fn=step,
           optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=60, steps=40)
wb.panel()"""
ALL_FINISHED = """count => {
  const states = [...document.querySelectorAll(".wbp-lineup .wb-state")];
  return states.length === count && states.every((s) => s.textContent === "finished");
}"""


def test_the_panel_starts_a_sweep_and_shows_it_with_what_was_predicted(notebook, tmp_path):
    book = opened(notebook, "sweep.ipynb", cells=[START, ASLEEP], height=2000)
    page = book.page
    page.get_by_role("radio", name="asleep").check()
    page.get_by_role("checkbox", name="one_device", exact=True).click()
    workers = page.get_by_label("Workers", exact=True)
    workers.fill("1,2,2")
    page.get_by_text("same value twice").first.wait_for()
    book.screenshot(tmp_path / "wrong.png", ".wbp")
    assert page.locator(".wbp-lineup .wb-state").count() == 0
    workers.fill("1,2,4")
    page.locator(".wbp-total").filter(has_text="4 runs of asleep").wait_for()
    book.screenshot(tmp_path / "choose.png", ".wbp")
    press(book, "Run: ")
    page.wait_for_function(ALL_FINISHED, arg=4, timeout=240_000)
    turn(book, "Scaling")
    page.locator(".wbp-scaling .wbp-ringkey").wait_for(timeout=60_000)
    charts = page.locator(".wbp-scaling .wbp-chart")
    for at in range(2):
        assert charts.nth(at).locator("circle:not(.wbp-ring)").count() == 3
        assert charts.nth(at).locator("circle.wbp-ring").count() == 3
        assert charts.nth(at).locator("rect.wbp-notrun").count() == 1
    assert page.locator(".wbp-scaling .wbp-table tbody tr").count() == 6
    for mode in ("light", "dark"):
        book.dark(mode == "dark")
        for width in (1280, 800):
            page.set_viewport_size({"width": width, "height": 2000})
            page.wait_for_timeout(800)
            assert (mode, width, page.evaluate(OVERLAPS)) == (mode, width, [])
            book.screenshot(tmp_path / f"predicted-{mode}-{width}.png", ".wbp")
    page.get_by_label("Predicted curves").uncheck()
    page.locator(".wbp-scaling .wbp-ring").first.wait_for(state="detached")
