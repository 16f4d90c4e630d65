"""How the end of ipyparallel's controller is told."""

import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest

from workbench.cluster.hub import Controller
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
    hub = Controller(tmp_path, "", "", heard.append, lambda engine: None)
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


class Slow:
    """A cluster whose controller answers nobody's first requests."""

    def __init__(self, unanswered, hub, ends_at=None):
        self.asked, self.unanswered, self.hub, self.ends_at = 0, unanswered, hub, ends_at
        self.client = SimpleNamespace(
            _registration_callbacks=[], _mux_stream=SimpleNamespace(flush=print), _io_loop=None
        )

    def connect_client_sync(self, timeout):
        self.asked += 1
        if self.asked == self.ends_at:
            self.hub._left(Exit(1, 1, None))
        if self.asked <= self.unanswered:
            raise TimeoutError("Hub connection request timed out")
        return self.client


def test_a_controller_that_answers_late_is_asked_again(tmp_path):
    hub = Controller(tmp_path, "", "", lambda end: None, lambda engine: None)
    hub.cluster = Slow(2, hub)
    hub._connect()
    assert hub.client is hub.cluster.client
    assert hub.cluster.asked == 3


def test_a_controller_that_has_ended_is_not_asked_again(tmp_path):
    hub = Controller(tmp_path, "", "", lambda end: None, lambda engine: None)
    hub.cluster = Slow(100, hub, ends_at=2)
    with pytest.raises(TimeoutError):
        hub._connect()
    assert hub.cluster.asked == 2
