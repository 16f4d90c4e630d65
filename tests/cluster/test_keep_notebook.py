"""Clusters are kept and attached by magics, in notebooks."""

import pytest

from workbench.cluster.processes import can_fork

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.torch,
    pytest.mark.skipif(not can_fork()[0], reason=can_fork()[1]),
]

CELL = """%%distributed mirrored --background --name base --plot text
import time, torch
from torch import nn
print("hello from", rank)
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.01)
        return super().forward(x)
wb.fit(Slow(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=10**6)
"""


@pytest.mark.parametrize("end", ["killed", "restarted"])
def test_in_a_notebook_the_magics_keep_and_attach(stage, end):
    """The dashboard goes on below the cell that attached, in another notebook."""
    from jupyter_client.manager import start_new_kernel

    def notebook(run, end="killed"):
        manager, client = start_new_kernel(kernel_name="python3", env=stage.env)
        try:
            return run(lambda code: _texts(client, code))
        finally:
            client.stop_channels()
            if end == "restarted":
                manager.restart_kernel()  # the kernel ends by itself, and its exit handlers run
            manager.shutdown_kernel(now=True)
            manager.cleanup_resources()

    def first(do):
        said = do("%load_ext workbench\n%cluster start 2 --keep  # for a while")
        do("import workbench as wb\nimport time")
        do(CELL)
        do("while not wb.runs['base'].is_over and wb.runs['base'].history.totals.steps < 5: pass")
        return said

    def second(do):
        do("%load_ext workbench\nimport workbench as wb, time")
        refused = do("%cluster attach nothing")
        shown = do(f"%cluster attach {name}\ntime.sleep(2)")
        state = do("print(_run.state, _run.history.totals.steps > 5)")
        do("_run.stop(); _run.wait(20)")
        ended = do("print(_run.state, list(wb.runs), 'hello' in _run.task.board.text())")
        do("%cluster stop")
        return refused, shown, state, ended

    said = notebook(first, end)
    assert "%cluster stop" in said
    name = said.partition("kept as ")[2].partition(":")[0]
    refused, shown, state, ended = notebook(second)
    assert "WB-CLUSTER-034" in refused
    assert name in refused, "it says which there are"
    assert "engine" in shown
    assert "base" in shown, "the run's dashboard"
    assert "running True" in state
    assert "stopped ['base'] True" in ended
    seconds, left = stage.wait_empty()
    assert not left, f"after {seconds:.1f} s: {left}"


def _texts(client, code):
    """Return all text that running a cell shows."""
    texts = []

    def hook(message):
        content = message["content"]
        texts.append(content.get("text", ""))
        texts.append(content.get("data", {}).get("text/plain", ""))
        texts.append(content.get("evalue", ""))

    client.execute_interactive(code, timeout=120, output_hook=hook)
    return "\n".join(texts)
