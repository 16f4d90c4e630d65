"""Loops of public code run as they are once `wb.prepare` stands above them."""

from __future__ import annotations

from typing import Any

import public_loops
import pytest
from worker_reports import assert_same, clean
from workers import Workers

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("loop", [public_loops.mnist, public_loops.quickstart])
def test_public_loops_train_as_one_device_does(workers: Workers, loop: Any) -> None:
    reports = clean(workers.run("mirrored", loop, workers=2))
    assert_same(reports, workers.truth(loop), 1e-10)


def test_the_loader_that_comes_back_is_the_users_but_for_its_batches(workers: Workers) -> None:
    (first, second) = clean(workers.run("mirrored", public_loops.again, workers=2))
    assert first.value == second.value
    assert first.value == {
        "dataset": True,
        "is a DataLoader": True,
        "is a RandomSampler": True,
        "sampler": True,
        "own": True,
        "collate": True,
        "rest": (0, True, 8, 6),
        "of a class": "mine, 8",
        "missing": False,
        "samples": 24,  # of 48 in six global batches
    }


def test_a_distributed_sampler_takes_nothing_away(workers: Workers) -> None:
    loop = public_loops.distributed_sampler
    reports = clean(workers.run("mirrored", loop, workers=2))
    assert [report.value[0] for report in reports] != [50, 50]  # it is shuffled anew each epoch
    assert_same(reports, workers.truth(loop, False), 1e-10)


def test_set_epoch_names_the_order_of_the_epoch(workers: Workers) -> None:
    loop = public_loops.distributed_sampler
    plain, named = (workers.truth(loop, False, begins, 3) for begins in (0, 1))
    (two,) = clean(workers.run("one_device", loop, False, 0, 2))
    assert named.value[1] != plain.value[1]
    assert two.value[1] == plain.value[1]
    (one,) = clean(workers.run("one_device", loop, False, 1, 1))
    assert one.value[1] == named.value[1]
