"""A run on a host is followed over a real ssh, also one that is lost, and takes orders."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hosts.simulated_hosts import SimulatedHosts
from notebook_shell import soon

from workbench.errors import RunError
from workbench.history import disk
from workbench.jobs import control
from workbench.jobs.control import Inbox, Order
from workbench.jobs.places import Place, open_place
from workbench.shared.record import RECORD

NAMED = "a job's $(folder)"


@pytest.fixture
def run_dir(reached: SimulatedHosts) -> Iterator[Path]:
    """Hand out a run folder in a home that xh1 alone has, seen from here."""
    if not reached.is_plain():
        reached.again()
    home = reached.path("xh1", os.path.expanduser("~"))
    job = home / NAMED
    (job / "runs" / "1").mkdir(parents=True)
    (job / "run.json").write_text(json.dumps({"format": "workbench-job/1"}))
    disk.write_meta(job / "runs" / "1", {"plan": {}, "state": "running"})
    yield job / "runs" / "1"
    shutil.rmtree(job)


@pytest.fixture
def place(run_dir: Path) -> Iterator[Place]:
    place = open_place(f"ssh://xh1{os.path.expanduser('~')}/{NAMED}")
    yield place
    place.close()


def append(run_dir: Path, count: int) -> None:
    with disk.records_path(run_dir, 0).open("ab") as file:
        file.write(np.zeros(count, RECORD).tobytes())


def told(place: Place, run_dir: Path) -> bool:
    place.refresh()
    name = "records-rank0.bin"
    there = place.folder / name
    return there.exists() and there.read_bytes() == (run_dir / name).read_bytes()


def test_a_run_on_a_host_is_followed_to_its_end_and_takes_orders(
    run_dir: Path, place: Place
) -> None:
    inbox = Inbox(run_dir, control.make_key(run_dir))
    append(run_dir, 1000)
    assert soon(lambda: told(place, run_dir), 10)
    assert soon(lambda: bool(place._key or place.refresh()), 10)  # type: ignore[attr-defined, func-returns-value]
    place.send(Order("step", steps=2))
    assert [order.do for order in inbox.take()] == ["step"]
    append(run_dir, 10)
    disk.write_meta(run_dir, {"plan": {}, "state": "stopped"})
    assert soon(lambda: bool(place.refresh() or place.over), 10)  # type: ignore[func-returns-value]
    assert told(place, run_dir)
    assert place.problem == ""


def test_a_lost_connection_goes_on_where_it_was(
    reached: SimulatedHosts, run_dir: Path, place: Place
) -> None:
    append(run_dir, 1000)
    assert soon(lambda: told(place, run_dir), 10)
    readers = [one for one in reached.processes("xh1") if "python" in one.name()]
    for one in readers:
        one.kill()
    assert readers
    append(run_dir, 10)
    assert soon(lambda: told(place, run_dir), 10)
    assert place.problem == ""


def test_a_host_that_cannot_be_reached_is_told_in_the_words_of_ssh(
    reached: SimulatedHosts,
) -> None:
    with pytest.raises(RunError, match="no-such-host") as error:
        open_place("ssh://no-such-host/dir")
    assert error.value.code == "WB-RUN-114"
