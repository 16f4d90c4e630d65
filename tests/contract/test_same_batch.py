"""Workers that need the same batch are compared; other batches end the run with a clear message."""

from __future__ import annotations

import pytest
import same_batch_cells
from worker_reports import clean
from workers import Workers

pytestmark = pytest.mark.torch

PIPELINES = {"model_split": 2, "hybrid": 4}


def codes(reports: list) -> set[str]:
    """Return the codes of the errors; a worker that was only interrupted has none of its own."""
    words = [word for report in reports for word in (report.error or "").split()]
    return {word.strip("[]().,") for word in words if "WB-FIT" in word}


@pytest.mark.parametrize(("name", "count"), PIPELINES.items())
def test_a_pipeline_whose_stages_read_other_pairs_is_ended(
    workers: Workers, name: str, count: int
) -> None:
    reports = workers.run(name, same_batch_cells.train, "both", True, workers=count)
    assert "WB-FIT-189" in codes(reports)


@pytest.mark.parametrize(("name", "count"), PIPELINES.items())
@pytest.mark.parametrize(("draws", "own_seed"), [("both", False), ("x", True)])
def test_a_pipeline_may_draw_equal_pairs_or_only_other_inputs(
    workers: Workers, name: str, count: int, draws: str, own_seed: bool
) -> None:
    clean(workers.run(name, same_batch_cells.train, draws, own_seed, workers=count))


def test_tensor_parallel_computes_one_batch(workers: Workers) -> None:
    run = workers.run
    clean(run("tensor_parallel", same_batch_cells.train, "x", workers=2))
    reports = run("tensor_parallel", same_batch_cells.train, "x", True, workers=2)
    assert "WB-FIT-190" in codes(reports)


STREAMS = ["mirrored", "sharded", "central_storage", "parameter_server", "local_sgd", "gossip"]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_every_worker_shuffles_in_its_own_way_is_ended(
    workers: Workers, name: str
) -> None:
    cell = same_batch_cells.train
    clean(workers.run(name, cell, "order", False, "stream", workers=2))
    reports = workers.run(name, cell, "order", True, "stream", workers=2)
    assert "WB-FIT-188" in codes(reports)


def test_a_stream_without_targets_is_only_warned_of(workers: Workers) -> None:
    cell = same_batch_cells.train
    same = clean(workers.run("mirrored", cell, "order", False, "untargeted", workers=2))
    other = clean(workers.run("mirrored", cell, "order", True, "untargeted", workers=2))
    assert [report.emitted("warning") for report in same] == [[], []]
    told = [each["text"] for report in other for each in report.emitted("warning")]
    assert len(set(told)) == 1


def test_a_stream_may_change_its_inputs_in_other_ways(workers: Workers) -> None:
    clean(workers.run("mirrored", same_batch_cells.train, "x", True, "stream", workers=2))


@pytest.mark.parametrize(
    ("read", "processes", "warnings"), [("stream", 2, 1), ("stream", 1, 0), ("divided", 2, 0)]
)
def test_a_stream_that_each_process_of_its_loader_reads_whole_is_warned_of(
    workers: Workers, read: str, processes: int, warnings: int
) -> None:
    reports = workers.run(
        "mirrored", same_batch_cells.train, "order", False, read, processes, workers=2
    )
    told = [each["text"] for report in clean(reports) for each in report.emitted("warning")]
    assert len(set(told)) == warnings
