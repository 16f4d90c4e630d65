"""The controller's watch over its parts."""

import multiprocessing
import os
import signal
import time

import pytest

from workbench.cluster import controller

spawned = multiprocessing.get_context("spawn").Process


@pytest.fixture
def parts():
    found = {name: spawned(target=time.sleep, args=(60,)) for name in ("one", "two")}
    for part in found.values():
        part.start()
    yield found
    for part in found.values():
        part.kill()
        part.join()
        part.close()


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGKILL, -9), (signal.SIGSTOP, None)])
def test_a_part_that_ended_or_was_halted_is_named(parts, sig, code):
    os.kill(parts["two"].pid, sig)
    lost = controller.await_loss(parts, look_s=0.05)
    assert lost == {"name": "two", "pid": parts["two"].pid, "code": code}


def test_nothing_is_said_of_a_controller_that_lost_no_part(tmp_path):
    assert controller.lost_part(tmp_path) is None
