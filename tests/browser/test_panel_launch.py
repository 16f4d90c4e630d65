"""Where the panel starts engines, in a real JupyterLab: launchers, their fields, a job's queue."""

import pytest
from panel_hands import amiss, be_wide, opened, press

pytestmark = [pytest.mark.browser]

QUEUE = """%load_ext workbench
import time
import workbench as wb
from workbench.cluster import progress
from workbench.panels import cluster
from workbench.notebook.session import session

cluster.installed = lambda: ["local", "ssh", "slurm", "mpi"]
asked = globals().get("asked", [])

def start(count, **settings):
    tell = settings.pop("progress")
    asked.append({"count": count, **settings})
    if settings.get("launcher") == "ssh":
        wb.Cluster(count, launcher="ssh", on=settings["on"])
    for waited_s in range(600):
        tell(progress.queued("PENDING", "Resources", 3, 130 + waited_s))
        time.sleep(0.1)

session.start = start
"""
CELLS = [QUEUE, "wb.panel()", "asked"]


def test_engines_are_asked_of_slurm_and_the_queue_is_shown_and_left(notebook, tmp_path):
    book = opened(notebook, "launch.ipynb", cells=CELLS, height=700, width=1240)
    panel = book.page.locator(".wbp").first
    row = panel.locator(".wbp-clusterrow")
    assert not panel.get_by_label("Hosts", exact=True).is_visible()
    panel.get_by_label("Launcher", exact=True).select_option("ssh")
    panel.get_by_label("Hosts", exact=True).fill("node1:1,node1:1")
    book.screenshot(tmp_path / "ssh.png", ".wbp")
    press(book, "Start: ")
    panel.get_by_text("A host is named twice").first.wait_for()
    words = panel.locator(".wbp-notice dt").first  # JupyterLab gives it a fifth of its place
    assert words.bounding_box()["height"] < 30
    book.screenshot(tmp_path / "ssh-mistake.png", ".wbp")

    panel.get_by_label("Launcher", exact=True).select_option("slurm")
    assert not panel.get_by_label("Hosts", exact=True).is_visible()
    panel.get_by_label("Nodes", exact=True).fill("2")
    panel.get_by_label("Partition", exact=True).fill("gpu")
    panel.get_by_label("Time limit", exact=True).fill("1:30:00")
    press(book, "Start: ")
    row.get_by_text("job in the queue: pending (Resources), at position 3, 2 min").wait_for()
    assert row.locator(".wbp-progress").get_attribute("value") is None
    for dark in (False, True):
        book.dark(dark)
        for width in (1100, 700, 420):
            be_wide(book.page, width)
            assert amiss(book.page) == []
            book.screenshot(tmp_path / f"queue-{'dark' if dark else 'light'}-{width}.png", ".wbp")
    be_wide(book.page, 1100)
    press(book, "Cancel")
    panel.get_by_text("The start was cancelled").first.wait_for()
    assert panel.get_by_label("Partition", exact=True).input_value() == "gpu"
    book.run_all()
    book.wait_text("'launcher': 'slurm', 'nodes': '2', 'partition': 'gpu', 'time': '1:30:00'")
