"""DiLoCo: `local_sgd` with an outer step, and fragments that meet in turn, against plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cells
import diloco_cells
import layout_cells
import numpy as np
import pytest
from diloco_cells import Plain
from worker_reports import Report, assert_same, clean, failures, joined
from workers import Workers

from workbench.shared import record

pytestmark = pytest.mark.torch

NUMBERS = 8 * 16 + 16 + 16 * 4 + 4
NUMBER_BYTES = 8
TOLERANCE = 1e-10
NESTEROV = {"outer": "nesterov"}


def assert_trained_as(plain: Plain, reports: list[Report]) -> None:
    """Check every worker's parameters, and the losses of every step, against the plain loop."""
    losses = record.derive(joined(reports)).loss
    assert len(losses) == len(plain.losses)
    assert abs(losses - np.array(plain.losses)).max() <= TOLERANCE
    for report in reports:
        assert report.weights.keys() == plain.weights().keys()
        for name, value in plain.weights().items():
            assert abs(report.weights[name] - value).max() <= TOLERANCE, name


def run(workers: Workers, count: int, options: dict[str, Any], *args: Any, **told: Any) -> Any:
    return clean(
        workers.run(
            "local_sgd", told.pop("cell", diloco_cells.fitted), *args, workers=count,
            options={key: str(value) for key, value in options.items()}, **told,
        )
    )  # fmt: skip


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("own_loop", [False, True], ids=["fit", "prepare"])
def test_a_whole_step_without_momentum_after_every_step_is_one_device(
    workers: Workers, count: int, own_loop: bool
) -> None:
    options = {"every": 1, "outer_lr": 1, "outer_momentum": 0, **NESTEROV}
    cell, args = (cells.train_from_loader, (True,)) if own_loop else (cells.train, ())
    reports = run(workers, count, options, *args, cell=cell)
    assert_same(reports, workers.truth(cell, *args), TOLERANCE)


ROUNDS = {
    "all at once": (12, {"every": 3}, [3]),
    "outer_lr and outer_momentum": (12, {"every": 3, "outer_lr": 1.1, "outer_momentum": 0.5}, [3]),
    "no momentum": (12, {"every": 3, "outer_momentum": 0}, [3]),
    "two fragments": (16, {"every": 4, "fragments": 2}, [2, 4]),
    "three fragments, turns at unequal distances": (15, {"every": 5, "fragments": 3}, [1, 3, 5]),
    "a turn in every step": (9, {"every": 3, "fragments": 3}, [1, 2, 3]),
    "the end within a round": (10, {"every": 4, "fragments": 2}, [2, 4]),
}
"""Steps, options, and after which steps of a round the fragments meet."""


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("case", ROUNDS)
def test_workers_train_as_replicas_in_one_process_do(
    workers: Workers, case: str, count: int, optimizer: str
) -> None:
    steps, options, turns = ROUNDS[case]
    outer = {"lr": options.get("outer_lr", 0.7), "momentum": options.get("outer_momentum", 0.9)}
    plain = Plain(count, options["every"], turns, optimizer=optimizer, **outer).train(steps)
    reports = run(workers, count, {**NESTEROV, **options}, steps, optimizer)
    assert_trained_as(plain, reports)


def test_fragments_are_averaged_in_turn_without_an_outer_step(workers: Workers) -> None:
    plain = Plain(3, 4, [1, 2, 4], momentum=None).train(10)
    assert_trained_as(plain, run(workers, 3, {"every": 4, "fragments": 3}, 10))


def test_an_own_loop_meets_in_turn(workers: Workers) -> None:
    # 4 steps an epoch: at its end the replicas become their mean, within a round too.
    plain = Plain(2, 6, [2, 4, 6]).train(4)
    for _ in range(2):
        vector = plain.mean()
        for model in plain.models:
            model.load_state_dict(vector.state_dict())
        plain.train(4)
    options = {"every": 6, "fragments": 3, **NESTEROV}
    assert_trained_as(plain, run(workers, 2, options, 3, cell=diloco_cells.looped))


def test_workers_that_sit_a_round_out_go_on_from_the_outer_step(workers: Workers) -> None:
    options = {"every": 3, "fraction": 0.5, **NESTEROV}
    reports = run(workers, 3, options, 12)
    taking = joined(reports)["samples"] > 0
    assert (taking.sum(axis=1) == 2).all()
    plain = Plain(3, 3, [3]).train(12, lambda step: np.flatnonzero(taking[step]).tolist())
    assert_trained_as(plain, reports)


@pytest.mark.parametrize("fragments", [1, 3])
def test_bytes_are_those_counted_by_hand(workers: Workers, fragments: int) -> None:
    reports = run(workers, 3, {"every": 6, "fragments": fragments, **NESTEROV}, 12)
    sent = joined(reports)["sent_bytes"]
    ends = [NUMBERS * place // fragments for place in range(fragments + 1)]
    for step in range(12):
        place, rest = divmod((step + 1) % 6 or 6, 6 // fragments)
        numbers = 0 if rest else ends[place] - ends[place - 1]
        assert (sent[step] == 2 * 2 / 3 * numbers * NUMBER_BYTES).all(), step
    whole = 2 * 2 / 3 * NUMBERS * NUMBER_BYTES
    assert sent.sum(axis=0) == pytest.approx([2 * whole] * 3)
    assert sent.max() <= whole / fragments + NUMBER_BYTES * 2


def test_nothing_is_sent_by_one_worker(workers: Workers) -> None:
    (report,) = run(workers, 1, {"every": 3, **NESTEROV}, 9)
    assert (report.rows["sent_bytes"] == 0).all()


def test_the_mean_is_evaluated_and_training_goes_on_as_if_it_was_not(workers: Workers) -> None:
    plain = Plain(2, 4, [2, 4]).train(10)
    reports = run(workers, 2, {"every": 4, "fragments": 2, **NESTEROV}, 10)
    x, y = plain.data
    import torch

    loss = torch.nn.functional.cross_entropy(plain.mean()(x), y)
    assert [report.value for report in reports] == pytest.approx([loss.item()] * 2, abs=TOLERANCE)


def test_a_frozen_layer_stays_as_it_is(workers: Workers) -> None:
    plain = Plain(2, 3, [3], frozen=True).train(9)
    reports = run(workers, 2, {"every": 3, **NESTEROV}, 9, "SGD", True)
    assert_trained_as(plain, reports)
    before = diloco_cells.task()[0][0].weight.detach().numpy()
    assert (reports[0].weights["0.weight"] == before).all()


@pytest.mark.parametrize("fragments", [1, 2])
def test_momentum_does_not_move_a_layer_that_was_frozen_meanwhile(
    workers: Workers, fragments: int
) -> None:
    options = {"every": 4, "fragments": fragments, **NESTEROV}
    reports = run(workers, 2, options, 4, 4, cell=diloco_cells.looped)
    # Frozen at the end of a round and of an epoch, where the replicas are equal.
    assert [report.value for report in reports] == pytest.approx([0, 0], abs=1e-12)


def test_running_statistics_become_their_mean(workers: Workers) -> None:
    def statistics(options: dict[str, Any]) -> Any:
        reports = run(workers, 2, {"every": 2, **options}, 7, cell=diloco_cells.normed)
        return np.array([report.value for report in reports])

    seen, averaged = statistics(NESTEROV), statistics({})
    assert seen == pytest.approx(averaged, abs=1e-12)  # they hang on the data alone
    for step in (2, 4, 6):
        assert (seen[0, step] == seen[1, step]).all()
        assert (seen[0, step - 1] != seen[1, step - 1]).any()


@pytest.mark.parametrize("fragments", ["1", "3"])
def test_uneven_data_is_learnt_from(workers: Workers, fragments: str) -> None:
    options = {"every": 4, "skew": 0.3, "fragments": fragments, "outer_momentum": 0.5, **NESTEROV}
    reports = run(workers, 3, options, cell=layout_cells.drifting, keywords={"lr": 0.3})
    loss = record.derive(joined(reports)).loss
    assert loss[-1] < 0.7 * loss[0]


def test_what_an_outer_step_keeps_counts_as_memory(workers: Workers) -> None:
    def held(**options: Any) -> list[float]:
        reports = run(workers, 2, options, 4)
        return [report.emitted("log")[0]["values"]["memory_bytes"] for report in reports]

    more = np.subtract(held(**NESTEROV), held())
    assert (more == 2 * NUMBERS * NUMBER_BYTES).all()


# -- going on --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize(("every", "turns"), [(4, [4]), (8, [2, 5, 8])])
def test_another_number_of_workers_goes_on_with_the_same_outer_steps(
    workers: Workers, tmp_path: Path, before: int, after: int, every: int, turns: list[int]
) -> None:
    # Inner SGD without momentum keeps no state, so by hand there is only the outer step's.
    options = {"every": every, "fragments": len(turns), **NESTEROV}
    plain = Plain(before, every, turns, optimizer="plain").train(6)
    plain.go_on_with(after).train(10)
    run(
        workers, before, options, 6, "plain", checkpoint=str(tmp_path), checkpoint_every=6,
    )  # fmt: skip
    reports = run(workers, after, options, 16, "plain", resume=str(tmp_path / "step-6"))
    plain.losses = plain.losses[6:]
    assert_trained_as(plain, reports)


def test_outer_steps_begin_where_averages_were(workers: Workers, tmp_path: Path) -> None:
    plain = Plain(2, 3, [3], optimizer="plain", momentum=None).train(6)
    run(
        workers, 2, {"every": 3}, 6, "plain", checkpoint=str(tmp_path), checkpoint_every=6,
    )  # fmt: skip
    reports = run(
        workers, 2, {"every": 3, **NESTEROV}, 12, "plain", resume=str(tmp_path / "step-6")
    )
    later = Plain(2, 3, [3], optimizer="plain")
    for model in later.models:
        model.load_state_dict(plain.mean().state_dict())
    for span, began in zip(later.spans, later.began, strict=True):
        began.data = diloco_cells._vector(plain.mean())[span]
    later.step = 6
    assert_trained_as(later.train(6), reports)


def test_a_checkpoint_of_another_model_is_refused(workers: Workers, tmp_path: Path) -> None:
    options = {"every": "3", **NESTEROV}
    run(workers, 2, options, 6, checkpoint=str(tmp_path), checkpoint_every=6)
    reports = workers.run(
        "local_sgd", cells.train, workers=2, options=options, resume=str(tmp_path / "step-6"),
        keywords={"batch": 25},
    )  # fmt: skip
    assert len(failures(reports)) == 2
    assert all("WB-FIT-003" in text for text in failures(reports))
