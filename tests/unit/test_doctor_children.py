"""The time limit of the doctor's checks: slow imports are no hangs, and hangs are found in time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workbench.doctor import children, gpus

SLOW = """
import time
from workbench.doctor.children import main

def computes(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass

def imports_slowly(child):
    computes(5)
    child.imported()
    child.say("ok", "a.b", "a thing", "done")

def imports_for_ever(child):
    computes(600)

def hangs_in_its_import(child):
    time.sleep(600)

def hangs_after_its_import(child):
    child.imported()
    computes(600)

NAMES = imports_slowly, imports_for_ever, hangs_in_its_import, hangs_after_its_import
if __name__ == "__main__":
    main({one.__name__: one for one in NAMES})
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "slow_checks.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(children, "IMPORTS_S", 0.0)

    def run(name: str, limit_s: float, imports_s: float) -> children.Ended:
        asked = {"limit_s": limit_s}
        return children.run("slow_checks", name, asked, limit_s, tmp_path, imports_s=imports_s)

    return run


def test_a_check_that_imports_slowly_has_its_whole_time_after_the_imports(run) -> None:
    ended = run("imports_slowly", 4, 60)
    assert [line.id for line in ended.lines] == ["a.b"]
    assert (ended.late, ended.imports) == (False, False)
    assert ended.seconds > 5


def test_an_import_that_computes_for_too_long_is_no_hang(run) -> None:
    ended = run("imports_for_ever", 1, 3)
    assert (ended.late, ended.imports) == (True, True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("name", ["hangs_in_its_import", "hangs_after_its_import"])
def test_a_hang_is_found_without_the_time_for_slow_imports(run, name: str) -> None:
    ended = run(name, 3, 600)
    assert (ended.late, ended.imports) == (True, False)
    assert ended.seconds < 60
    assert name in ended.tail  # the stacks


PROBE = gpus.Probe("gloo", 20, {"machine.gloo": "sums"}, 0, step="look at the firewall")
TAIL = 'Current thread 0x1 (most recent call first):\n  File "probes.py", line 315 in until\n'


def ended(**about: object) -> children.Ended:
    usual = {"status": -9, "seconds": 22.4, "late": True, "lines": [], "garbage": False,
             "tail": TAIL}  # fmt: skip
    return children.Ended(**{**usual, **about})


def test_a_hang_has_its_seconds_a_next_step_and_the_stacks_in_their_own_field() -> None:
    (line,) = gpus._said(PROBE, ended(), 0)
    assert (line.status, line.seconds) == ("fail", 22.4)
    assert "probes.py" in line.stacks
    assert "probes.py" not in line.next_step
    assert PROBE.step in line.next_step


@pytest.mark.parametrize("load", [0.5, 100.0])
def test_slow_imports_are_a_warning_with_the_load_and_a_next_step(
    monkeypatch: pytest.MonkeyPatch, load: float
) -> None:
    monkeypatch.setattr(children, "load", lambda: load)
    (line,) = gpus._said(PROBE, ended(imports=True), 0)
    assert (line.status, line.seconds) == ("warn", 22.4)
    assert f"{load}" in line.found
    assert line.next_step
    assert "probes.py" not in line.next_step


def test_each_check_names_a_next_step_for_a_hang() -> None:
    assert all(probe.step for probe in gpus.PROBED)
