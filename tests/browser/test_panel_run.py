"""The panel's Run tab in a real JupyterLab: the live dashboard, and faults while it trains."""

import re

import pytest
from panel_hands import opened, press, slide, turn

pytestmark = [pytest.mark.browser, pytest.mark.cluster, pytest.mark.torch]

TRAIN = """%%distributed mirrored --background --plot off --steps 100000
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
wb.fit(model, wb.data.synthetic(4096, shape=(64,), classes=10), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=32)
"""


FAILS = """%%distributed mirrored --background --plot off --name fails
raise ValueError("mine")
"""


def test_a_run_that_failed_before_its_first_step_shows_why_and_no_empty_charts(notebook, tmp_path):
    start = "%load_ext workbench\nimport workbench as wb\n%cluster start 2"
    book = opened(notebook, "panel-fails.ipynb", cells=[start, FAILS, "wb.panel()"], height=1200)
    turn(book, "Run")
    page = book.page
    page.locator(".wbp-live .wb-state", has_text="failed").wait_for()
    page.locator(".wbp-failure summary").filter(has_text="ValueError: mine").wait_for()
    page.locator(".wbp-live .wb-none").wait_for()
    assert not any(one.is_visible() for one in page.locator(".wbp-live canvas").all())
    book.screenshot(tmp_path / "failed.png", ".wbp")


@pytest.mark.parametrize("front", ["lab", "notebook"])
def test_a_worker_is_slowed_in_mid_run_and_the_others_wait_for_it(notebook, tmp_path, front):
    cells = ["%load_ext workbench\nimport workbench as wb\n%cluster start 2", TRAIN, "wb.panel()"]
    book = opened(notebook, "panel-faults.ipynb", cells=cells, height=1700, front=front)
    turn(book, "Run")
    book.page.wait_for_selector(".wbp-live canvas")
    slide(book, "worker 1", 10)  # 50 ms
    book.page.wait_for_function(
        "() => /worker 1|rank 1/i.test(document.querySelector('.wb-slow')?.textContent ?? '')"
    )
    book.page.wait_for_function(WAITED)  # what was asked for, read back from the chart's label
    assert book.page.locator(".wbp-same").inner_text() == "--inject slow=1:50ms"
    book.screenshot(tmp_path / "faults.png", ".wbp")
    book.dark()
    book.page.wait_for_timeout(1000)
    book.screenshot(tmp_path / "faults-dark.png", ".wbp")
    press(book, "Remove all")
    book.page.wait_for_function("() => document.querySelector('.wbp-same').hidden")
    buttons = book.page.locator(".wbp").get_by_role("button")
    for name in ("Pause", "Stop: "):  # one of each, on every tab
        assert buttons.filter(has_text=re.compile(f"^{name.rstrip(': ')}$")).count() == 1
    press(book, "Stop: ")
    book.page.wait_for_function(
        "() => document.querySelector('.wbp-live .wb-state').textContent === 'stopped'"
    )


WAITED = r"""() => {
  const label = document.querySelector(".wbp-live [aria-label*='median wait']")?.ariaLabel ?? "";
  const ms = Number(/rank 0[^.]*?median wait ([\d.]+) ms/.exec(label)?.[1]);
  return 45 <= ms && ms <= 55;
}"""
