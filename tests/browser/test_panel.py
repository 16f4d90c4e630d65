"""The panel in a real JupyterLab: what a teacher clicks, and what they see."""

import pytest
from panel_hands import opened, press, turn

pytestmark = [pytest.mark.browser, pytest.mark.cluster, pytest.mark.torch]

ENGINES = "count => document.querySelectorAll('.wbp-engine').length === count"
ALL_FINISHED = """count => {
  const states = [...document.querySelectorAll(".wbp-lineup .wb-state")];
  return states.length === count && states.every((s) => s.textContent === "finished");
}"""


def test_a_cluster_is_started_grown_looked_into_and_stopped(notebook, tmp_path):
    book = opened(notebook, "panel-cluster.ipynb")
    page = book.page
    count = page.get_by_label("Engines", exact=True).first
    for asked, words in (("1000000000", "from 1 to 256"), ("0", "from 1 to 256")):
        count.fill(asked)
        page.locator(".wbp-clusterrow .wbp-wrong").filter(has_text=words).wait_for()
        assert page.get_by_role("button", name="Start: ").is_disabled()
    count.fill("2")
    devices = page.get_by_label("Devices", exact=True).first
    devices.fill("cuda:9")
    press(book, "Start: ")
    page.locator(".wbp-notice.wbp-error").filter(has_text="cuda").wait_for()
    devices.fill("auto")
    press(book, "Start: ")
    page.wait_for_function(ENGINES, arg=2)
    count.fill("3")
    press(book, "Add engines")
    page.wait_for_function(ENGINES, arg=3)
    page.locator(".wbp-engine summary").first.click()
    page.wait_for_function("() => document.querySelector('.wbp-log').textContent.length > 1")
    book.screenshot(tmp_path / "cluster.png", ".wbp")
    press(book, "Stop cluster")
    page.wait_for_function(ENGINES, arg=0)


def test_two_strategies_are_picked_run_and_compared(notebook, tmp_path):
    book = opened(notebook, "panel-run.ipynb", height=2000)
    page = book.page
    page.get_by_label("Steps", exact=True).fill("60")
    page.get_by_role("checkbox", name="one_device", exact=True).click()
    book.screenshot(tmp_path / "choose.png", ".wbp")
    press(book, "Run: ")
    page.wait_for_function(ALL_FINISHED, arg=2, timeout=120_000)
    book.screenshot(tmp_path / "run.png", ".wbp")
    turn(book, "Compare")
    page.wait_for_selector(".wbp-table tbody tr >> nth=1")
    assert page.locator(".wbp-table tbody tr").count() == 2
    assert page.locator(".wbp-verdict").inner_text()
    book.screenshot(tmp_path / "compared.png", ".wbp")
