"""What really happened in a step: measured bytes on the strategy's diagram."""

from __future__ import annotations

import json

import numpy as np
import pytest
from history_rows import make_history, make_rows

from workbench.catalog.diagrams import messages
from workbench.errors import RunError
from workbench.history.analysis.step_picture import (
    chosen_algorithm,
    handed_bytes,
    part_bytes,
    share_out,
    step_picture,
)
from workbench.history.events import Story
from workbench.history.snapshot import Split
from workbench.shared.events import Topic, read
from workbench.views.explain.diagram import headline

NAN = float("nan")


def test_measured_bytes_divide_over_the_arrows_as_the_formula_says() -> None:
    drawn = messages("mirrored", 4, {"allreduce": "reduce_to_one"})
    sent = {0: 3300.0, 1: 1100.0, 2: 1100.0, 3: NAN}
    found = share_out(drawn, 0, sent, {})
    by_source: dict[str, list[float]] = {}
    for (p, a), amount in found.items():
        by_source.setdefault(drawn.phases[p].arrows[a].source, []).append(amount)
    assert by_source["w0"] == [1100.0] * 3
    assert by_source["w1"] == by_source["w2"] == [1100.0]
    assert np.isnan(by_source["w3"]).all()


def test_what_servers_send_is_not_made_up() -> None:
    drawn = messages("central_storage", 2)
    found = share_out(drawn, 0, {0: 100.0, 1: 100.0}, {})
    for (p, a), amount in found.items():
        arrow = drawn.phases[p].arrows[a]
        assert np.isnan(amount) == (arrow.source == "s0")


def test_several_servers_are_given_what_they_hold() -> None:
    drawn = messages("parameter_server", 2, {"servers": 2})
    held = {0: {"parameters_bytes": 75}, 1: {"parameters_bytes": 25}}
    found = share_out(drawn, 0, {0: 100.0, 1: 100.0}, part_bytes(held))
    pushed = {drawn.phases[p].arrows[a].target: amount for (p, a), amount in found.items()
              if drawn.phases[p].title == "Push"}  # fmt: skip
    assert pushed == {"s0": 75.0, "s1": 25.0}
    assert np.isnan(list(share_out(drawn, 0, {0: 100.0, 1: 100.0}, {}).values())).all()


def test_two_unknown_sizes_leave_the_arrows_open() -> None:
    drawn = messages("tensor_parallel", 2)
    assert np.isnan(list(share_out(drawn, 0, {0: 100.0, 1: 100.0}, {}).values())).all()


def test_in_a_grid_the_pipelines_part_is_known_and_the_rest_is_the_sum() -> None:
    drawn = messages("hybrid", 4, {"stages": 2})
    found = share_out(drawn, 0, dict.fromkeys(range(4), 700.0), {"A0": 200.0})
    first = {drawn.phases[p].title: amount for (p, a), amount in found.items()
             if drawn.phases[p].arrows[a].source == "w0"}  # fmt: skip
    assert first == {"Forward": 200.0, "All-reduce by stage": 500.0}
    # More than was sent cannot have been handed on.
    assert np.isnan(list(share_out(drawn, 0, {0: 100.0}, {"A0": 200.0}).values())).all()


def test_phases_that_were_not_part_of_the_step_have_no_bytes() -> None:
    history = make_history(make_rows(16, 2))
    drawn = messages("local_sgd", 2, {"every": 4})
    met, alone = step_picture(history, drawn, step=7), step_picture(history, drawn, step=6)
    assert set(met.arrow_bytes.values()) == {1000.0}
    assert alone.arrow_bytes == {}
    wire = json.loads(json.dumps(alone.to_wire(), allow_nan=False))
    assert [phase["happens"] for phase in wire["diagram"]["phases"]] == [True, True, False]


def test_the_latest_step_that_all_have_done_is_shown() -> None:
    rows = make_rows(10, 3, slow_rank=2, slow_s=0.02)
    history = make_history(rows[:9])
    history.append(rows[9, :2])  # worker 2 is still at it
    picture = step_picture(history, messages("mirrored", 3))
    assert picture.step == 8
    assert [worker.blamed for worker in picture.workers] == [2, 2, None]
    assert picture.workers[0].parts_s[2] == pytest.approx(0.02, rel=1e-3)
    assert picture.workers[0].step_s == pytest.approx(sum(picture.workers[0].parts_s), rel=1e-3)


@pytest.mark.parametrize(("slow_s", "named"), [(0.02, True), (0.0003, False)])
def test_the_headline_names_whom_it_was_worth_waiting_for(slow_s: float, named: bool) -> None:
    history = make_history(make_rows(10, 3, slow_rank=2, slow_s=slow_s))
    picture = step_picture(history, messages("mirrored", 3))
    assert ("for worker 2" in headline(picture)) is named


def test_workers_on_their_own_show_each_their_latest() -> None:
    rows = make_rows(10, 2)
    history = make_history(rows[:6], joined=False)
    history.append(rows[6:, 0])
    picture = step_picture(history, messages("parameter_server", 2))
    assert [worker.step for worker in picture.workers] == [9, 5]


def test_a_step_that_is_not_there_is_refused() -> None:
    with pytest.raises(RunError, match="WB-RUN-044") as caught:
        step_picture(make_history(make_rows(5, 2)), messages("mirrored", 2), step=9)
    assert "0 to 4" in str(caught.value.allowed)


def test_what_stages_hand_on_is_taken_from_the_split() -> None:
    stage = {"layers": "0", "parameters": 1, "microbatch_s": 0.1}
    split = Split.of({
        "stages": [{"stage": 0, "rank": 0, "handed_bytes": 50, **stage},
                   {"stage": 1, "rank": 1, "handed_bytes": None, **stage}],
        "schedule": "gpipe", "microbatches": 4, "ideal_bubble": 0.2,
    })  # fmt: skip
    assert handed_bytes(split) == {"A0": 200.0}
    assert handed_bytes(None) == {}


def test_the_algorithm_that_auto_took_is_what_its_note_is_about_whatever_the_words() -> None:
    story = Story()
    story.fold(read("note", {"text": "Gradients are averaged by ring, the fastest here."}), 1.0)
    assert chosen_algorithm(story) is None
    about = {"topic": Topic.ALLREDUCE_CHOSEN, "value": "recursive_doubling"}
    story.fold(read("note", {"text": "Alles wird gut.", **about}), 2.0)
    assert chosen_algorithm(story) == "recursive_doubling"


@pytest.mark.parametrize("value", [None, 3, ["ring"], {}])
def test_an_algorithm_without_a_name_is_none(value: object) -> None:
    story = Story()
    story.fold(read("note", {"text": "x", "topic": "allreduce_chosen", "value": value}), 1.0)
    story.fold(read("note", {"text": "y", "topic": ["allreduce_chosen"], "value": "ring"}), 1.0)
    assert chosen_algorithm(story) is None
