"""How the end of ipyparallel's controller is told."""

import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil

from workbench.cluster.hub import Hub
from workbench.cluster.processes import Exit

WAIT_S = 20


class SlowlyKept(psutil.Process):
    """Keeps the code it has learned for others only a moment after it has reaped the process."""

    reaped = threading.Event()

    def wait(self, timeout=None):
        if threading.current_thread().name != "reaps":
            return super().wait(timeout)
        code = self._proc.wait(timeout)
        self.reaped.set()
        threading.Event().wait(0.2)
        self._exitcode = code
        return code


def test_the_signal_is_known_although_ipyparallel_has_reaped_the_controller(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    process = SlowlyKept(child.pid)
    reaps = threading.Thread(target=process.wait, args=(WAIT_S,), name="reaps")
    heard = []
    hub = Hub(tmp_path, "", "", heard.append, lambda engine: None)
    hub.cluster = SimpleNamespace(
        controller=SimpleNamespace(pid=child.pid, process=process, _wait_thread=reaps)
    )
    reaps.start()
    process.kill()
    assert process.reaped.wait(WAIT_S)
    hub._left(Exit(child.pid, None, None))
    reaps.join(WAIT_S)
    child.returncode = -signal.SIGKILL  # it was reaped behind its back
    assert heard == [Exit(child.pid, None, signal.SIGKILL)]
