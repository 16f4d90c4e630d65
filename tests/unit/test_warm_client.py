"""A warm parent that gives no answer."""

import queue
import signal
import socket
import subprocess
import sys

import pytest

from workbench.cluster.forkserver import client
from workbench.errors import ClusterError


def test_a_parent_that_is_halted_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(client, "LOOK_S", 0.05)
    wire = client.WarmParent()
    wire.ready.set()
    ours, theirs = socket.socketpair()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with ours, theirs, child:
        wire._sock, wire._process = ours, child
        with pytest.raises(ClusterError, match=r"status.*0\.2 s.*WB-CLUSTER-024"):
            wire.ask("status", timeout_s=0.2)
        child.send_signal(signal.SIGSTOP)
        halted = f"(?s){child.pid}.*SIGSTOP.*WB-CLUSTER-023.*%cluster restart"
        with pytest.raises(ClusterError, match=halted):
            wire.ask("status", timeout_s=20)
        child.kill()


def test_the_end_of_a_process_is_told_although_its_parent_is_halted(monkeypatch):
    monkeypatch.setattr(client, "LOOK_S", 0.05)
    wire, told = client.WarmParent(), queue.Queue()
    wire.on_exit(told.put)
    ours, theirs = socket.socketpair()
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with theirs, parent, child:
        wire._sock, wire._process = ours, parent
        wire._forked.add(child.pid)
        wire._begin_to_read()
        parent.send_signal(signal.SIGSTOP)
        child.kill()  # and nobody reaps it
        end = told.get(timeout=30)
        assert (end.pid, end.code, end.signal) == (child.pid, None, signal.SIGKILL)
        wire._take({"event": "exit", "pid": child.pid, "code": None, "signal": 9})
        assert told.empty()
        wire._stopped = True
        ours.shutdown(socket.SHUT_RDWR)
        wire._reader.join(10)
        ours.close()
        parent.kill()
