from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from workbench.engine.torch.support import interrupts_held_back


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []

    def block() -> None:
        with interrupts_held_back():
            signal.raise_signal(signal.SIGINT)
            done.append("to the end")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["to the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens() -> None:
    with interrupts_held_back():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.torch
def test_an_interrupted_run_start_leaves_optimizers_that_work() -> None:
    """SIGINT in the middle of the import: it comes out afterwards, and a step still works."""
    pytest.importorskip("torch")
    script = """
import importlib, signal, torch
from workbench.engine.torch import support

class Interrupting:
    def find_spec(self, name, *rest):
        if name == "torch._dynamo.decorators":
            signal.raise_signal(signal.SIGINT)

import sys
sys.meta_path.insert(0, Interrupting())
assert "torch._dynamo" not in sys.modules
try:
    support.import_for_optimizers()
except KeyboardInterrupt:
    print("interrupted")
p = torch.nn.Parameter(torch.ones(1))
p.grad = torch.ones(1)
torch.optim.SGD([p], 0.5).step()
print(p.item())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout.split() == ["interrupted", "0.5"], ended.stderr
