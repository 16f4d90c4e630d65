"""On Windows the first thing that is asked of the package says that it needs WSL2."""

from __future__ import annotations

import subprocess
import sys

import pytest

WINDOWS = """
import sys
import IPython.core.interactiveshell as interactive  # of the system that the test runs on
import ipykernel.zmqshell
from workbench import errors
sys.modules.pop("workbench")
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"):
    sys.modules[name] = None  # importing it fails
import os, signal, socket
for module, names in (
    (os, "fork getuid pidfd_open pipe2 killpg setsid"), (socket, "AF_UNIX"),
    (signal, "SIGKILL SIGHUP SIGALRM SIGUSR1 SIGUSR2 SIGIO SIGCHLD pthread_kill setitimer"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "win32"
import workbench as wb
"""

ASKED = {
    "load_ext": "interactive.InteractiveShell.instance().run_line_magic('load_ext', 'workbench')",
    "a name": "wb.runs",
    "the cluster": "wb.Cluster(2)",
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=list(ASKED))
def test_windows_is_told_what_it_needs(asked):
    said = f"try:\n    {asked}\nexcept errors.ClusterError as error:\n    print(error)"
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS + said], capture_output=True, text=True, timeout=60
    )
    words = done.stdout + done.stderr
    assert "needs WSL2" in words
    assert "wsl --install" in words
    assert "Traceback" not in words


def test_what_needs_no_system_is_there_on_windows():
    subprocess.run(
        [sys.executable, "-c", WINDOWS + "wb.WorkbenchError, wb.__version__"], check=True
    )
