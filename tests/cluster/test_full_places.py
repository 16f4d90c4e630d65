"""The temporary folder and the shared memory are full: what does not need them goes on as ever.

A notebook in a child process that has small mounts of its own in their places.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from needs import need

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

TESTS = Path(__file__).parents[1]
NOTEBOOK = r"""
import os, subprocess, sys, tempfile
place, kept = sys.argv[1:]
for where, size in ((place, "4m"), ("/dev/shm", "1m")):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where], check=True)
os.environ["TMPDIR"] = tempfile.tempdir = place

def fill(where):
    with open(f"{where}/filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass

from notebook_shell import notebook
TRAIN = '''
import torch
from torch import nn
wb.fit(nn.Linear(16, 4), wb.data.synthetic(128, shape=(16,), classes=4), steps=8, batch_size=16,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1))
'''
with notebook(2, fresh=True) as book:
    fill(place)
    fill("/dev/shm")
    for flags in ("mirrored", "mirrored -o allreduce=backend", "parameter_server",
                  f"mirrored --checkpoint {kept} --checkpoint-every 4"):
        book.ok(f"%%distributed {flags} --plot off\n{TRAIN}")
        assert book["wb"].runs.latest.history.totals.steps == 8, flags
    assert os.listdir(kept)
    book.refused(f"%%distributed mirrored --checkpoint {place}/kept\n{TRAIN}",
                 "cannot be written there", "No space left on device", "name another folder")
    book.ok("%cluster restart")
    assert "[rank 1] 1 2" in book.ok("%%distributed\nprint(rank, world_size)").text
print("all is well")
"""


@pytest.fixture
def place():
    """A folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="wb-full-") as folder:
        yield folder


def test_cells_and_runs_go_on_where_temporary_files_and_shared_memory_are_full(tmp_path, place):
    unshare = shutil.which("unshare")
    apart = [unshare, *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), "-m"]
    tried = [*apart, "mount", "-t", "tmpfs", "tmpfs", place]
    if not unshare or subprocess.run(tried, capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a small disk of their own (unshare -m)")
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "WORKBENCH_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [*apart, sys.executable, "-c", NOTEBOOK, place, str(tmp_path / "kept")],
        capture_output=True,
        text=True,
        timeout=150,
        env=env,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all is well" in done.stdout
