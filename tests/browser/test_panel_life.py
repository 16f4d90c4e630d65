"""What the panel outlives: a second one, deaths of workers and clusters, a reload, a new kernel."""

import os
import re
import signal

import pytest
from panel_hands import OPEN, opened, press, turn

pytestmark = [pytest.mark.browser, pytest.mark.cluster, pytest.mark.torch]

PID = "import os\nopen('kernel.pid', 'w').write(str(os.getpid()))\n"
STATE = "state => document.querySelector('.wbp-live .wb-state')?.textContent === state"
ALL = """state => {
  const states = [...document.querySelector(".wbp").querySelectorAll(".wbp-e-state")];
  return states.length === 2 && states.every((s) => s.dataset.state === state);
}"""
LONG = "100000"
RESTART = "() => { void jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart(); }"


def run_long(book):
    """Press Run with so many steps that it goes on until somebody ends it."""
    page, panel = book.page, book.page.locator(".wbp").first
    turn(book, "Choose")
    panel.get_by_label("Steps", exact=True).fill(LONG)
    panel.locator(".wbp-total").filter(has_text="digits_mlp").wait_for()
    press(book, "Run: ")
    page.wait_for_function(STATE, arg="running", timeout=60_000)
    page.wait_for_selector(".wbp-live canvas")


def engine_pids(book):
    """Process ids of the engines that train, as the panel tells them."""
    book.page.wait_for_function(ALL, arg="training")
    told = (
        book.page.locator(".wbp")
        .first.locator(".wbp-e-id")
        .evaluate_all("(all) => all.map((one) => one.title)")
    )
    return [int(re.search(r"process (\d+)", text)[1]) for text in told]


def test_two_panels_show_the_same_and_survive_the_deaths_of_worker_and_cluster(notebook, tmp_path):
    book = opened(notebook, "life.ipynb", cells=[OPEN, "wb.panel()"], height=2600)
    page = book.page
    panels = page.locator(".wbp")
    page.wait_for_selector(".wbp >> nth=1")
    first, second = panels.nth(0), panels.nth(1)
    first.get_by_role("checkbox", name="local_sgd", exact=True).click()
    second.locator(".wbp-card.wbp-on").filter(has_text="local_sgd").wait_for()
    second.get_by_role("checkbox", name="local_sgd", exact=True).click()
    first.locator(".wbp-card:not(.wbp-on)").filter(has_text="local_sgd").wait_for()
    run_long(book)
    second.get_by_role("tab", name="Run").click()
    second.locator(".wbp-live .wb-state", has_text="running").wait_for()

    # A worker ends by the button; its error names it, and the panel can run again.
    press(book, "Kill", ".wbp-victim >> nth=1")
    page.wait_for_function(STATE, arg="failed", timeout=60_000)
    page.locator(".wbp-failure").first.locator("summary").click()
    page.locator(".wbp-failure").first.get_by_text("SIGKILL").first.wait_for()
    second.locator(".wbp-live .wb-state", has_text="failed").wait_for()
    book.screenshot(tmp_path / "killed.png", ".wbp")

    first.get_by_text("1 of 2 engines is dead").wait_for()
    press(book, "Restart: Replace all engines")
    page.wait_for_function(ALL, arg="idle")

    # All engines die: Run has others started.
    run_long(book)
    for pid in engine_pids(book):
        os.kill(pid, signal.SIGKILL)
    page.wait_for_function(STATE, arg="failed", timeout=60_000)
    first.get_by_text("2 of 2 engines are dead").wait_for()
    book.screenshot(tmp_path / "dead.png", ".wbp")
    run_long(book)
    press(book, "Stop: ", ".wbp-queue")
    page.wait_for_function(STATE, arg="stopped", timeout=60_000)


def test_a_reload_brings_the_panel_back_and_a_kernel_that_is_gone_is_said(notebook, tmp_path):
    book = opened(notebook, "reload.ipynb", cells=[PID + OPEN])
    page = book.page
    page.get_by_role("checkbox", name="local_sgd", exact=True).click()
    page.locator(".wbp-total").filter(has_text="local_sgd").wait_for()
    book.save()
    page.reload()
    page.wait_for_selector(".wbp .wbp-top button", timeout=60_000)
    page.locator(".wbp-total").filter(has_text="local_sgd").wait_for()
    page.get_by_role("checkbox", name="local_sgd", exact=True).click()
    page.locator(".wbp-total").filter(has_not_text="local_sgd").wait_for()

    gone = page.locator(".wbp-gone").filter(has_text="kernel has ended")
    pid = int((book.lab.folder / "kernel.pid").read_text())
    os.kill(pid, signal.SIGKILL)  # JupyterLab starts another one
    gone.wait_for(timeout=30_000)
    assert page.evaluate("document.querySelector('.wbp-body').inert")
    book.screenshot(tmp_path / "gone.png", ".wbp")
    book.wait_idle()
    book.run_all()
    page.wait_for_selector(".wbp:not(.wbp-dead) .wbp-card", timeout=60_000)

    page.evaluate(RESTART)
    gone.wait_for(timeout=30_000)
    book.wait_idle()
