"""What a step sends, as data: every strategy has it, and its arrows and sizes make sense."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from workbench import catalog
from workbench.catalog import schedules
from workbench.catalog.diagrams import KINDS, Diagram, Kind, messages
from workbench.errors import PlanError

NAMED = {"ids": lambda entry: f"{entry.framework}-{entry.name}"}
M = 1000.0


def diagram(name: str, workers: int, framework: str = "torch", **options: Any) -> Diagram:
    return messages(name, workers, options, framework=framework)


def sent(drawn: Diagram, step: int = 0, **units: float) -> list[float]:
    return [drawn.sent_bytes(f"w{rank}", units, step) for rank in range(drawn.workers)]


@pytest.mark.parametrize("entry", catalog.CATALOG, **NAMED)
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_every_strategy_has_a_diagram_whose_parts_fit(
    entry: catalog.Strategy, workers: int
) -> None:
    drawn = diagram(entry.name, workers, entry.framework)
    count = min(workers, entry.max_workers or workers)
    assert [node.rank for node in drawn.nodes if node.rank is not None] == list(range(count))
    servers = [node for node in drawn.nodes if node.kind == "server"]
    assert len(servers) == entry.server_count(entry.settings({}))
    known = {node.id for node in drawn.nodes}
    assert len(known) == len(drawn.nodes)
    assert {name for phase in drawn.phases for name in phase.busy} >= {n.id for n in servers}
    for phase in drawn.phases:
        assert phase.busy or phase.arrows
        assert set(phase.busy) <= known
        assert 0 <= phase.offset < phase.every
        assert bool(phase.arrows) == bool(phase.formula)
        for arrow in phase.arrows:
            assert {arrow.source, arrow.target} <= known
            assert arrow.source != arrow.target
            assert arrow.size.unit in drawn.units
            assert arrow.kind in get_args(Kind)
            assert arrow.kind in KINDS
    assert drawn.source
    assert json.loads(json.dumps(drawn.to_wire(), allow_nan=False))["workers"] == count


@pytest.mark.parametrize("entry", catalog.CATALOG, **NAMED)
def test_with_several_workers_everybody_takes_part(entry: catalog.Strategy) -> None:
    drawn = diagram(entry.name, 4, entry.framework)
    talking = {end for p in drawn.phases for a in p.arrows for end in (a.source, a.target)}
    assert talking == ({node.id for node in drawn.nodes} if drawn.workers > 1 else set())


@pytest.mark.parametrize("entry", [e for e in catalog.CATALOG if e.servers_option], **NAMED)
def test_servers_are_drawn_as_many_as_asked_for(entry: catalog.Strategy) -> None:
    drawn = diagram(entry.name, 3, entry.framework, servers=2)
    for kind, end in (("gradients", "target"), ("weights", "source")):
        arrows = [a for p in drawn.phases for a in p.arrows if a.kind == kind]
        assert {getattr(arrow, end) for arrow in arrows} == {"s0", "s1"}
    assert sent(drawn, M0=600.0, M1=400.0) == [1000.0] * 3


@pytest.mark.parametrize(
    ("algorithm", "workers", "factors"),
    [
        ("backend", 4, [1.5] * 4),
        ("ring", 4, [1.5] * 4),
        ("recursive_doubling", 4, [2.0] * 4),
        ("recursive_doubling", 3, [2.0, 1.0, 1.0]),
        ("reduce_to_one", 4, [3.0, 1.0, 1.0, 1.0]),
        ("hierarchical", 4, [2.0, 1.0, 2.0, 1.0]),
    ],
)
def test_each_all_reduce_sends_what_its_algorithm_counts(
    algorithm: str, workers: int, factors: list[float]
) -> None:
    drawn = diagram("mirrored", workers, allreduce=algorithm)
    assert sent(drawn, M=M) == pytest.approx([factor * M for factor in factors])


def test_an_all_reduce_makes_everybody_hear_of_everybody() -> None:
    for algorithm in ("ring", "hierarchical", "reduce_to_one", "recursive_doubling"):
        for workers in (2, 3, 5, 8):
            drawn = diagram("mirrored", workers, allreduce=algorithm)
            knows = {node.id: {node.id} for node in drawn.nodes}
            for phase in drawn.phases:
                for _ in range(max((a.times for a in phase.arrows), default=0)):
                    before = {name: set(known) for name, known in knows.items()}
                    for arrow in phase.arrows:
                        knows[arrow.target] |= before[arrow.source]
            assert all(len(known) == workers for known in knows.values()), algorithm


def test_local_sgd_sends_at_the_end_of_a_round_alone() -> None:
    drawn = diagram("local_sgd", 4, every=5)
    assert [sum(sent(drawn, step, P=M)) > 0 for step in range(10)] == ([False] * 4 + [True]) * 2
    assert sent(drawn, 4, P=M) == pytest.approx([1.5 * M] * 4)


def test_fragments_meet_in_turn_and_send_as_much_in_all() -> None:
    for every, fragments in ((6, 3), (5, 3), (4, 4), (50, 4)):
        drawn = diagram("local_sgd", 4, every=every, fragments=fragments, outer="nesterov")
        steps = [sent(drawn, step, P=M)[0] for step in range(2 * every)]
        turns = [step + 1 for step, size in enumerate(steps) if size]
        own = schedules.turns({"every": every, "fragments": fragments})
        assert turns == own + [every + turn for turn in own]
        assert max(steps) == pytest.approx(1.5 * M / fragments)
        assert sum(steps) == pytest.approx(2 * 1.5 * M)
    assert "outer momentum" in drawn.nodes[0].holds
    assert "rate 0.7" in drawn.notes[0]
    assert "momentum 0.9" in drawn.notes[0]


def test_fragments_need_a_step_each() -> None:
    with pytest.raises(PlanError, match=r"WB-PLAN-319[\s\S]*1 to 8"):
        diagram("local_sgd", 2, fragments=9)


def test_gossip_meets_one_peer_per_step_on_the_exponential_graph() -> None:
    drawn = diagram("gossip", 8, graph="exponential")
    hops = [
        {(int(a.target[1:]) - int(a.source[1:])) % 8 for p in drawn.phases if p.happens(step)
         for a in p.arrows}
        for step in range(6)
    ]  # fmt: skip
    assert hops == [{1}, {2}, {4}] * 2
    assert sent(diagram("gossip", 2), P=M) == [M, M]
    assert sent(diagram("gossip", 5), P=M) == [2 * M] * 5


def test_sharded_sends_half_as_much_again_as_an_all_reduce() -> None:
    assert sent(diagram("sharded", 4), M=M, U=M) == pytest.approx([2.25 * M] * 4)
    assert sent(diagram("sharded", 4, reshard=False), M=M) == pytest.approx([1.5 * M] * 4)


def test_a_pipeline_hands_each_batch_on_once_in_microbatches() -> None:
    drawn = diagram("model_split", 3, microbatches=6, schedule="gpipe")
    assert sent(drawn, A0=600.0, A1=300.0) == pytest.approx([600.0, 900.0, 300.0])
    assert {arrow.times for phase in drawn.phases for arrow in phase.arrows} == {6}
    wrapped = diagram("model_split", 2, schedule="interleaved", stages_per_worker=2)
    forward = [(a.source, a.target) for a in wrapped.phases[0].arrows]
    assert forward == [("w0", "w1"), ("w1", "w0"), ("w0", "w1")]


def test_a_grid_adds_up_between_holders_of_the_same_stage() -> None:
    drawn = diagram("hybrid", 4, stages=2)
    meet = next(phase for phase in drawn.phases if "All-reduce" in phase.title)
    assert {frozenset((a.source, a.target)) for a in meet.arrows} == {
        frozenset(("w0", "w2")), frozenset(("w1", "w3")),
    }  # fmt: skip
    units = {"A0": 100.0, "G0": M, "G1": M}
    assert sent(drawn, **units) == pytest.approx([1.0 * M + 100] * 4)


def test_what_is_not_known_is_not_a_number() -> None:
    drawn = diagram("tensor_parallel", 2)
    assert [value != value for value in sent(drawn, M=M)] == [True, True]
    assert sent(diagram("one_device", 1)) == [0.0]


@pytest.mark.parametrize("workers", [0, -1, 65, 2.5, True])
def test_unusable_numbers_of_workers_are_refused(workers: Any) -> None:
    with pytest.raises(PlanError):
        messages("mirrored", workers)


def test_a_pipeline_that_does_not_fit_is_refused_as_in_a_run() -> None:
    with pytest.raises(PlanError, match="WB-PLAN-083"):
        diagram("hybrid", 4, stages=3)


def test_the_messages_of_an_unknown_node_are_an_error() -> None:
    drawn = diagram("mirrored", 2)
    with pytest.raises(PlanError) as caught:
        drawn.sent_bytes("w2", {"M": 8.0}, 0)
    assert caught.value.code == "WB-PLAN-342"
    assert "w1" in str(caught.value)
