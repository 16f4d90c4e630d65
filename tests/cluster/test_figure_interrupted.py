"""The interrupt button in the midst of a kernel's first figure: the next figure is drawn."""

import sys
from pathlib import Path

import pytest
from real_kernel import kernel

pytest.importorskip("jupyter_client")

BEGIN = """
import os, signal, sys, threading, time
sys.path.insert(0, {tests!r})
from fake_run import fake_snapshot
from workbench.views.live.figure import run_png
shot = fake_snapshot()
assert "matplotlib" not in sys.modules

def strike():
    while {moment!r} not in sys.modules:
        time.sleep(0.0002)
    os.kill(os.getpid(), signal.SIGINT)
"""
FIGURE = "threading.Thread(target=strike, daemon=True).start()\nrun_png(shot)"
MOMENTS = ["matplotlib", "matplotlib.colors", "matplotlib.font_manager", "matplotlib.figure"]


@pytest.mark.skipif(sys.platform == "win32", reason="the signal is POSIX")
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_first_figure_leaves_matplotlib_whole(tmp_path, moment):
    with kernel(tmp_path) as real:
        real.ok(BEGIN.format(tests=str(Path(__file__).parents[1]), moment=moment))
        assert "KeyboardInterrupt" in real.run(FIGURE).error
        assert "PNG" in real.ok("print(run_png(shot)[:8])")
        real.ok("import matplotlib.pyplot as plt\nplt.subplots()[0].savefig(os.devnull)")
