"""The quickstart as a newcomer meets it, and Stop pressed in the middle of a real run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.cluster]

FOLDER = Path(__file__).parents[2] / "notebooks"
MISSING = importlib.util.find_spec("tensorflow") is None
# Notebook, and its pictures: of the runs and of the comparison.
EVERY = [
    pytest.param("00_quickstart.ipynb", 4, marks=pytest.mark.torch),
    pytest.param(
        "01_tensorflow.ipynb",
        6,
        marks=[
            pytest.mark.tensorflow,
            pytest.mark.skipif(MISSING, reason="tensorflow is not installed"),
        ],
    ),
]
STEPS = "parseInt(document.querySelector('.wb-steps')?.textContent.split(' ')[1] ?? 0)"

TRAIN = """%%distributed mirrored --steps 1000000 --name long --inject slow=1:20ms
import torch
from torch import nn
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
wb.fit(model, wb.data.digits("train"), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=64)"""


def wait_steps(page, at_least: int) -> None:
    page.wait_for_function(f"{STEPS} >= {at_least}", timeout=60_000)


@pytest.mark.torch
@pytest.mark.parametrize("front", ["lab", "notebook"])
def test_stop_in_mid_run_ends_the_cell_and_leaves_the_engines_alive(notebook, tmp_path, front):
    nb = notebook(
        "stop_real.ipynb",
        [
            "%load_ext workbench\nimport workbench as wb\n%cluster start 2 --devices cpu",
            TRAIN,
            "%%distributed\nprint('alive', rank)",
            "run = wb.runs['long']\nprint(run.state, 'equal', len(set("
            "int(run.history['step'][run.history['rank'] == r].max()) for r in (0, 1))) == 1)",
            "%cluster stop",
        ],
        front=front,
    )
    nb.run_all()
    wait_steps(nb.page, 10)
    wait_steps(nb.page, 30)  # the numbers move while the cell blocks
    nb.page.get_by_text("rank 1 makes the other worker wait").wait_for(timeout=20_000)
    nb.screenshot(tmp_path / "running.png")
    nb.page.locator(".wb-dash button", has_text="Stop").click()
    nb.wait_text("alive 0", 30)
    nb.wait_text("alive 1", 10)
    nb.wait_text("stopped equal True", 10)
    nb.wait_text("cluster stopped", 20)
    bundles = [o.get("data", {}) for o in nb.outputs()]
    assert any("image/png" in bundle for bundle in bundles)
    assert not any("application/vnd.jupyter.widget-view+json" in bundle for bundle in bundles)


@pytest.mark.parametrize(("name", "count"), EVERY)
def test_the_quickstart_runs_to_its_end_with_moving_curves(notebook, tmp_path, name, count):
    cells = [
        cell.source
        for cell in nbformat.read(FOLDER / name, as_version=4).cells
        if cell.cell_type == "code"
    ]
    nb = notebook("quickstart.ipynb", cells)
    nb.run_all()
    wait_steps(nb.page, 1)
    nb.page.screenshot(path=str(tmp_path / "running.png"))
    nb.wait_text("cluster stopped", 180)
    nb.page.screenshot(path=str(tmp_path / "done.png"))
    outputs = nb.outputs()
    assert not [o for o in outputs if o["output_type"] == "error"]
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == count


HEALS = (
    TRAIN.replace("--inject slow=1:20ms", "--on-failure heal")
    .replace("wb.fit(", "import time\nwb.fit(")
    .replace("batch_size=64)", "batch_size=64, callbacks=[lambda step, logs: time.sleep(0.01)])")
)


@pytest.mark.torch
def test_workers_come_and_go_at_a_click_while_the_cell_blocks(notebook, tmp_path):
    start = "%load_ext workbench\nimport workbench as wb\n%cluster start 2 --devices cpu"
    told = "print([(e['event'], e['workers']) for e in wb.runs['long'].events])"
    nb = notebook("scaled.ipynb", [start, HEALS, told, TRAIN.replace("long", "fixed")])
    nb.run_all()
    wait_steps(nb.page, 20)
    many = nb.page.locator(".wb-staffing output")
    assert many.text_content() == "2"
    nb.page.get_by_role("button", name="Add one worker").click()
    many.filter(has_text=re.compile("^3$")).wait_for(timeout=60_000)
    for mode in ("light", "dark"):
        nb.page.wait_for_timeout(700)
        nb.screenshot(tmp_path / f"{mode}.png", ".wb-dash")
        nb.dark()
    nb.page.get_by_role("button", name="Remove one worker").click()
    many.filter(has_text=re.compile("^2$")).wait_for(timeout=60_000)
    nb.page.locator(".wb-dash button", has_text="Stop").click()
    nb.wait_text("[('joined', 3), ('left', 2)]", 60)
    nb.page.locator(".wb-staffing output").wait_for(timeout=60_000)
    more = nb.page.locator(".wb-staffing .wb-one-more")
    assert more.is_disabled()
    assert "--on-failure heal" in more.get_attribute("title")
    nb.page.locator(".wb-dash button", has_text="Stop").click()
