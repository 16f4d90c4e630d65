"""The panel in a real JupyterLab: what a teacher clicks, and what they see."""

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.cluster, pytest.mark.torch]

OPEN = "%load_ext workbench\nimport workbench as wb\nwb.panel()"
ROW = ".wbp-engine"


def opened(notebook, name, *, cells=(OPEN,), **size):
    """Open a notebook that shows the panel, and wait until the kernel has answered it."""
    book = notebook(name, list(cells), **size)
    book.run_all()
    book.page.wait_for_selector(".wbp .wbp-top button", timeout=60_000)
    return book


def press(book, name, within=".wbp"):
    """Press a button by its text."""
    book.page.locator(within).get_by_role("button", name=name).first.click()


def test_a_cluster_is_started_and_stopped_with_the_mouse(notebook, tmp_path):
    book = opened(notebook, "panel-cluster.ipynb")
    press(book, "Start")
    book.page.wait_for_function("() => document.querySelectorAll('.wbp-engine').length === 2")
    book.screenshot(tmp_path / "cluster.png")
    press(book, "Stop cluster")
    book.page.wait_for_function("() => document.querySelectorAll('.wbp-engine').length === 0")
