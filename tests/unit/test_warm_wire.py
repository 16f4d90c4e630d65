"""A warm parent that gives no answer."""

import signal
import socket
import subprocess
import sys

import pytest

from workbench.cluster import warm_wire
from workbench.errors import ClusterError


def test_a_parent_that_is_halted_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(warm_wire, "LOOK_S", 0.05)
    wire = warm_wire.WarmWire()
    wire.ready.set()
    ours, theirs = socket.socketpair()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with ours, theirs, child:
        wire._sock, wire._process = ours, child
        with pytest.raises(ClusterError, match=r"did not answer status in 0\.2 s"):
            wire.ask("status", timeout_s=0.2)
        child.send_signal(signal.SIGSTOP)
        halted = f"pid {child.pid}. was halted by SIGSTOP(.|\\n)*next: +%cluster restart"
        with pytest.raises(ClusterError, match=halted):
            wire.ask("status", timeout_s=20)
        child.kill()
