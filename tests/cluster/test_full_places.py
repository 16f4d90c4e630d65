"""Places are full or read-only: what does not need them goes on as ever.

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
                 "--checkpoint", "No space left on device", "another folder")
    book.ok("%cluster restart")
    assert "[rank 1] 1 2" in book.ok("%%distributed\nprint(rank, world_size)").text
print("all is well")
"""


READ_ONLY = r"""
import os, subprocess, sys, tempfile
home, kept = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", home], check=True)
tempfile.tempdir = os.environ["TMPDIR"] = kept

from notebook_shell import notebook
TRAIN = '''
import torch
from torch import nn
wb.fit(nn.Linear(16, 4), wb.data.synthetic(128, shape=(16,), classes=4), steps=8, batch_size=16,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1))
'''
with notebook(2, fresh=True) as book:
    runs = book["wb"].runs
    for first in (True, False):
        said = book.ok(f"%%distributed mirrored --plot off\n{TRAIN}").text
        assert runs.latest.weights()
        assert str(runs.latest.folder).startswith(kept), runs.latest.folder
        assert runs.latest.folder.parent.stat().st_mode & 0o077 == 0
        told = [line for line in said.splitlines() if "WORKBENCH_HOME" in line]
        assert len(told) == first, said
        assert not first or (home in told[0] and kept in told[0]), said
print("all is well")
"""


@pytest.fixture
def place():
    """A folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="wb-full-") as folder:
        yield folder


def run_with_a_mount(place, code, *arguments, home):
    unshare = shutil.which("unshare")
    apart = [unshare, *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), "-m"]
    tried = [*apart, "mount", "-t", "tmpfs", "tmpfs", place]
    if not unshare or subprocess.run(tried, capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a small disk of their own (unshare -m)")
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "WORKBENCH_HOME": home, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [*apart, sys.executable, "-c", code, place, *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env=env,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all is well" in done.stdout


def test_cells_and_runs_go_on_where_temporary_files_and_shared_memory_are_full(tmp_path, place):
    run_with_a_mount(place, NOTEBOOK, str(tmp_path / "kept"), home=str(tmp_path))


def test_runs_are_kept_in_a_temporary_folder_where_home_is_read_only(place):
    with tempfile.TemporaryDirectory(prefix="wb-kept-") as kept:
        run_with_a_mount(place, READ_ONLY, kept, home=place)
