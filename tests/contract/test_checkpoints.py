"""A run that goes on from a checkpoint ends as one never interrupted, under every strategy."""

from __future__ import annotations

import re
from pathlib import Path

import checkpoint_cells as cells
import numpy as np
import pytest
from worker_reports import failures
from workers import Workers

from workbench import catalog
from workbench.cookbook.recipe import Recipe
from workbench.shared import checkpoints
from workbench.shared.plan import make_plan

TORCH = catalog.strategies("torch")
SYNC = [entry.name for entry in TORCH if entry.sync]


def workers_of(name: str, count: int = 2) -> int:
    return make_plan(Recipe("x"), name, workers=count).workers


def clean(reports):
    assert not failures(reports), failures(reports)[0]
    return reports


def weights(reports):
    return {key: value for report in reports for key, value in report.weights.items()}


def resumed(workers, name, folder, function, *args, step=12, count=2, options=None, **keywords):
    return clean(
        workers.run(
            name, function, *args, workers=workers_of(name, count), options=options,
            resume=str(folder / f"step-{step}"), keywords=keywords,
        )
    )  # fmt: skip


def interrupted(workers, name, folder, function, *args, every=6, count=2, options=None, **keywords):
    reports = workers.run(
        name, function, *args, workers=workers_of(name, count), options=options,
        checkpoint=str(folder), checkpoint_every=every, keywords=keywords,
    )  # fmt: skip
    return clean(reports)


def apart(one, other):
    assert one.keys() == other.keys()
    return max(float(np.abs(one[key] - other[key]).max()) for key in one)


OPTIONS = [
    *((name, {}) for name in SYNC),
    ("mirrored", {"compress": "topk:0.2", "allreduce": "auto"}),
    ("mirrored", {"compress": "powersgd:1"}),
    ("mirrored", {"allreduce": "ring"}),
    ("local_sgd", {"every": "5"}),
    ("local_sgd", {"every": "5", "fraction": "0.5"}),
    ("local_sgd", {"every": "5", "outer": "nesterov"}),
    ("local_sgd", {"every": "5", "outer": "nesterov", "fragments": "3"}),
    ("gossip", {"graph": "exponential"}),
    ("parameter_server", {"sync": "true", "servers": "2"}),
    ("model_split", {"schedule": "zero_bubble"}),
]


@pytest.mark.parametrize(
    ("name", "options"), OPTIONS, ids=[f"{n}-{'-'.join(o.values())}" for n, o in OPTIONS]
)
def test_the_same_workers_go_on_bit_for_bit(
    workers: Workers, tmp_path: Path, name: str, options: dict[str, str]
) -> None:
    whole = clean(workers.run(name, cells.trained, 20, workers=workers_of(name), options=options))
    first = interrupted(workers, name, tmp_path, cells.trained, 13, options=options)
    assert [one.step for one in checkpoints.found(tmp_path)] == [12, 13]
    assert [e["step"] for e in first[0].emitted("checkpoint")] == [6, 12, 13]
    again = resumed(workers, name, tmp_path, cells.trained, 20, options=options)
    assert apart(weights(again), weights(whole)) == 0.0
    assert again[0].rows["step"].tolist() == list(range(12, 20))
    np.testing.assert_array_equal(again[0].rows["local_loss"], whole[0].rows["local_loss"][12:])
    assert not any(report.left for report in [*first, *again])


ELSEWHERE = [e for e in TORCH if e.sync and e.exact_with is not None and e.max_workers != 1]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
@pytest.mark.parametrize("entry", ELSEWHERE, ids=lambda entry: entry.name)
def test_another_number_of_workers_goes_on_to_the_same_result(
    workers: Workers, tmp_path: Path, entry: catalog.Strategy, before: int, after: int
) -> None:
    options = {name: str(value) for name, value in entry.exact_with}
    whole = clean(workers.run("one_device", cells.trained, 20))
    interrupted(workers, entry.name, tmp_path, cells.trained, 13, count=before, options=options)
    again = resumed(workers, entry.name, tmp_path, cells.trained, 20, count=after, options=options)
    assert apart(weights(again), weights(whole)) <= 1e-10
    notes = " ".join(note["text"] for note in again[0].emitted("note"))
    assert re.search(rf"\b{before}\b.*\b{after}\b", notes)


@pytest.mark.parametrize("after", ["sharded", "central_storage", "model_split", "one_device"])
def test_another_strategy_goes_on_as_well(workers: Workers, tmp_path: Path, after: str) -> None:
    whole = clean(workers.run("one_device", cells.trained, 20))
    interrupted(workers, "mirrored", tmp_path, cells.trained, 13)
    again = resumed(workers, after, tmp_path, cells.trained, 20)
    assert apart(weights(again), weights(whole)) <= 1e-10


@pytest.mark.parametrize(
    "name", ["one_device", "mirrored", "central_storage", "sharded", "local_sgd", "model_split"]
)
def test_dropout_draws_the_same_masks_as_if_never_interrupted(
    workers: Workers, tmp_path: Path, name: str
) -> None:
    # Measured times may cut a pipeline elsewhere the next time; each stage draws its own masks.
    options = {"split_at": "3"} if name == "model_split" else {}
    count = workers_of(name)
    whole = clean(workers.run(name, cells.trained, 20, 0.5, True, workers=count, options=options))
    interrupted(workers, name, tmp_path, cells.trained, 13, 0.5, True, options=options)
    again = resumed(workers, name, tmp_path, cells.trained, 20, 0.5, True, options=options)
    assert apart(weights(again), weights(whole)) == 0.0


LOOPS = [e.name for e in TORCH if e.sync and "prepare" in e.ways]


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("step", [10, 12])
def test_an_own_loop_goes_on_where_its_loader_was(
    workers: Workers, tmp_path: Path, name: str, step: int
) -> None:
    whole = clean(workers.run(name, cells.looped, 4, workers=workers_of(name)))
    every = {10: 5, 12: 6}[step]  # at an epoch's end, and in the middle of one
    interrupted(workers, name, tmp_path, cells.looped, 3, limit=13, every=every)
    again = resumed(workers, name, tmp_path, cells.looped, 4, step=step)
    assert apart(weights(again), weights(whole)) == 0.0
    assert again[0].value == 20 - step
    assert again[0].rows["step"].tolist() == list(range(step, 20))


def test_the_end_of_a_run_is_saved_and_can_be_trained_on_from(
    workers: Workers, tmp_path: Path
) -> None:
    whole = clean(workers.run("mirrored", cells.looped, 4, workers=2))
    interrupted(workers, "mirrored", tmp_path, cells.looped, 2, every=100)
    assert checkpoints.latest(tmp_path).step == 10
    again = resumed(workers, "mirrored", tmp_path, cells.looped, 4, step=10)
    assert apart(weights(again), weights(whole)) == 0.0
    done = resumed(workers, "mirrored", tmp_path, cells.looped, 2, step=10)
    assert done[0].value == 0


@pytest.mark.parametrize("options", [{}, {"max_staleness": "1", "servers": "2"}])
def test_pushes_go_on_from_where_the_first_worker_was(
    workers: Workers, tmp_path: Path, options: dict[str, str]
) -> None:
    name = "parameter_server"
    first = interrupted(workers, name, tmp_path, cells.trained, 13, options=options)
    still = resumed(workers, name, tmp_path, cells.trained, 13, step=13, options=options)
    assert apart(weights(still), weights(first)) == 0.0  # no push was lost at the end
    again = resumed(workers, name, tmp_path, cells.trained, 20, step=12, options=options)
    assert [report.rows["step"].tolist() for report in again] == [list(range(12, 20))] * 2


def test_one_worker_and_its_servers_go_on_bit_for_bit(workers: Workers, tmp_path: Path) -> None:
    name, options = "parameter_server", {"servers": "2"}
    whole = clean(workers.run(name, cells.trained, 20, options=options))
    interrupted(workers, name, tmp_path, cells.trained, 13, count=1, options=options)
    again = resumed(workers, name, tmp_path, cells.trained, 20, count=1, options=options)
    assert apart(weights(again), weights(whole)) == 0.0


def test_earlier_trainings_of_a_cell_are_done_again(workers: Workers, tmp_path: Path) -> None:
    whole = clean(workers.run("mirrored", cells.twice, workers=2))
    interrupted(workers, "mirrored", tmp_path, cells.twice, last=9)
    assert checkpoints.latest(tmp_path).step == 15
    again = resumed(workers, "mirrored", tmp_path, cells.twice, step=12)
    assert apart(weights(again), weights(whole)) == 0.0
    assert again[0].rows["step"].tolist() == [*range(6), *range(12, 18)]


def test_another_model_is_refused_on_every_worker(workers: Workers, tmp_path: Path) -> None:
    interrupted(workers, "mirrored", tmp_path, cells.trained, 6)
    reports = workers.run("mirrored", cells.twice, workers=2, resume=str(tmp_path / "step-6"))
    assert len(failures(reports)) == 2
    assert all("WB-FIT-003" in text for text in failures(reports))


def test_a_loop_that_distributes_itself_cannot_be_saved(workers: Workers, tmp_path: Path) -> None:
    reports = workers.run(
        "mirrored", cells.watched, workers=2, checkpoint=str(tmp_path), checkpoint_every=5
    )
    assert "remove --checkpoint" in failures(reports)[0]


@pytest.mark.parametrize("kind", ["noisy", "stream", "processes"])
def test_every_kind_of_data_goes_on_with_the_next_batch(
    workers: Workers, tmp_path: Path, kind: str
) -> None:
    whole = clean(workers.run("mirrored", cells.sampled, kind, 20, workers=2))
    interrupted(workers, "mirrored", tmp_path, cells.sampled, kind, 13)
    again = resumed(workers, "mirrored", tmp_path, cells.sampled, kind, 20)
    assert apart(weights(again), weights(whole)) == 0.0


ORDERS = ["sampler", "stream", "sized stream"]


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("step", [10, 12])
def test_an_order_that_depends_on_earlier_epochs_goes_on(
    workers: Workers, tmp_path: Path, kind: str, step: int
) -> None:
    whole = clean(workers.run("mirrored", cells.in_order, kind, 20, workers=2))
    interrupted(workers, "mirrored", tmp_path, cells.in_order, kind, 13, every=step // 2)
    again = resumed(workers, "mirrored", tmp_path, cells.in_order, kind, 20, step=step)
    assert apart(weights(again), weights(whole)) == 0.0


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize(("step", "leaves"), [(10, None), (12, None), (12, 2)])
def test_an_own_loop_goes_on_in_an_order_that_depends_on_earlier_epochs(
    workers: Workers, tmp_path: Path, kind: str, step: int, leaves: int | None
) -> None:
    told = {"leaves": leaves}
    whole = clean(workers.run("mirrored", cells.in_order, kind, workers=2, keywords=told))
    interrupted(
        workers, "mirrored", tmp_path, cells.in_order, kind, limit=13, every=step // 2, **told
    )
    again = resumed(workers, "mirrored", tmp_path, cells.in_order, kind, step=step, **told)
    assert apart(weights(again), weights(whole)) == 0.0
    assert again[0].rows["step"].tolist() == list(range(step, whole[0].value))


@pytest.mark.parametrize(
    ("name", "options"),
    [("mirrored", {"allreduce": "ring"}), ("sharded", {}), ("central_storage", {})],
)
def test_three_workers_go_on_bit_for_bit(
    workers: Workers, tmp_path: Path, name: str, options: dict[str, str]
) -> None:
    whole = clean(workers.run(name, cells.trained, 20, workers=3, options=options))
    interrupted(workers, name, tmp_path, cells.trained, 13, count=3, options=options)
    again = resumed(workers, name, tmp_path, cells.trained, 20, count=3, options=options)
    assert apart(weights(again), weights(whole)) == 0.0


def test_other_batches_are_refused(workers: Workers, tmp_path: Path) -> None:
    interrupted(workers, "mirrored", tmp_path, cells.trained, 6)
    reports = workers.run(
        "mirrored", cells.trained, 20, workers=2, resume=str(tmp_path / "step-6"),
        overrides={"batch_size": 20},
    )  # fmt: skip
    assert len(failures(reports)) == 2
    assert "WB-FIT-067" in failures(reports)[0]
