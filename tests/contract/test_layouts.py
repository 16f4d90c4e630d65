"""What the strategies promise that lay a model out, or let replicas drift, beyond the suite."""

from __future__ import annotations

from collections import Counter
from typing import Any

import cells
import layout_cells
import numpy as np
import pytest
import server_cells
import split_cells
from worker_reports import assert_same, clean, joined, more_ms
from workers import Workers

from workbench.shared import record

pytestmark = pytest.mark.torch

FOUR = {
    "sharded, layer by layer": ("sharded", {"unit_mb": "0"}),
    "sharded, kept for backward": ("sharded", {"unit_mb": "0", "reshard": "false"}),
    "tensor_parallel": ("tensor_parallel", {}),
    "hybrid, 2 x 2": ("hybrid", {"stages": "2"}),
    "hybrid, 2 x 2, gpipe": ("hybrid", {"schedule": "gpipe", "microbatches": "3"}),
    "hybrid, 4 x 1": ("hybrid", {"stages": "1"}),
}


@pytest.fixture(scope="module")
def four() -> Any:
    pool = Workers(4)
    yield pool
    pool.close()


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("case", FOUR)
def test_four_workers_train_exactly_as_one_device_does(
    four: Workers, case: str, optimizer: str
) -> None:
    name, options = FOUR[case]
    keywords = {"optimizer": optimizer, "clip": 0.5}
    truth = four.truth(cells.train, **keywords)
    reports = clean(four.run(name, cells.train, workers=4, options=options, keywords=keywords))
    assert_same(reports, truth, 1e-10)


@pytest.mark.parametrize("style", ["named", "normed"])
@pytest.mark.parametrize("name", ["sharded", "tensor_parallel"])
def test_attention_trains_exactly(workers: Workers, name: str, style: str) -> None:
    options = {"unit_mb": "0"} if name == "sharded" else {}
    keywords = {"style": style, "clip": 0.5}
    truth = workers.truth(layout_cells.attention, **keywords)
    reports = clean(
        workers.run(name, layout_cells.attention, workers=2, options=options, keywords=keywords)
    )
    assert_same(reports, truth, 1e-10)
    if name == "tensor_parallel":
        (note,) = (n["text"] for n in reports[0].emitted("note") if "divided" in n["text"])
        # A guess is followed only where it computes what the model computes.
        assert ("0.fc1=col, 0.fc2=row" in note) == (style == "named")
        assert ("q_proj=heads" in note) == (style == "named")


@pytest.mark.parametrize("name", ["sharded", "tensor_parallel"])
def test_a_built_optimizer_goes_on_after_the_run(workers: Workers, name: str) -> None:
    truth = workers.truth(layout_cells.built_optimizer)
    reports = clean(workers.run(name, layout_cells.built_optimizer, workers=2))
    assert_same(reports, truth, 1e-10)
    assert [report.value for report in reports] == [truth.value] * 2
    assert truth.value["same parameters"]
    assert truth.value["in the optimizer"]


def test_shards_take_their_part_of_the_memory(workers: Workers) -> None:
    options = {"unit_mb": "0", "gather": "first"}
    reports = clean(
        workers.run("sharded", layout_cells.held_while_training, workers=3, options=options)
    )
    held = [report.value for report in reports]
    for kind, copies in (("parameters", 1), ("moments", 2)):
        parts = [each[kind] for each in held]
        assert sum(parts) == copies * held[0]["whole"]
        assert max(parts) <= 0.45 * sum(parts)
    assert [set(each["after"]) for each in held] == [{"cpu"}, {"meta"}, {"meta"}]
    assert [len(report.weights) for report in reports] == [4, 0, 0]
    logged = [report.emitted("log")[0]["values"]["memory_bytes"] for report in reports]
    # Parameters, gradients and two moments, and a step counter for each of the four parameters.
    assert [(each["parameters"] * 2 + each["moments"]) * 4 + 4 * 4 for each in held] == logged


def test_the_given_plan_is_followed(workers: Workers) -> None:
    truth = workers.truth(cells.train)
    options = {"plan": "0=gathered,2=split_row"}
    reports = clean(workers.run("tensor_parallel", cells.train, workers=2, options=options))
    assert_same(reports, truth, 1e-10)
    assert "0=gathered, 2=split_row" in reports[0].emitted("note")[0]["text"]


def test_bytes_of_collectives_are_counted(workers: Workers) -> None:
    keywords = {"batch": 20, "steps": 5}
    numbers = 8 * 16 + 16 + 16 * 4 + 4  # 3 rows are filled up to 4, to be shared by two
    reports = clean(workers.run("sharded", cells.train, workers=2, keywords=keywords))
    # Half the whole for the gather in forward (kept for backward), half for the scatter.
    assert (joined(reports)["sent_bytes"] == numbers * 8).all()
    reports = clean(workers.run("tensor_parallel", cells.train, workers=2, keywords=keywords))
    # A pair of layers: one all-reduce of the output forward, none of the input backward.
    assert joined(reports)["sent_bytes"] == pytest.approx(np.full((5, 2), 20 * 3 * 8))


@pytest.mark.parametrize("name", ["sharded", "model_split"])
def test_a_run_shows_no_warning_of_pytorchs(workers: Workers, name: str) -> None:
    reports = clean(workers.run(name, layout_cells.warned, workers=2))
    assert [report.value for report in reports] == [[], []]


def test_parametrized_layers_train_beside_divided_ones(workers: Workers) -> None:
    reports = clean(workers.run("tensor_parallel", layout_cells.parametrized, workers=2))
    assert_same(reports, workers.truth(layout_cells.parametrized), 1e-10)


REFUSED = {
    "attribute": (("sharded", "tensor_parallel"), {}, "attribute kept of Keeps"),
    "complex": (("sharded",), {}, "torch.view_as_complex"),
    "no layer": (("tensor_parallel",), {}, "WB-FIT-151"),
    "different": (("sharded", "local_sgd", "gossip"), {}, "WB-FIT-127"),
    "plan": (("tensor_parallel",), {"plan": "7=col"}, "WB-FIT-153"),
    "style": (("tensor_parallel",), {"plan": "0=up"}, "WB-FIT-152"),
    "classes": (("local_sgd",), {"skew": "0.5"}, "WB-FIT-058"),
    "grid": (("hybrid",), {"stages": "3"}, "WB-FIT-114"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_laid_out_is_refused_everywhere(workers: Workers, kind: str) -> None:
    names, options, says = REFUSED[kind]
    for name in names:
        reports = clean(workers.run(name, layout_cells.refused, kind, workers=2, options=options))
        assert [says in report.value for report in reports] == [True, True], reports[0].value


@pytest.mark.timing
def test_local_sgd_sends_and_waits_at_the_end_of_a_round_alone(workers: Workers) -> None:
    faults = ("slow=1:20ms",)
    reports = clean(
        workers.run(
            "local_sgd", cells.slow_steps, False, 12, 2, workers=2, options={"every": "4"},
            faults=faults,
        )
    )  # fmt: skip
    rows, last = joined(reports), slice(3, None, 4)
    derived = record.derive(rows)
    between = np.setdiff1d(np.arange(12), np.arange(12)[last])
    assert (derived.sync_wait_s[between] == 0).all()
    assert (rows["sent_bytes"][between] == 0).all()
    numbers = sum(value.size for value in reports[0].weights.values())
    assert (rows["sent_bytes"][last] == numbers * 4).all()  # 2 (n-1)/n of them, n = 2
    assert np.median(derived.sync_wait_s[last, 0]) * 1e3 == pytest.approx(4 * 20, abs=8)
    assert (derived.sync_wait_s[last, 1] == 0).all()


def test_a_fraction_of_the_workers_trains_in_each_round(workers: Workers) -> None:
    options = {"every": "3", "fraction": "0.5"}
    reports = clean(workers.run("local_sgd", layout_cells.drifting, workers=3, options=options))
    rows = joined(reports)
    rounds = rows["samples"].reshape(8, 3, 3)
    assert ((rounds > 0).sum(axis=2) == 2).all()  # two of three
    assert (rounds[:, 0] == rounds[:, 1]).all()
    assert len({tuple(r) for r in (rounds[:, 0] > 0).tolist()}) > 1  # not always the same two
    assert np.isnan(rows["local_loss"][rows["samples"] == 0]).all()
    loss = record.derive(rows).loss
    assert loss[-1] < loss[0]
    assert all(
        (a == b).all() for a, b in zip(*(r.weights.values() for r in reports[:2]), strict=True)
    )


def test_skewed_shards_differ_and_come_again_with_the_seed(workers: Workers) -> None:
    def given(skew: str, seed: int) -> list[list[int]]:
        reports = clean(
            workers.run(
                "local_sgd", layout_cells.drifting, workers=2, options={"skew": skew},
                overrides={"seed": seed},
            )
        )  # fmt: skip
        return [report.value for report in reports]

    def distance(parts: list[list[int]]) -> float:
        shares = [np.array([Counter(p)[c] for c in range(4)]) / len(p) for p in parts]
        return float(abs(shares[0] - shares[1]).sum())

    uneven = given("0.1", 1)
    assert uneven == given("0.1", 1)
    assert uneven != given("0.1", 2)
    assert distance(uneven) > 2 * distance(given("1000", 1))


@pytest.mark.parametrize("graph", ["ring", "exponential"])
def test_gossip_keeps_the_mean_and_brings_replicas_together(four: Workers, graph: str) -> None:
    keywords = {"steps": 6, "lr": 0.0, "apart": True}
    options = {"graph": graph, "spread_every": "1"}
    reports = clean(
        four.run("gossip", layout_cells.drifting, workers=4, options=options, keywords=keywords)
    )
    for report in reports:
        for value in report.weights.values():
            assert np.allclose(value, 1.5)  # the mean of 0, 1, 2, 3
    logged = [[log["values"] for log in report.emitted("log")] for report in reports]
    spread = np.array([[each["spread"] for each in own if "spread" in each] for own in logged])
    assert spread.shape == (4, 6)
    assert spread[:, 0].min() >= 1
    if graph == "exponential":  # 2^k workers have met all others after k steps
        assert (spread[:, 2:] == 0).all()
    else:
        assert (spread[:, -1] > 0).all()
        assert (spread[:, -1] < 0.1 * spread[:, 0]).all()
    flats = 1 if graph == "exponential" else 2
    assert (joined(reports)["sent_bytes"] == flats * 36 * 8).all()


@pytest.mark.parametrize("name", ["local_sgd", "gossip"])
def test_drifting_replicas_learn(workers: Workers, name: str) -> None:
    reports = clean(workers.run(name, layout_cells.drifting, workers=3, keywords={"lr": 0.5}))
    loss = record.derive(joined(reports)).loss
    assert loss[-1] < 0.7 * loss[0]


@pytest.mark.timing
@pytest.mark.parametrize("name", ["sharded", "tensor_parallel", "hybrid", "local_sgd", "gossip"])
def test_a_simulated_link_takes_its_time(workers: Workers, name: str) -> None:
    options = {"every": "1"} if name == "local_sgd" else {}
    reports = clean(
        workers.run(
            name, cells.slow_steps, False, 10, 2, workers=2, options=options,
            faults=("latency=20ms",),
        )
    )  # fmt: skip
    rows = joined(reports)
    exposed = np.nanmedian(rows["exposed_s"], axis=0)
    assert exposed.max() >= 0.020


@pytest.mark.parametrize("name", ["sharded", "tensor_parallel", "hybrid", "local_sgd"])
def test_a_state_is_that_of_one_device_and_can_be_gone_back_to(workers: Workers, name: str) -> None:
    options = {"every": "1"} if name == "local_sgd" else {}
    truth = workers.truth(layout_cells.checkpointed)
    reports = clean(workers.run(name, layout_cells.checkpointed, workers=2, options=options))
    state = reports[0].value
    kinds = ["model"] if name == "local_sgd" else ["model", "moments"]  # it keeps own moments
    for kind in kinds:
        assert state[kind].keys() == truth.value[kind].keys()
        for key, value in truth.value[kind].items():
            assert abs(state[kind][key] - value).max() <= 1e-10, key
    final = {key: value for report in reports for key, value in report.weights.items()}
    for key, value in truth.value["model"].items():
        assert abs(final[key] - value).max() <= 1e-10, key


@pytest.mark.parametrize("name", ["local_sgd", "gossip"])
def test_replicas_that_drift_reach_one_devices_loss_within_half_again_its_samples(
    workers: Workers, name: str
) -> None:
    truth = workers.truth(server_cells.digits, 10)
    reports = clean(workers.run(name, server_cells.digits, 15, workers=3))
    samples = sum(int(report.rows["samples"].sum()) for report in reports)
    assert samples <= 1.5 * truth.rows["samples"].sum()
    assert max(report.value for report in reports) <= truth.value


@pytest.mark.timing
@pytest.mark.parametrize("slow", range(4))
def test_a_slow_worker_anywhere_in_the_grid_is_the_others_wait(workers: Workers, slow: int) -> None:
    """2 pipelines x 2 stages: its neighbour waits in the pipeline, the others in the sum.

    Stages idle without it too (the schedule's bubble), so what it adds is read.
    """
    rows = joined(
        clean(
            workers.run(
                "hybrid", split_cells.sleeping, 3, 2, 4, 60, workers=4, options={"stages": 2},
                faults=(f"slow={slow}:50ms",), by_turns=True,
            )
        )
    )  # fmt: skip
    others = [rank for rank in range(4) if rank != slow]
    sync_wait_s = record.derive(rows).sync_wait_s
    waits_ms = more_ms(sync_wait_s)
    assert waits_ms[others] == pytest.approx(50, abs=5)
    assert (more_ms(sync_wait_s, 0.5)[others] <= 55).all()
    assert waits_ms[slow] < 5
    step = np.arange(60)
    derived = record.derive(rows[(step // 5 % 2 == 1) & (step % 5 > 0)])
    blamed_ms = np.median(derived.blamed_s, axis=0) * 1e3
    assert blamed_ms[others] == pytest.approx(50, abs=5)
    assert blamed_ms[slow] == 0
    assert (derived.blamed_rank[:, others] == slow).mean() >= 0.95
    assert (derived.blamed_rank[:, slow] == slow).sum() == 0


@pytest.mark.parametrize("name", ["one_device", "mirrored", "local_sgd", "gossip"])
def test_what_each_worker_of_an_own_loop_holds_is_logged(workers: Workers, name: str) -> None:
    count = 1 if name == "one_device" else 2
    reports = clean(workers.run(name, cells.train_from_loader, True, workers=count))
    for report in reports:
        (logged,) = report.emitted("log")[:1]
        assert logged["values"] == {"memory_bytes": 3 * 195 * 8}


@pytest.mark.parametrize("name", ["one_device", "mirrored", "sharded", "tensor_parallel", "hybrid"])
def test_what_each_worker_holds_is_logged(workers: Workers, name: str) -> None:
    count = 1 if name == "one_device" else 2
    reports = clean(workers.run(name, cells.train, workers=count))
    held = [report.emitted("log")[0]["values"]["memory_bytes"] for report in reports]
    whole = 3 * 195 * 8  # parameters, gradients, momentum of 195 float64
    if name in ("one_device", "mirrored"):
        assert held == [whole] * count
    else:
        assert max(held) < whole
        assert sum(held) == pytest.approx(whole, rel=0.1)
