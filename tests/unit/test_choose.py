"""Which strategy is chosen, from runs whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from predicted_runs import GRADIENTS_BYTES, draw_own, made_run, ring_run

from workbench import catalog
from workbench.catalog import schedules
from workbench.errors import PlanError
from workbench.notebook.auto import chooses, reasons
from workbench.prediction.choose import Candidate, Race, Row, candidates
from workbench.shared.flags.several import memory_of
from workbench.shared.run_request import parse_cell_line
from workbench.views.explain.prediction import ChoicePicture

CHEAP, DEAR = (1e-4, 1e-10), (0.2, 1e-8)


def names(found: list[Candidate]) -> list[str]:
    return [one.name for one in found]


def race(link: tuple[float, float], *, workers: int = 2, allow_stale: bool = False,
         most_bytes: float | None = None, **sent: Any) -> Race:  # fmt: skip
    """Return a race in which replicas and one device were measured, on a link that is known."""
    rng = np.random.default_rng(7)
    entrants, out = candidates("torch", workers, {}, allow_stale=allow_stale)
    found = Race(entrants, out, most_bytes)
    replicas = ring_run(rng, *link, workers=workers, samples=8, **sent)
    # One device does all that the workers do, one after the other.
    own = draw_own(rng, 120, 1) * workers
    alone = made_run(own, own[:, 0], "one_device", sent_bytes=0.0, samples=8 * workers)
    for run in (replicas, alone):
        for rank in range(run.plan.workers):
            run.history.story.memory_bytes[rank] = 4 * GRADIENTS_BYTES
        run.history.story.started["parameters"] = GRADIENTS_BYTES / 4
        run.folder = Path("no such folder")
    found.measured = {"mirrored": replicas, "one_device": alone}
    return found


def test_only_what_trains_as_one_device_does_competes() -> None:
    found, out = candidates("torch", 4, {})
    assert names(found) == [
        "one_device", "mirrored", "central_storage", "parameter_server sync=True", "sharded",
        "model_split", "hybrid", "tensor_parallel",
    ]  # fmt: skip
    assert {row.candidate.name for row in out} == {"local_sgd", "gossip"}
    assert all("--allow-stale" in row.why for row in out)


def test_stale_gradients_compete_where_they_are_allowed() -> None:
    found, out = candidates("torch", 4, {}, allow_stale=True)
    assert {"parameter_server", "parameter_server sync=True", "local_sgd", "gossip"} <= {
        *names(found)
    }
    assert not out


def test_an_option_goes_to_those_that_have_it_and_is_meant() -> None:
    found, _ = candidates("torch", 2, {"compress": "fp16"})
    assert "mirrored compress=fp16" in names(found)
    assert "central_storage" in names(found)
    with pytest.raises(PlanError, match="WB-PLAN-312"):
        candidates("torch", 2, {"compres": "fp16"})


def test_two_workers_make_no_pipelines_side_by_side() -> None:
    _, out = candidates("torch", 2, {})
    assert "needs 4 workers" in next(r.why for r in out if r.candidate.name == "hybrid")
    assert names(candidates("torch", 1, {})[0]) == ["one_device"]


def test_tensorflow_has_its_own_entrants() -> None:
    found, _ = candidates("tensorflow", 2, {})
    assert {"one_device", "mirrored"} <= {*names(found)}
    assert "tpu" not in names(found)


def test_a_cheap_link_makes_replicas_win_and_one_device_a_dear_one() -> None:
    cheap, dear = race(CHEAP).choose(), race(DEAR).choose()
    assert cheap.winner is not None
    assert cheap.winner.candidate.name == "mirrored"
    assert "one device" in cheap.reason
    assert dear.winner is not None
    assert dear.winner.candidate.name == "one_device"
    json.dumps(cheap.to_wire(), allow_nan=False)


def test_others_are_predicted_from_replicas() -> None:
    found = {row.candidate.name: row for row in race(CHEAP).rows()}
    for name in ("central_storage", "parameter_server sync=True", "sharded"):
        assert found[name].known == "predicted", found[name].why
    assert found["model_split"].known == found["tensor_parallel"].known == "bounded"
    assert found["gossip"].known == "out"
    # Free messages leave a central copy at the pace of the slower of two workers.
    central, mirrored = found["central_storage"], found["mirrored"]
    assert central.samples_per_s[0] == pytest.approx(mirrored.samples_per_s[0], rel=0.05)


def test_stale_workers_wait_for_nobody_so_they_are_predicted_to_be_faster() -> None:
    found = race(DEAR, workers=4, allow_stale=True).choose()
    assert found.winner is not None
    assert found.winner.candidate.name in ("local_sgd", "gossip", "parameter_server")
    assert found.winner.known == "predicted"


def test_a_winner_that_gains_more_than_its_workers_is_doubted() -> None:
    found = race(CHEAP)
    assert not any("another program" in note for note in found.choose().notes)
    rng = np.random.default_rng(7)
    own = draw_own(rng, 120, 1) * 2  # one device, while another program had half of its core
    found.measured["one_device"] = made_run(
        own, 3 * own[:, 0], "one_device", sent_bytes=0.0, samples=16
    )
    assert any("another program" in note for note in found.choose().notes)


def test_a_prediction_wins_only_where_its_whole_interval_lies_above() -> None:
    found = race(CHEAP).choose()
    best = next(row for row in found.rows if row.known == "measured")
    for row in found.rows:
        if row.known == "predicted" and row.samples_per_s[1] > best.samples_per_s[0]:
            assert found.winner is row
            return
    assert found.winner is best
    open_ = [r for r in found.rows if r.known == "predicted" and
             r.samples_per_s[1] <= best.samples_per_s[0] < r.samples_per_s[2]]  # fmt: skip
    assert len([n for n in found.notes if "not measured" in n and "samples/s" in n]) == len(open_)


def test_compressed_messages_say_nothing_about_memory_and_other_messages(tmp_path: Path) -> None:
    whole = 4 * GRADIENTS_BYTES
    sent = {"compress": "topk:0.01", "size_bytes": 0.02 * GRADIENTS_BYTES}
    found = race(CHEAP, most_bytes=0.4 * whole, **sent)
    rows = {row.candidate.name: row for row in found.choose().rows}
    assert rows["central_storage"].memory_bytes == pytest.approx(whole / 2)
    assert rows["central_storage"].known == "out"
    rows = {row.candidate.name: row for row in race(CHEAP, **sent).choose().rows}
    assert rows["central_storage"].known == rows["sharded"].known == "bounded"
    # The file knows the type of the weights, and those that are not trained.
    np.savez(tmp_path / "weights.npz", a=np.zeros(1000), b=np.zeros(500))
    for run in found.measured.values():
        run.folder = tmp_path
        run.history.story.started["parameters"] = 500
    rows = {row.candidate.name: row for row in found.choose().rows}
    assert rows["central_storage"].memory_bytes == 8 * (1500 + 500)


def test_a_limit_leaves_out_what_needs_an_unknown_memory() -> None:
    found = race(CHEAP, most_bytes=1e12)
    for run in found.measured.values():
        del run.history.story.started["parameters"]
    rows = {row.candidate.name: row for row in found.choose().rows}
    assert rows["central_storage"].known == "out"
    assert rows["mirrored"].known == "measured"


def test_memory_leaves_those_out_that_hold_too_much() -> None:
    whole = 4 * GRADIENTS_BYTES
    found = race(CHEAP, most_bytes=0.6 * whole).choose()
    rows = {row.candidate.name: row for row in found.rows}
    assert rows["mirrored"].known == rows["one_device"].known == "out"
    assert "--memory-per-worker" in rows["mirrored"].why
    assert rows["sharded"].memory_bytes == pytest.approx(whole / 2)
    # Weights and gradients; the optimizer's state is the server's.
    assert rows["central_storage"].memory_bytes == pytest.approx(whole / 2, rel=0.01)
    assert found.winner is not None
    assert found.winner.candidate.name in ("sharded", "central_storage",
                                           "parameter_server sync=True")  # fmt: skip
    assert race(CHEAP, most_bytes=0.1 * whole).choose().winner is None


def test_what_refuses_is_out_with_its_reason() -> None:
    found = race(CHEAP)
    found.refused["model_split"] = "refused: one layer cannot be cut"
    row = next(r for r in found.rows() if r.candidate.name == "model_split")
    assert (row.known, row.why) == ("out", "refused: one layer cannot be cut")
    assert found.next() is None or found.next().name != "model_split"


def test_the_next_short_run_is_that_of_who_may_be_faster() -> None:
    """With dear messages a pipeline, which sends few, might win; with free ones nobody can."""
    asked = race((0.02, 1e-8), workers=4).next()
    assert asked is not None
    assert asked.name != "mirrored"
    free = race((0.0, 0.0))
    free.entrants = [one for one in free.entrants if one.entry.name != "tensor_parallel"]
    best = next(row for row in free.rows() if row.known == "measured").samples_per_s[0]
    left = free.next()
    assert left is None or next(
        r for r in free.rows() if r.candidate is left
    ).samples_per_s[2] > 1.02 * best  # fmt: skip


def test_a_pipeline_is_bounded_by_its_schedule() -> None:
    (one,) = [c for c in candidates("torch", 4, {})[0] if c.name == "model_split"]
    assert one.most_efficient == pytest.approx(1 - schedules.ideal_bubble("1f1b", 4, 8, 1))
    assert one.least_rounds == 6
    (mirrored,) = [c for c in candidates("torch", 4, {})[0] if c.name == "mirrored"]
    assert mirrored.most_efficient == 1.0


def test_every_strategy_says_what_a_worker_keeps() -> None:
    for entry in catalog.strategies("torch"):
        parts = entry.name in ("sharded", "model_split", "hybrid", "tensor_parallel")
        served = bool(entry.server_count(entry.settings({})))
        assert entry.keeps == ("part" if parts else "weights" if served else "all"), entry.name


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4GiB", 4 * 2**30), ("800MB", 8e8), ("1.5k", 1500), (4096, 4096), ("2 GB", 2e9)],
)
def test_memory_is_read_as_people_write_it(text: Any, size_bytes: float) -> None:
    assert memory_of(text) == size_bytes


@pytest.mark.parametrize("text", ["0", "-1GB", "much", "", True, "4GX"])
def test_no_memory_is_refused(text: Any) -> None:
    with pytest.raises(PlanError, match="WB-PLAN-313"):
        memory_of(text)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("auto,mirrored", "WB-PLAN-315"),
        ("auto -n 1,2", "WB-PLAN-315"),
        ("auto --background", "WB-PLAN-315"),
        ("auto --to-job x", "WB-PLAN-315"),
        ("auto --seeds 2", "WB-PLAN-315"),
        ("mirrored --memory-per-worker 1GB", "WB-PLAN-314"),
        ("mirrored --allow-stale", "WB-PLAN-314"),
    ],
)
def test_a_line_that_cannot_choose_says_so(line: str, code: str) -> None:
    with pytest.raises(PlanError, match=code):
        chooses(parse_cell_line(line))


def test_a_line_chooses_where_it_says_auto() -> None:
    assert chooses(parse_cell_line("auto -n 2 --memory-per-worker 4GiB --allow-stale"))
    assert not chooses(parse_cell_line("mirrored -n 2"))


def test_the_picture_shows_all_and_says_why() -> None:
    shown = ChoicePicture(**vars(race(CHEAP).choose()))
    text, drawn = repr(shown), shown.html()
    for name in ("mirrored", "central_storage", "model_split", "gossip"):
        assert name in text
        assert name in drawn
    assert text.startswith("Chosen: mirrored on 2 workers")
    assert "≤" in text
    assert "Left out" in drawn


def test_reasons_are_told_whole_and_each_once() -> None:
    why = "too large " * 100
    first, second, third = candidates("torch", 2, {})[0][:3]
    rows = [Row(first, "out", why=why), Row(second, "out", why="b"), Row(third, "out", why=why)]
    assert reasons(rows) == f"{first.name}, {third.name}: {why}; {second.name}: b"
