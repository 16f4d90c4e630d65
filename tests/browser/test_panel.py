"""The panel in a real JupyterLab: what a teacher clicks, and what they see."""

import pytest
from panel_hands import opened, press

pytestmark = [pytest.mark.browser, pytest.mark.cluster, pytest.mark.torch]


def test_a_cluster_is_started_and_stopped_with_the_mouse(notebook, tmp_path):
    book = opened(notebook, "panel-cluster.ipynb")
    press(book, "Start")
    book.page.wait_for_function("() => document.querySelectorAll('.wbp-engine').length === 2")
    book.screenshot(tmp_path / "cluster.png")
    press(book, "Stop cluster")
    book.page.wait_for_function("() => document.querySelectorAll('.wbp-engine').length === 0")
