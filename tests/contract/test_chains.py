"""Parts of the parameters that two servers hold: either may die, and no step is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import chain_cells
import numpy as np
import pytest
from strategy_cases import FREE, NAME, SERVED, together
from worker_reports import Report, assert_same, clean, failures, joined
from workers import Workers

from workbench import catalog
from workbench.catalog.diagrams import messages
from workbench.errors import PlanError
from workbench.history.analysis.step_picture import part_bytes, share_out

pytestmark = pytest.mark.torch

CHAINED = [entry for entry in SERVED if entry.copies_option]
WHOLE = (8 * 16 + 16 + 16 * 3 + 3) * 8
"""Bytes of the network of `chain_cells.train`."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    pool = Workers(5)
    yield pool
    pool.close()


def pids(pool: Workers, workers: int, servers: Sequence[int]) -> list[int]:
    """Return the processes of servers, after a death of fresh ones."""
    if not all(process.is_alive() for process in pool.processes):
        pool._abandon(0)
    pool._grow(5)
    return [pool.processes[workers + server].pid for server in servers]


def twofold(entry: catalog.Strategy, servers: int = 1, **more: Any) -> dict[str, Any]:
    """Return the options with which each part is held twice and all step together."""
    options = {entry.servers_option: servers} if entry.servers_option else {}
    return {**options, **together(entry), entry.copies_option: 2, **more}


def ends_well(
    pool: Workers, entry: catalog.Strategy, options: dict[str, Any], dead: Sequence[int],
    cell: Any = chain_cells.train, *args: Any, **keywords: Any,
) -> list[Report]:  # fmt: skip
    """Run a cell with two workers, whose servers `dead` die; check that nothing else does."""
    reports = clean(
        pool.run(
            entry.name, cell, *args, workers=2, options=options, keywords=keywords, doomed=dead
        )
    )
    notes = [told["text"] for told in reports[0].emitted("note")]
    taken = [text for text in notes if "took over" in text]
    assert all("no step" in text for text in taken)
    return reports


CASES = [
    (entry, servers) for entry in CHAINED for servers in ((1, 2) if entry.servers_option else (1,))
]
SERVERS = {"ids": [f"{entry.name}-{servers}" for entry, servers in CASES]}


# -- nobody dies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["shared_memory", "tcp"])
@pytest.mark.parametrize(("entry", "servers"), CASES, **SERVERS)
def test_copies_change_nothing_of_what_is_trained(
    pool: Workers, entry: catalog.Strategy, servers: int, link: str
) -> None:
    truth = pool.truth(chain_cells.train)
    reports = ends_well(pool, entry, twofold(entry, servers, link=link), ())
    assert_same(reports, truth, 1e-10)
    told = sorted(reports[0].emitted("server"), key=lambda one: one["server"])
    assert [one["server"] for one in told] == [0, 1]
    assert sum(one["parameters_bytes"] for one in told) == WHOLE
    # Of a copy there are parameters, momentum, and one gradient, whatever the number of workers.
    assert sum(one["copies_bytes"] for one in told) == 3 * WHOLE
    assert [one["copies_bytes"] > 0 for one in told] == [servers == 2, True]


@pytest.mark.parametrize("sync", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("servers", [1, 2])
def test_what_is_sent_to_copies_is_counted_as_drawn(
    pool: Workers, servers: int, sync: bool
) -> None:
    entry, steps = catalog.lookup("parameter_server"), 6
    options = {"servers": servers, "sync": sync, "replicas": 2}
    reports = ends_well(pool, entry, options, (), steps=steps)
    drawn = messages("parameter_server", 2, options)
    held = {one["server"]: one for one in reports[0].emitted("server")}
    known = {"M": float(WHOLE), **part_bytes(held)}
    expected = [
        [drawn.sent_bytes(f"w{rank}", known, step) for rank in (0, 1)] for step in range(steps)
    ]
    assert joined(reports)["sent_bytes"].tolist() == expected
    sent = {rank: expected[0][rank] for rank in (0, 1)}
    arrows = share_out(drawn, 0, sent, known)
    copies = [k for k, phase in enumerate(drawn.phases) if phase.title == "Copy"]
    of_copies = sum(size for (phase, _), size in arrows.items() if phase in copies)
    assert of_copies == pytest.approx(WHOLE * (1 if sync else 2))


def test_one_version_of_all_servers_and_copies_exclude_each_other() -> None:
    with pytest.raises(PlanError, match=r"replicas.*consistency.*WB-PLAN-007"):
        catalog.lookup("parameter_server").settings({"consistency": "snapshot", "replicas": 2})


@pytest.mark.parametrize("given", [0, 3, "two"])
def test_there_are_one_or_two_of_each_part(given: Any) -> None:
    with pytest.raises(PlanError):
        catalog.lookup("central_storage").settings({"replicas": given})


# -- one dies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [0, 1], ids=["s0", "s1"])
@pytest.mark.parametrize("moment", ["between", "before", "sent", "random"])
@pytest.mark.parametrize(("entry", "servers"), CASES, **SERVERS)
def test_a_dead_server_loses_no_step(
    pool: Workers, entry: catalog.Strategy, servers: int, moment: str, dead: int,
    record_property: Any,
) -> None:  # fmt: skip
    truth = pool.truth(chain_cells.train)
    reports = ends_well(
        pool, entry, twofold(entry, servers), (dead,),
        victims=pids(pool, 2, [dead]), at=7, moment=moment,
    )  # fmt: skip
    assert_same(reports, truth, 1e-10)
    assert [report.trained for report in reports] == [20, 20]
    record_property("pause_s", max(report.value["pause_s"] for report in reports))
    if dead < servers:
        assert dead not in reports[0].value["servers"]


@pytest.mark.parametrize("killer", [0, 1])
@pytest.mark.parametrize("link", ["shared_memory", "unix", "tcp"])
def test_on_every_link(pool: Workers, link: str, killer: int) -> None:
    entry = catalog.lookup("parameter_server")
    reports = ends_well(
        pool, entry, twofold(entry, 2, link=link), (0,),
        victims=pids(pool, 2, [0]), at=5, moment="sent", killer=killer,
    )  # fmt: skip
    assert_same(reports, pool.truth(chain_cells.train), 1e-10)


@pytest.mark.parametrize("at", [1, 9, 20])
@pytest.mark.parametrize("where", ["own", "copy"])
@pytest.mark.parametrize(("entry", "servers"), CASES, **SERVERS)
def test_a_server_that_dies_in_the_middle_of_a_step_loses_none(
    pool: Workers, entry: catalog.Strategy, servers: int, where: str, at: int
) -> None:
    """The copy has the step that nobody was answered; or the server waits for a dead copy."""
    pids(pool, 2, [])
    # The part of s0 has one tensor of four where there are two servers, or all of them.
    tensors = {1: 4, 2: 1}[servers]
    dead = {"own": 0, "copy": 1}[where]
    reports = ends_well(pool, entry, twofold(entry, servers), (dead,), dying=(where, at, tensors))
    assert_same(reports, pool.truth(chain_cells.train), 1e-10)


@pytest.mark.parametrize("moment", ["before", "sent", "random"])
def test_a_gradient_that_several_servers_clip_is_clipped_once(pool: Workers, moment: str) -> None:
    entry = catalog.lookup("parameter_server")
    for at in (3, 4, 8):
        reports = ends_well(
            pool, entry, twofold(entry, 2), (0,),
            victims=pids(pool, 2, [0]), at=at, moment=moment, clip=0.05,
        )  # fmt: skip
        assert_same(reports, pool.truth(chain_cells.train, clip=0.05), 1e-10)


@pytest.mark.parametrize("dead", [0, 1], ids=["s0", "s1"])
@pytest.mark.parametrize("servers", [1, 2])
def test_rows_of_tables_survive(pool: Workers, servers: int, dead: int) -> None:
    entry = catalog.lookup("parameter_server")
    victims = pids(pool, 2, [dead])
    reports = ends_well(
        pool, entry, twofold(entry, servers), (dead,), chain_cells.tables, victims, 5
    )
    assert_same(reports, pool.truth(chain_cells.tables, [], 5), 1e-12)


@pytest.mark.parametrize("at", [-1, 4], ids=["between trainings", "in the first"])
@pytest.mark.parametrize("dead", [0, 1], ids=["s0", "s1"])
@pytest.mark.parametrize(("entry", "servers"), CASES, **SERVERS)
def test_a_cell_goes_on_training(
    pool: Workers, entry: catalog.Strategy, servers: int, dead: int, at: int
) -> None:
    victims = pids(pool, 2, [dead])
    reports = ends_well(
        pool, entry, twofold(entry, servers), (dead,), chain_cells.twice, victims, at
    )
    assert [report.value for report in reports] == [[10, 10]] * 2


# -- each worker at its own pace -------------------------------------------------------------------

PACES = [{}, {"max_staleness": 1}, {"pull_every": 3}, {"staleness_aware_lr": True}]


@pytest.mark.parametrize("dead", [0, 1], ids=["s0", "s1"])
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("pace", PACES, ids=str)
@pytest.mark.parametrize("entry", FREE, **NAME)
def test_every_push_counts_once(
    pool: Workers, entry: catalog.Strategy, pace: dict[str, Any], servers: int, dead: int
) -> None:
    options = {"servers": servers, "replicas": 2, **pace}
    reports = ends_well(
        pool, entry, options, (dead,), chain_cells.count_up, 60, pids(pool, 2, [dead]), 25
    )
    for report in reports:
        assert report.value == {"torn": 0, "back": 0}
        for name, value in report.weights.items():
            if "staleness_aware_lr" in pace:  # then a push adds less where it is stale
                assert 0 < value.min() <= value.max() <= 120, name
            else:
                assert value.tolist() == [120.0] * 500, name
    if "max_staleness" in pace:
        assert np.nanmax(joined(reports)["staleness"]) <= 2 * pace["max_staleness"] + 1


# -- both die --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("entry", "servers"), CASES, **SERVERS)
def test_who_has_lost_both_says_so(pool: Workers, entry: catalog.Strategy, servers: int) -> None:
    reports = pool.run(
        entry.name, chain_cells.train, workers=2, options=twofold(entry, servers), doomed=(0, 1),
        keywords={"victims": pids(pool, 2, [0, 1]), "at": 7},
    )  # fmt: skip
    assert len(failures(reports)) == 2
    assert all("WB-RUN-140" in str(report.error) for report in reports)
    assert [report.left for report in reports] == [[], []]
