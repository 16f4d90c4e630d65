"""A cell's `init_process_group` finds the group that is there; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import group_cells
import pytest
from worker_reports import failures
from workers import Workers

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "asked", [{}, {"backend": "gloo"}, {"backend": "cpu:gloo", "init_method": "env://"}]
)
def test_a_script_makes_leaves_and_makes_its_group(workers: Workers, asked: dict[str, Any]) -> None:
    reports = workers.run("mirrored", group_cells.joins, workers=2, keywords=asked)
    assert failures(reports) == []
    for rank, report in enumerate(reports):
        once = [(rank, 2, 2.0), [[1.5, 1.5]], False]
        assert report.value == (once * 3, [str(rank), "2"])
        assert report.left == []


def test_what_cannot_be_is_refused_by_name(workers: Workers) -> None:
    asked = [{"world_size": 4, "rank": 0}, {"backend": "nccl"}]
    reports = workers.run("mirrored", group_cells.refused, asked, workers=2)
    assert failures(reports) == []
    for rank, report in enumerate(reports):
        (world, backend), total = report.value
        assert total == 2.0
        assert world.startswith("ClusterError: init_process_group asks for another group")
        assert "%%distributed -n 4" in world
        assert f"world_size=2, rank={rank} here" in world
        assert backend.startswith("ClusterError: The backend that init_process_group asks for")
        assert "nccl on cpu" in backend
