"""The panel in a real JupyterLab: what a teacher clicks, and what they see."""

import pytest
from panel_hands import opened, press, turn

pytestmark = [pytest.mark.browser, pytest.mark.cluster, pytest.mark.torch]

ENGINES = "count => document.querySelectorAll('.wbp-engine').length === count"


def test_a_cluster_is_started_grown_looked_into_and_stopped(notebook, tmp_path):
    book = opened(notebook, "panel-cluster.ipynb")
    page = book.page
    press(book, "Start")
    page.wait_for_function(ENGINES, arg=2)
    page.get_by_label("Engines", exact=True).first.fill("3")
    page.keyboard.press("Tab")
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
    page.get_by_label("Steps", exact=False).first.fill("60")
    page.keyboard.press("Tab")
    page.locator(".wbp-strategies").get_by_text("one_device", exact=True).first.click()
    book.screenshot(tmp_path / "choose.png", ".wbp")
    page.get_by_role("button", name="Run: Train what is picked").click()
    page.wait_for_selector(".wbp-queue li >> nth=1", timeout=60_000)
    page.wait_for_function(
        """() => { const states = [...document.querySelectorAll('.wbp-queue .wb-state')];
        return states.length === 2 && states.every((s) => s.textContent === 'finished'); }""",
        timeout=120_000,
    )
    book.screenshot(tmp_path / "run.png", ".wbp")
    turn(book, "Compare")
    page.wait_for_selector(".wbp-table tbody tr")
    assert page.locator(".wbp-table tbody tr").count() == 2
    book.screenshot(tmp_path / "compared.png", ".wbp")
