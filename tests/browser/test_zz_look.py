import pytest
CELLS=["%load_ext workbench\n%cluster start 2",
"%%distributed mirored\nprint(1)",
"%%distributed mirrored --step 5\nprint(1)",
"%%distributed\nvalue = 1 / (rank - 1)",
"%%distributed\nundefined_name",
"""%%distributed mirrored --steps 400 --plot auto --name ends
import os, signal, torch, torch.nn as nn, time
def step(model, batch):
    x, y = batch
    if rank == 1 and wb is not None and torch.rand(1).item() < 0.02: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    return nn.functional.cross_entropy(model(x), y)
torch.manual_seed(rank)
wb.fit(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), wb.data.digits("train"), step_fn=step,
       optimizer=lambda p: torch.optim.SGD(p, 0.1), batch_size=96)"""]
@pytest.mark.parametrize("width",[800,1280])
def test_tracebacks(notebook,width):
    nb=notebook(f"look{width}.ipynb",CELLS,width=width,height=2600)
    nb.page.locator(".jp-CodeCell").first.click()
    for i in range(len(CELLS)):
        nb.command("notebook:run-cell-and-select-next"); nb.page.wait_for_timeout(1500); nb.wait_idle(120)
    nb.page.wait_for_timeout(1500)
    for dark in (False,True):
        nb.dark(dark); nb.page.wait_for_timeout(800)
        nb.screenshot(f"/tmp/w/shots/tb-{width}-{'dark' if dark else 'light'}.png")
@pytest.mark.parametrize("width",[800,1280])
def test_panel(notebook,width):
    nb=notebook(f"panel{width}.ipynb",["%load_ext workbench\nimport workbench as wb\n%cluster start 2","wb.panel()"],width=width,height=1400)
    nb.page.locator(".jp-CodeCell").first.click()
    for i in range(2):
        nb.command("notebook:run-cell-and-select-next"); nb.page.wait_for_timeout(1500); nb.wait_idle(120)
    nb.page.wait_for_selector(".wbp",timeout=60000)
    tabs=nb.page.locator(".wbp [role=tab]")
    for dark in (False,True):
        nb.dark(dark); nb.page.wait_for_timeout(500)
        for t in range(tabs.count()):
            tabs.nth(t).click(); nb.page.wait_for_timeout(500)
            nb.screenshot(f"/tmp/w/shots/panel-{width}-{'dark' if dark else 'light'}-{t}.png",".wbp")
