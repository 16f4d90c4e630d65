"""A job that is followed in a real JupyterLab: it is steered, and its picture and table stay."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.torch]

HEAD = "%load_ext workbench\nimport workbench as wb"
CELL = """%%distributed mirrored -n 2 --to-job walk
import time, torch
model = torch.nn.Linear(8, 2)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long)),
    batch_size=16)
model, optimizer, loader = wb.prepare(
    model, torch.optim.SGD(model.parameters(), 0.1), loader)
print("it has begun")
for _ in range(5000):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        time.sleep(0.02)
        optimizer.step()
"""
STEPS = "parseInt(document.querySelector('.wb-steps')?.textContent.split(' ')[1] ?? 0)"
BEGIN_MS = 120_000
"""Two processes import torch."""


def test_a_followed_job_is_stopped_by_its_button_in_another_notebook_and_leaves_a_picture(notebook):
    writes = notebook("writes.ipynb", [HEAD, CELL, 'job = wb.submit("walk", on="local")'])
    writes.run_all()
    writes.wait_text("wb.follow('walk')", 60)
    writes.page.wait_for_function(f"{STEPS} >= 5", timeout=BEGIN_MS)
    follows = notebook("follows.ipynb", [HEAD, 'run = wb.follow("walk")', "wb.jobs"], height=1600)
    follows.run_all()
    follows.page.wait_for_function(f"{STEPS} >= 20", timeout=60_000)
    follows.page.locator(".wb-strategy", has_text="walk @ ").wait_for()
    follows.wait_text("it has begun")
    follows.page.locator(".jp-OutputArea-output td", has_text="running").wait_for()
    buttons = follows.page.locator(".wb-dash button")
    buttons.filter(has_text="Pause").click()
    for nb in (follows, writes):  # it went through the job's folder
        nb.page.locator(".wb-state", has_text="paused").wait_for(timeout=20_000)
    buttons.filter(has_text="Stop").click()
    for nb in (follows, writes):
        nb.page.locator(".jp-OutputArea-output img").wait_for(timeout=60_000)
        nb.wait_text("2 workers · stopped", 20)
    saved = [o["data"] for o in follows.outputs() if o["output_type"] == "display_data"]
    picture = next(bundle for bundle in saved if "image/png" in bundle)
    assert set(picture) == {"image/png", "text/plain"}
    assert "stopped" in "".join(picture["text/plain"])
    assert any("global batch 16" in "".join(one.get("text/html", "")) for one in saved)
