"""The panel's Understand tab in a real JupyterLab: a class looks at one step after the other."""

import re

import pytest
from panel_hands import amiss, be_wide, opened, press, turn

pytestmark = [pytest.mark.browser, pytest.mark.cluster, pytest.mark.torch]

START = "%load_ext workbench\nimport workbench as wb\n%cluster start 2"
TRAIN = """%%distributed mirrored --background --plot off --steps 100000 --inject slow=1:40ms
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
wb.fit(model, wb.data.synthetic(4096, shape=(64,), classes=10), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=32)
"""
STEP = r"""() => {
  const words = document.querySelector(".wbp-lesson .wbp-picture")?.textContent ?? "";
  return Number(/step (\d+) of/.exec(words)?.[1] ?? -1);
}"""
# The picture on show is that of the last step there is, and no other is under way.
SETTLED = f"""() => {{
  const last = document.querySelector(".wbp-teaching input[type=number]").max;
  const state = document.querySelector(".wbp-e-state")?.textContent;
  return state === "paused" && last !== "" && ({STEP})() === Number(last);
}}"""


def test_one_step_at_a_time_who_waited_what_if_and_can_it_be_believed(notebook, tmp_path):
    book = opened(notebook, "teach.ipynb", cells=[START, TRAIN, "wb.panel()"], height=1900)
    page, lessons = book.page, ".wbp-teaching"
    turn(book, "Understand")
    page.wait_for_selector(".wbp-lesson svg")
    press(book, "Pause: ")
    step = page.get_by_role("button", name="One step")
    step.wait_for()
    for _ in range(2):
        page.wait_for_function(SETTLED)
        before = page.evaluate(STEP)
        step.click()
        page.wait_for_function(f"(step) => ({STEP})() === step + 1", arg=before)
    blame = page.get_by_role("figure", name="Who waited for whom")
    blame.filter(has_text=re.compile("waited .* in total for worker 1")).wait_for()
    ghost = page.get_by_role("figure", name="What if one worker")
    ghost.filter(has_text="What if worker 1 were as fast").wait_for()
    ghost.get_by_role("combobox").select_option("0")
    ghost.filter(has_text="What if worker 0 were as fast").wait_for()
    page.get_by_label("Step number", exact=True).fill("2")
    page.keyboard.press("Tab")
    page.wait_for_function(f"() => ({STEP})() === 2")
    book.screenshot(tmp_path / "teach.png", ".wbp")

    press(book, "Stop: ", ".wbp-queue")
    press(book, "Check the measurement", lessons)  # once it can be pressed: the run is over
    read = page.locator(".wbp-read table")
    read.wait_for(timeout=60_000)
    assert re.search(r"[\d.]+ ± [\d.]+ ms\s+50 ± 5 ms", read.inner_text())
    ghost.filter(has_text="45 steps would").wait_for()  # of the calibration's run, to its last step
    for width in (1240, 420, 1000):
        be_wide(page, width)
        assert (width, amiss(page)) == (width, [])
        book.screenshot(tmp_path / f"calibrated-{width}.png", ".wbp")
    book.dark()
    page.wait_for_timeout(1000)
    book.screenshot(tmp_path / "calibrated-dark.png", ".wbp")
