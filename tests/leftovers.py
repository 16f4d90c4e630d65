"""A stage for kernels that die: the processes that they started, and what remains of them."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from pathlib import Path

import psutil

MARK = "WORKBENCH_TEST_STAGE"
HEAD = """
    import os, signal, subprocess, sys, threading, time
    import workbench as wb
    def say(*words):
        print(*words, flush=True)
    FIT = '''
    import torch
    from torch import nn
    wb.fit(nn.Linear(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
           loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=10**7)
    '''.replace("\\n    ", "\\n")
    def train(strategy, **settings):
        run = cluster.run(FIT, strategy=strategy, **settings)
        while run.history.totals.steps < 5:
            time.sleep(0.01)
            assert not run.is_over, run.error
        return run
"""


class Stage:
    """A separate environment: temporary folder, runs, and a mark on every process.

    Attributes:
        seen: Everything that processes of this stage were seen to hold: sockets, shared memory.
    """

    def __init__(self):
        self.mark = uuid.uuid4().hex
        self.temp = Path(tempfile.mkdtemp(prefix="wbt-", dir="/tmp"))
        self.home = Path(tempfile.mkdtemp(prefix="wbh-", dir="/tmp"))
        self.seen = set()

    @property
    def env(self):
        tree = str(Path(__file__).parents[1])
        paths = [tree, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ, MARK: self.mark, "TMPDIR": str(self.temp),
            "WORKBENCH_HOME": str(self.home), "PYTHONPATH": os.pathsep.join(paths),
            "TORCHINDUCTOR_CACHE_DIR": str(self.home),  # torch's, for all processes of a user
        }  # fmt: skip

    def kernel(self, code, *, tail="time.sleep(600)"):
        """Start a process that replaces a kernel: it runs `code` and prints lines."""
        source = textwrap.dedent(HEAD) + textwrap.dedent(code) + "\n" + tail
        return subprocess.Popen(
            [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=self.env
        )

    def processes(self):
        """Every living process that was started, however indirectly, by a kernel of this stage."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.pid != os.getpid():
                    found.append(process)
        return found

    def look(self):
        """Take note of sockets, shared memory and semaphores of the processes; return them."""
        processes = self.processes()
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):
                self.seen |= {
                    ("tcp", c.laddr.port)
                    for c in process.net_connections("inet")
                    if c.status == psutil.CONN_LISTEN
                }
                self.seen |= {("unix", c.laddr) for c in process.net_connections("unix") if c.laddr}
                self.seen |= {
                    ("file", one.path)
                    for one in process.memory_maps(grouped=False)
                    if one.path.startswith("/dev/shm/") and "(deleted)" not in one.path
                }
        return processes

    def left(self):
        """The resources that should no longer exist."""
        listening = {
            ("tcp", c.laddr.port)
            for c in psutil.net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        } | {("unix", c.laddr) for c in psutil.net_connections("unix") if c.laddr}
        files = {one for one in self.seen if one[0] == "file" and os.path.exists(one[1])}
        tree = [*os.walk(self.temp)]  # unlike rglob it does not mind folders that go meanwhile
        return [
            *((p.pid, " ".join(p.cmdline())[:80]) for p in self.processes() if _lives(p)),
            *sorted(self.seen & listening),
            *sorted(files),
            *(os.path.join(at, name) for at, _, names in tree for name in names),
            *(os.path.join(at, name) for at, names, _ in tree for name in names),
        ]

    def wait_empty(self, timeout_s=10):
        """Wait until nothing remains; return how long it took and what still remains."""
        began = time.monotonic()
        while (left := self.left()) and time.monotonic() - began < timeout_s:
            time.sleep(0.1)
        return time.monotonic() - began, left

    def close(self):
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self.temp, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)


def _lives(process):
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
