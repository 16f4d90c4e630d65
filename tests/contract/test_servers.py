"""What strategies with servers must honour beyond the common suite: parametrised by the catalog."""

from __future__ import annotations

from typing import Any

import cells
import numpy as np
import pytest
import server_cells
from strategy_cases import FREE, NAME, SERVED, together
from worker_reports import Report, assert_same, clean
from workers import Workers

from workbench import catalog

pytestmark = pytest.mark.torch

LINKED = [entry for entry in SERVED if any(option.name == "link" for option in entry.options)]


# -- each worker at its own pace -------------------------------------------------------------------


@pytest.mark.parametrize("own_loop", [False, True], ids=["fit", "prepare"])
@pytest.mark.parametrize("entry", FREE, **NAME)
def test_free_workers_end_with_equal_weights(
    workers: Workers, entry: catalog.Strategy, own_loop: bool
) -> None:
    cell, extra = (
        (cells.train_from_loader, {"epochs": 2}) if own_loop else (cells.train, {"steps": 30})
    )
    reports = clean(
        workers.run(
            entry.name, cell, *([True] if own_loop else []), workers=3, keywords=extra,
            options={"servers": 2},
        )
    )  # fmt: skip
    for name, value in reports[0].weights.items():
        assert all((report.weights[name] == value).all() for report in reports)


@pytest.mark.parametrize("entry", FREE, **NAME)
def test_free_workers_stop_at_their_own_steps(workers: Workers, entry: catalog.Strategy) -> None:
    for options in ({}, {"max_staleness": 3}):
        reports = clean(
            workers.run(
                entry.name, server_cells.stopped_alone, [4, 9, 6], workers=3, options=options
            )
        )
        assert [report.value for report in reports] == [True] * 3
        assert [report.trained for report in reports] == [5, 10, 7]


def follow(told: dict[str, Any], pull_every: int, aware: bool) -> dict[str, np.ndarray]:
    """Gradient descent on a linear model by hand: several steps on each copy of the weights."""
    w, b = told["start"]["weight"].copy(), told["start"]["bias"].copy()
    for step in range(8):
        staleness = step % pull_every
        if staleness == 0:
            copy_w, copy_b = w.copy(), b.copy()
        rows = slice((step % 4) * 10, (step % 4) * 10 + 10)
        x, y = told["x"][rows], told["y"][rows]
        error = x @ copy_w.T + copy_b - y
        rate = 0.1 / max(1, staleness) if aware else 0.1
        w = w - rate * 2 / 10 * error.T @ x
        b = b - rate * 2 / 10 * error.sum(axis=0)
    return {"weight": w, "bias": b}


@pytest.mark.parametrize("aware", [False, True], ids=["plain", "aware"])
@pytest.mark.parametrize("entry", FREE, **NAME)
def test_steps_on_one_copy_and_the_learning_rates_of_stale_pushes(
    workers: Workers, entry: catalog.Strategy, aware: bool
) -> None:
    options = {"pull_every": 3, "staleness_aware_lr": aware}
    (report,) = clean(workers.run(entry.name, server_cells.steps_on_one_copy, options=options))
    assert report.rows["staleness"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    for name, value in follow(report.value, 3, aware).items():
        assert abs(report.weights[name] - value).max() < 1e-12
    other = follow(report.value, 3, not aware)
    assert abs(report.weights["weight"] - other["weight"]).max() > 1e-3


# -- whole and untorn ------------------------------------------------------------------------------

LAYOUTS = [
    pytest.param({"servers": 1}, id="one"),
    pytest.param({"servers": 2, "consistency": "snapshot"}, id="two, snapshot"),
    pytest.param({"servers": 2}, id="two, latest"),
]


@pytest.mark.parametrize("link", ["shared_memory", "tcp"])
@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("entry", FREE, **NAME)
def test_no_worker_ever_sees_half_an_update(
    workers: Workers, entry: catalog.Strategy, options: dict[str, Any], link: str
) -> None:
    options = {**options, "link": link}
    reports = clean(
        workers.run(entry.name, server_cells.count_up, 60, 100_000, workers=3, options=options)
    )
    for report in reports:
        assert report.value["torn"] == 0
        if options["servers"] == 1 or options.get("consistency") == "snapshot":
            assert report.value["mixed"] == 0
        assert report.value["seen"] == sorted(report.value["seen"])
    # No push is lost either: the final value counts them all.
    assert reports[0].weights["parts.0"].tolist() == [180.0] * 100_000


# -- every way of linking, every failure -----------------------------------------------------------


@pytest.mark.parametrize("link", ["shared_memory", "unix", "tcp"])
@pytest.mark.parametrize("entry", LINKED, **NAME)
def test_every_link_gives_the_same_numbers(
    workers: Workers, entry: catalog.Strategy, link: str
) -> None:
    truth = workers.truth(cells.train)
    options = {**together(entry), "link": link}
    reports = clean(workers.run(entry.name, cells.train, workers=2, options=options))
    for report in reports:
        for name, value in truth.weights.items():
            assert abs(report.weights[name] - value).max() <= 1e-10


@pytest.mark.parametrize("entry", SERVED, **NAME)
def test_parameters_without_a_gradient_are_left_alone(
    workers: Workers, entry: catalog.Strategy
) -> None:
    truth = workers.truth(server_cells.unused_now_and_then, 12)
    reports = clean(
        workers.run(
            entry.name, server_cells.unused_now_and_then, 12, workers=2, options=together(entry)
        )
    )
    for name, value in truth.weights.items():
        assert abs(reports[0].weights[name] - value).max() <= 1e-10


@pytest.mark.parametrize("table", [False, True], ids=["whole", "table"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("entry", SERVED, **NAME)
def test_a_saved_state_goes_on_where_it_was(
    workers: Workers, entry: catalog.Strategy, count: int, table: bool
) -> None:
    if table and workers.kind == "fakegpu":
        pytest.skip("the tests' GPU has no sparse kernels")
    reports = clean(
        workers.run(
            entry.name, server_cells.save_and_go_on, 4, 5, workers=count, options=together(entry),
            keywords={"table": table},
        )
    )  # fmt: skip
    for report in reports:
        differences, parts = report.value
        assert max(differences) <= 1e-12
        assert parts == ["model", "optimizer", "scheduler"]


@pytest.mark.parametrize("own_loop", [False, True], ids=["fit", "prepare"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("entry", SERVED, **NAME)
def test_what_workers_and_servers_hold_is_told(
    workers: Workers, entry: catalog.Strategy, count: int, own_loop: bool
) -> None:
    options = {entry.servers_option: count} if entry.servers_option else {}
    reports = clean(
        workers.run(
            entry.name, cells.train_from_loader, own_loop, workers=3, options=options,
            keywords={"epochs": 1},
        )
    )  # fmt: skip
    whole = (8 * 16 + 16 + 16 * 3 + 3) * 8  # the model in float64
    held = [report.emitted("log")[0]["values"]["memory_bytes"] for report in reports]
    assert held == [2 * whole] * 3  # parameters and gradients: the optimizer has no state here
    servers = reports[0].emitted("server")
    assert [report.emitted("server") for report in reports[1:]] == [[], []]
    assert sorted(told["server"] for told in servers) == list(range(entry.server_count(options)))
    for kind, copies in (("parameters", 1), ("optimizer", 1), ("gradients", 3)):
        assert sum(told[f"{kind}_bytes"] for told in servers) == copies * whole


TABLES = [
    pytest.param({}, {}, id="adagrad"),
    pytest.param({"kind": "sgd"}, {}, id="sgd"),
    pytest.param({"kind": "sparse_adam"}, {}, id="sparse adam"),
    pytest.param({"own_loop": True}, {}, id="own loop"),
    pytest.param({}, {"servers": 3}, id="three servers"),
    pytest.param({}, {"link": "tcp"}, id="tcp"),
]


@pytest.mark.parametrize(("keywords", "options"), TABLES)
@pytest.mark.parametrize("entry", SERVED, **NAME)
def test_rows_of_tables_train_as_on_one_device(
    workers: Workers, entry: catalog.Strategy, keywords: dict[str, Any], options: dict[str, Any]
) -> None:
    if "servers" in options and not entry.servers_option:
        options = {}
    if workers.kind == "fakegpu":
        pytest.skip("the tests' GPU has no sparse kernels")
    truth = workers.truth(server_cells.tables, **keywords)
    reports = clean(
        workers.run(
            entry.name, server_cells.tables, workers=3, keywords=keywords,
            options=together(entry) | options,
        )
    )  # fmt: skip
    assert_same(reports, truth, 1e-12)


@pytest.mark.parametrize("servers", [1, 2])
def test_the_norm_of_rows_and_of_whole_tensors_is_one(workers: Workers, servers: int) -> None:
    """PyTorch cannot clip sparse gradients; whole tables with zeros elsewhere have their norm."""
    if workers.kind == "fakegpu":
        pytest.skip("the tests' GPU has no sparse kernels")
    truth = workers.truth(server_cells.tables, sparse=False, clip=0.05)
    unclipped = workers.truth(server_cells.tables, sparse=False)
    assert abs(truth.weights["head.weight"] - unclipped.weights["head.weight"]).max() > 1e-4
    reports = clean(
        workers.run(
            "parameter_server", server_cells.tables, workers=2, keywords={"clip": 0.05},
            options={"sync": True, "servers": servers},
        )
    )  # fmt: skip
    assert_same(reports, truth, 1e-6)


FREE_TABLES = [
    {}, {"pull_every": 2}, {"max_staleness": 1}, {"servers": 2},
    {"servers": 2, "consistency": "snapshot"},
]  # fmt: skip


@pytest.mark.parametrize("options", FREE_TABLES, ids=str)
@pytest.mark.parametrize("entry", FREE, **NAME)
def test_free_workers_learn_of_every_row_that_changes(
    workers: Workers, entry: catalog.Strategy, options: dict[str, Any]
) -> None:
    """At the end all have what the servers have, also rows that another one pushed long ago."""
    if workers.kind == "fakegpu":
        pytest.skip("the tests' GPU has no sparse kernels")
    reports = clean(
        workers.run(
            entry.name, server_cells.tables, workers=3, keywords={"steps": 12}, options=options
        )
    )
    start = clean(workers.run("one_device", server_cells.tables, keywords={"steps": 1}))[0]
    for name, value in reports[0].weights.items():
        assert all((report.weights[name] == value).all() for report in reports)
        if not name.startswith("head"):
            moved = (value != start.weights[name]).any(axis=1)
            assert moved.any()
            assert not moved[-1]


@pytest.mark.parametrize("entry", SERVED, **NAME)
def test_what_is_sent_and_held_for_a_table_follows_its_rows_in_use(
    workers: Workers, entry: catalog.Strategy
) -> None:
    if workers.kind == "fakegpu":
        pytest.skip("the tests' GPU has no sparse kernels")
    sent: dict[tuple[int, bool], float] = {}
    held: dict[tuple[int, bool], float] = {}
    on_server: dict[tuple[int, bool], float] = {}
    for rows in (400, 40_000):
        for sparse in (True, False):
            reports = clean(
                workers.run(
                    entry.name, server_cells.tables, workers=2, options=together(entry),
                    keywords={"rows": rows, "sparse": sparse},
                )
            )  # fmt: skip
            sent[rows, sparse] = float(np.median(reports[0].rows["sent_bytes"]))
            log = reports[0].emitted("log")[0]["values"]["memory_bytes"]
            held[rows, sparse] = log - rows * 2 * 3 * 8  # without the tables themselves
            (told,) = reports[0].emitted("server")
            on_server[rows, sparse] = told["gradients_bytes"]
    head = 14 * 8
    assert sent[400, True] <= head + 6 * 2 * (8 + 24)  # half of 12 samples, a row of each table
    assert sent[40_000, True] == pytest.approx(sent[400, True], rel=0.2)
    assert sent[40_000, False] == head + 40_000 * 2 * 24
    assert held[40_000, True] < 0.01 * held[40_000, False]
    assert on_server[40_000, True] < 0.01 * on_server[40_000, False]


REFUSED = {
    "own class": "WB-FIT-115", "closure": "closure",
    "sparse momentum": "WB-FIT-185",
    "sparse function": "WB-FIT-126",
    "setting": "'note' cannot be sent",
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("entry", SERVED, **NAME)
def test_what_servers_cannot_do_is_named(
    workers: Workers, entry: catalog.Strategy, kind: str
) -> None:
    reports = clean(workers.run(entry.name, server_cells.refused, kind, workers=2))
    assert all(REFUSED[kind] in report.value for report in reports)


@pytest.mark.parametrize("entry", SERVED, **NAME)
def test_clipping_a_share_of_a_sum_is_refused(workers: Workers, entry: catalog.Strategy) -> None:
    options = together(entry)
    reports = clean(
        workers.run(entry.name, server_cells.refused, "clip", workers=2, options=options)
    )
    assert all("WB-FIT-125" in report.value for report in reports)
    # Alone, or at its own pace, a worker's gradient is the whole of its push.
    alone = clean(workers.run(entry.name, server_cells.refused, "clip", options=options))
    assert alone[0].value == "no error"
    if not entry.sync:
        free = clean(workers.run(entry.name, server_cells.refused, "clip", workers=2))
        assert [report.value for report in free] == ["no error"] * 2


@pytest.mark.parametrize("entry", [e for e in SERVED if e.servers_option], **NAME)
def test_more_servers_than_tensors_are_refused(workers: Workers, entry: catalog.Strategy) -> None:
    options = {entry.servers_option: 3}
    reports = clean(workers.run(entry.name, server_cells.refused, "servers", options=options))
    assert "WB-FIT-132" in reports[0].value


@pytest.mark.parametrize("fails_first", [False, True], ids=["both", "the first fails"])
@pytest.mark.parametrize("entry", SERVED, **NAME)
def test_a_cell_may_train_twice(
    workers: Workers, entry: catalog.Strategy, fails_first: bool
) -> None:
    reports = clean(
        workers.run(
            entry.name, server_cells.two_trainings, fails_first, workers=2, options=together(entry)
        )
    )
    assert [report.value for report in reports] == [[0 if fails_first else 10, 10]] * 2


@pytest.mark.parametrize("who", ["worker", "server"])
@pytest.mark.parametrize("entry", SERVED, **NAME)
def test_a_killed_process_ends_in_a_named_error(entry: catalog.Strategy, who: str) -> None:
    pool = Workers(3)
    try:
        victim = pool.processes[1 if who == "worker" else 2].pid
        reports = pool.run(
            entry.name, server_cells.kill_in_mid_run, victim, 5, workers=2,
            options=together(entry),
        )  # fmt: skip
        survivors: list[Report] = [r for r in reports if r.error and r.error != "died"]
        if who == "worker":
            assert reports[1].error == "died"
            assert "worker 1 has left" in str(reports[0].error)
        else:
            assert len(survivors) == 1  # the first report tells of the server's death
            assert reports[0].error == "died"
            assert all(one in str(reports[1].error) for one in ("server s0", "WB-RUN-020"))
        assert all(report.left == [] for report in survivors)
    finally:
        pool.close()
