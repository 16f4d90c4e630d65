"""A history as a Chrome trace: by the format's rules, and with the history's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import trace_format
from history_rows import NAN, make_history, make_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_format import ns

from workbench.history.analysis import series
from workbench.shared.record import PARTS

ABOUT = series.About("base", "mirrored", "torch", "finished", ["cpu", "cuda:1"], ["slow=1:50ms"])
PHASES = {"data wait": "data_wait_s", "compute": "compute_s", "sync wait": "sync_wait_s",
          "transfer": "transfer_s", "other": "other_s"}  # fmt: skip


def events_of(history, about=ABOUT):
    return trace_format.check(
        {**series.header(history, about), "traceEvents": list(series.events(history, about))}
    )


def named(events, phase, name=None):
    return [e for e in events if e["ph"] == phase and name in (None, e["name"])]


def test_a_track_for_each_worker_named_after_its_device():
    history = make_history(make_rows(3, 2))
    history.hear("run_started", {"rank": 1, "device": "cuda:1 NVIDIA H200"})
    events = events_of(history)
    (title,) = named(events, "M", "process_name")
    assert title["args"]["name"] == "base: mirrored (torch)"
    tracks = {e["tid"]: e["args"]["name"] for e in named(events, "M", "thread_name")}
    assert list(tracks.values()) == ["rank 0 · engine 0 · cpu",
                                     "rank 1 · engine 1 · cuda:1 NVIDIA H200"]  # fmt: skip
    assert {e["tid"] for e in named(events, "X")} == set(tracks)
    assert 0 not in tracks


def test_every_row_is_a_slice_with_its_numbers():
    history = make_history(make_rows(20, 3, slow_rank=1, slow_s=0.02))
    history.hear("log", {"rank": 0, "step": 4, "values": {"lr": 0.25}})
    steps = [e for e in events_of(history) if e.get("cat") == "step"]
    assert len(steps) == len(history) == 60
    by_row = {(e["args"]["step"], e["args"]["rank"]): e for e in steps}
    columns = {name: history[name] for name in history}
    for at in range(len(history)):
        row = {name: values[at] for name, values in columns.items()}
        event = by_row[int(row["step"]), int(row["rank"])]
        for name, value in row.items():
            if name == "start_s":
                assert ns(event["ts"]) == pytest.approx(value * 1e9, abs=1)
            elif np.isnan(value):
                assert event["args"].get(name) is None
            else:
                assert event["args"][name] == pytest.approx(value, rel=1e-12), name
        assert ns(event["dur"]) == pytest.approx(row["step_s"] * 1e9, rel=1e-6)
    assert by_row[4, 0]["args"]["lr"] == 0.25
    assert by_row[4, 1]["args"]["lr"] is None


def test_phases_lie_in_their_step_and_add_up_to_it():
    history = make_history(make_rows(10, 2, slow_rank=0, slow_s=0.03))
    events = events_of(history)
    lengths = {(e["args"]["rank"], e["args"]["step"]): e["dur"] for e in events
               if e.get("cat") == "step"}  # fmt: skip
    found = trace_format.nested(events)
    assert set(found) == set(lengths)
    assert len(found) == 20
    for (rank, step), phases in found.items():
        assert sum(ns(p["dur"]) for p in phases) == ns(lengths[rank, step])
        at = np.flatnonzero((history["rank"] == rank) & (history["step"] == step))[0]
        for phase in phases:
            wanted = history[PHASES[phase["name"]]][at]
            assert phase["args"]["seconds"] == pytest.approx(wanted, rel=1e-6)
            assert ns(phase["dur"]) == pytest.approx(wanted * 1e9, abs=500)
        drawn = {p["name"] for p in phases}
        assert ("sync wait" in drawn) == (rank == 1), "the slow one waits for nobody"


def test_what_was_not_measured_has_no_slice_and_is_null():
    rows = make_rows(5, 2)
    rows["ready_s"] = rows["exposed_s"] = NAN
    events = events_of(make_history(rows))
    assert {e["name"] for e in events if e.get("cat") == "phase"} == {
        "data wait", "compute", "other"}  # fmt: skip
    step = next(e for e in events if e.get("cat") == "step")
    assert step["args"]["sync_wait_s"] is None
    assert step["args"]["staleness"] is None


def test_a_pipelines_bubble_is_taken_out_of_the_transfer():
    rows = make_rows(4, 2, transfer_s=0.005)
    rows["ready_s"], rows["exposed_s"] = NAN, 0.005
    rows["bubble_s"] = 0.005
    phases = [e["name"] for e in events_of(make_history(rows)) if e.get("cat") == "phase"]
    assert "bubble" in phases
    assert "transfer" not in phases


def test_counters_are_the_curves():
    history = make_history(make_rows(6, 2, samples=8))
    events = events_of(history)
    loss = [e["args"]["loss"] for e in named(events, "C", "loss")]
    assert loss == pytest.approx(history["loss"][::2])
    (rate, *_) = (e["args"]["samples/s"] for e in named(events, "C", "samples/s"))
    assert rate == pytest.approx(16 / history["step_s"].max(), rel=1e-6)


def test_asynchronous_workers_count_each_for_themselves():
    rows = make_rows(6, 2)
    rows["staleness"] = 1.5
    rows["start_s"][:, 1] += 0.004
    rows["end_s"][:, 1] += 0.004
    events = events_of(make_history(rows, joined=False))
    assert {e["name"] for e in named(events, "C")} == {
        f"{name} rank {rank}" for name in ("loss", "samples/s", "staleness") for rank in (0, 1)
    }


def test_what_happened_once_stands_at_its_time():
    history = make_history(make_rows(6, 2))
    history.hear("eval", {"step": 3, "epoch": 0, "values": {"accuracy": 0.5}, "t_s": 100.05})
    history.hear("note", {"text": "look here", "t_s": 100.01})
    history.hear("death", {"text": "Rank 1 is gone", "rank": 1, "t_s": 100.06})
    history.hear("inject", {"faults": ["slow=0:5ms"], "t_s": 100.02})
    history.hear("paused", {"rank": 0, "step": 4, "t_s": 100.03})
    history.hear("note", {"text": "from before the first step", "t_s": 99.0})
    found = {e["cat"]: e for e in named(events_of(history), "i") if e["ts"] > 0}
    assert {kind: ns(e["ts"]) for kind, e in found.items()} == {
        "eval": 50_000_000, "note": 10_000_000, "death": 60_000_000, "inject": 20_000_000,
        "paused": 30_000_000,
    }  # fmt: skip
    assert found["eval"]["args"] == {"accuracy": 0.5}
    assert (found["death"]["s"], found["death"]["tid"]) == ("t", 2)
    assert found["eval"]["s"] == "p"
    early = [e["name"] for e in named(events_of(history), "i") if e["ts"] == 0]
    assert early == ["faults: slow=1:50ms", "from before the first step"]


def test_what_has_a_step_stands_at_this_step_however_late_the_notebook_heard_of_it():
    history = make_history(make_rows(12, 2))  # a step takes 16 ms
    history.hear("eval", {"step": 3, "epoch": 0, "values": {"accuracy": 0.5}, "t_s": 100.17})
    history.hear("checkpoint", {"step": 5, "t_s": 100.18})
    history.hear("paused", {"rank": 0, "step": 6, "t_s": 100.17})
    history.hear("resumed", {"rank": 0, "step": 7, "t_s": 100.18})
    history.hear("healed", {"ranks": [2], "step": 8, "workers": 2, "t_s": 100.19})
    history.hear("note", {"text": "has no step", "t_s": 100.15})
    found = {e["cat"]: ns(e["ts"]) for e in named(events_of(history), "i") if e["ts"] > 0}
    assert found == {
        "eval": 64_000_000, "checkpoint": 80_000_000, "paused": 96_000_000,
        "resumed": 112_000_000, "healed": 128_000_000, "note": 150_000_000,
    }  # fmt: skip


def test_a_step_that_was_taken_again_later_does_not_move_a_mark():
    history = make_history(make_rows(12, 2))
    history.hear("checkpoint", {"step": 10, "t_s": 100.02})
    history.hear("eval", {"step": 40, "epoch": 0, "values": {}, "t_s": 100.03})  # no such row
    found = {e["cat"]: ns(e["ts"]) for e in named(events_of(history), "i") if e["ts"] > 0}
    assert found == {"checkpoint": 20_000_000, "eval": 30_000_000}


def test_an_evaluation_of_asynchronous_workers_stands_at_the_step_of_the_one_that_told_it():
    rows = make_rows(12, 2)
    rows["start_s"][:, 1] += 0.100
    rows["end_s"][:, 1] += 0.100
    history = make_history(rows, joined=False)
    history.hear("eval", {"step": 3, "epoch": 0, "values": {}, "t_s": 100.12})
    (mark,) = (e for e in named(events_of(history), "i") if e["cat"] == "eval")
    assert ns(mark["ts"]) == 64_000_000


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(*[st.floats(0, 3, width=32)] * 4, st.floats(-1e-4, 1)),
             min_size=1, max_size=8),
    st.booleans(),
)  # fmt: skip
def test_any_measured_times_nest(ranks, lengths, joined):
    rows = make_rows(len(lengths), ranks)
    at = 100.0
    for index, (data, compute, wait, transfer, other) in enumerate(lengths):
        one = rows[index]
        one["start_s"], one["data_wait_s"], one["compute_s"] = at, data, compute
        one["wait_s"], one["exposed_s"], one["bubble_s"] = wait, wait + transfer, transfer / 2
        at += max(data + compute + wait + transfer + other, 0.0)
        one["end_s"] = one["ready_s"] = at
    history = make_history(rows, joined=joined)
    events = events_of(history)
    steps = [e for e in events if e.get("cat") == "step"]
    assert len(steps) == len(history)
    assert {name for e in steps for name in PARTS} <= set(steps[0]["args"])


def test_long_histories_say_that_steps_are_left_out():
    history = make_history(make_rows(40_000, 2), memory_limit_bytes=1 << 20)
    assert history.stride > 1
    assert series.header(history, ABOUT)["otherData"]["every_nth_step"] == history.stride
    steps = [e for e in series.events(history, ABOUT) if e.get("cat") == "step"]
    assert len(steps) == len(history)
