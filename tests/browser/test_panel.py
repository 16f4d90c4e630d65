"""The panel in a real JupyterLab: what a teacher clicks, and what they see."""

import pytest
from panel_hands import amiss, be_wide, opened, press, turn

pytestmark = [pytest.mark.browser, pytest.mark.cluster, pytest.mark.torch]

ENGINES = "count => document.querySelectorAll('.wbp-engine').length === count"
NAME = """() => {
  const e = document.activeElement;
  return e.ariaLabel || e.labels?.[0]?.textContent || e.textContent;
}"""
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
    for width in (632, 1100):  # of a window of 800 px, and of a wide one
        be_wide(page, width)
        tops = [
            page.locator(".wbp-clusterrow").get_by_role("button", name=name).bounding_box()["y"]
            for name in ("Add engines", "Restart: ", "Stop cluster")
        ]
        assert (width, len(set(tops))) == (width, 1)
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
    page.get_by_label("Engines", exact=True).first.fill("3")
    page.locator(".wbp-total").filter(has_text="Run starts 3").wait_for()
    book.screenshot(tmp_path / "choose.png", ".wbp")
    press(book, "Run: ")
    page.wait_for_function(ENGINES, arg=3, timeout=60_000)
    page.wait_for_function(ALL_FINISHED, arg=2, timeout=120_000)
    book.screenshot(tmp_path / "run.png", ".wbp")
    turn(book, "Compare")
    page.wait_for_selector(".wbp-table tbody tr >> nth=1")
    assert page.locator(".wbp-table tbody tr").count() == 2
    assert page.locator(".wbp-verdict").inner_text()
    for width in (1240, 420):
        be_wide(page, width)
        assert (width, amiss(page)) == (width, [])
        book.screenshot(tmp_path / f"compared-{width}.png", ".wbp")


def test_a_hand_that_has_only_keys_starts_picks_runs_and_stops(notebook):
    book = opened(notebook, "panel-keys.ipynb", height=2000)
    page, keys = book.page, book.page.keyboard

    def go_to(name):
        """Tab on until the control of this name has the focus."""
        for _ in range(90):
            if page.evaluate(NAME).startswith(name):
                return
            keys.press("Tab")
        raise AssertionError(f"Tab never comes to {name}, but to {page.evaluate(NAME)}")

    page.get_by_label("Engines", exact=True).first.focus()
    keys.press("ArrowDown")  # one engine
    go_to("Start")
    keys.press("Enter")
    page.wait_for_function(ENGINES, arg=1)
    go_to("Choose")
    go_to("one_device")
    keys.press("Space")
    page.locator(".wbp-card.wbp-on").filter(has_text="one_device").wait_for()
    go_to("mirrored")
    keys.press("Space")
    page.locator(".wbp-total").filter(has_text=": one_device on 1 worker").wait_for()
    go_to("Steps")
    keys.type("100000")
    keys.press("Enter")
    page.get_by_role("button", name="Run: ").focus()
    keys.press("Space")
    page.locator(".wbp-tabs [aria-selected=true]").filter(has_text="Run").wait_for()
    page.wait_for_selector(".wbp-live canvas", timeout=60_000)
    page.locator(".wbp-engine summary").first.click()
    for ends in ("Stop cluster", "Restart: Replace engine 0"):
        page.get_by_role("button", name=ends).press("Enter")
        page.get_by_role("alertdialog").filter(has_text="lost: run").wait_for()
        assert page.evaluate(NAME).startswith("Cancel")
        keys.press("Enter")
    go_to("Stop: Stop the run")
    keys.press("Enter")
    page.locator(".wbp-live .wb-state", has_text="stopped").wait_for()
    go_to("Run")
    page.locator(".wbp-tabs [aria-selected=true]").focus()
    keys.press("ArrowRight")
    keys.press("End")
    assert page.evaluate(NAME) == "Understand"
