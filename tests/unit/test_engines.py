"""Engines that have ended without anybody telling us."""

import subprocess
import sys

import pytest

from workbench.cluster.engines import EngineInfo, Engines
from workbench.cluster.hosts.settings import LaunchSettings


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process


def test_only_an_engine_that_has_ended_is_given_up(child, monkeypatch):
    lost = []
    monkeypatch.setattr(Engines, "_lost", lambda self, info, how: lost.append((info.id, str(how))))
    engines = Engines.__new__(Engines)
    engines.launch = LaunchSettings()
    engines.engines = {3: EngineInfo(id=3, uuid="u", pid=child.pid)}
    engines.give_up(3)
    engines.give_up(4)  # there is none
    assert lost == []
    child.kill()
    while "zombie" not in open(f"/proc/{child.pid}/status").read():  # noqa: SIM115
        pass
    engines.give_up(3)  # nobody has reaped it: its parent may be halted
    ((engine, how),) = lost
    assert engine == 3
    assert how.startswith("killed by SIGKILL (")
