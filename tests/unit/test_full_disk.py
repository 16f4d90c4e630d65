"""Writers, sinks, callbacks and views that raise: the run goes on, ends, and is over."""

import os
import queue
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
from history_rows import make_rows

from workbench.cluster.router import ControlRouter
from workbench.cookbook.recipe import Recipe
from workbench.engine import runtime
from workbench.engine.context import RunContext
from workbench.engine.telemetry.control_link import ControlLink
from workbench.engine.telemetry.recorder import Recorder, StepResult
from workbench.engine.telemetry.step_gate import FaultInjector, Gate
from workbench.errors import PlanError, RunError
from workbench.execution import logging_to, registry
from workbench.execution.launch import RunExecution
from workbench.execution.registry import load
from workbench.execution.run import Run
from workbench.history import disk, events, folders
from workbench.history.store import RunHistory
from workbench.notebook import run_view
from workbench.notebook.run_view import RunView
from workbench.session import checkpoints
from workbench.shared import cluster_env
from workbench.shared.events import OVER, EpochBegan, Noted, Topic
from workbench.shared.messages import Happened, Records
from workbench.shared.plan import make_plan
from workbench.shared.protocol import RunSpec, records_from
from workbench.shared.record import RECORD

WAIT_S = 20
FULL = OSError(28, "No space left on device")


def fails(*unused, **named):
    raise FULL


def a_run(folder, **plan):
    run = Run(
        make_plan(Recipe("wb.fit()"), "mirrored", workers=2, **plan),
        number=1,
        name="full",
        engines=[0, 1],
        devices=["cpu", "cpu"],
        folder=folder,
    )
    run.advance("submit")
    run.advance("start")
    return run


@pytest.fixture
def nowhere(tmp_path):
    """A folder that nobody can make, not even root."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "home"


# -- engines --------------------------------------------------------------------------------------


class Writer:
    def __init__(self, failing):
        self.rows, self.closed = 0, False
        setattr(self, failing, fails)

    def append_records(self, packed):
        self.rows += len(packed) // RECORD.itemsize

    def append_event(self, name, fields):
        pass

    def close(self):
        self.closed = True


@pytest.mark.parametrize("failing", ["append_records", "append_event", "close"])
def test_a_writer_that_fails_costs_no_row_and_one_note(failing):
    heard = queue.Queue()
    router = ControlRouter(lambda engine, message: heard.put(message))
    link = ControlLink(3, router.url, router.key, {"pid": 1})
    try:
        spec = RunSpec(mode="run", rank=0, world_size=2, ranks=(3, 4), run=1, run_dir="/kept/here")
        run = RunContext(spec, Recorder(1, 0), Gate(), FaultInjector(0), link.emit)
        link.attach(run, Writer(failing))
        link.emit(EpochBegan(rank=0, epoch=1, step=0))
        for step in range(3000):
            run.recorder.add_step(step, StepResult(8, 1.0, 0.2), step, step + 0.5, data_wait_s=0.1)
        assert link.detach(WAIT_S)
        link.emit(Noted(rank=0, text="still here"))
        steps, notes = [], []
        while not any("still here" in note.text for note in notes):
            message = heard.get(timeout=WAIT_S)
            if isinstance(message, Records):
                steps += records_from(message.rows)["step"].tolist()
            elif isinstance(message, Happened) and isinstance(message.event, Noted):
                notes.append(message.event)
        assert steps == list(range(3000))
        assert [note.topic for note in notes] == [Topic.NOT_ON_DISK.value, None]
        assert "No space left on device (/kept/here)" in notes[0].text
    finally:
        link.close()
        router.close()


def test_what_cannot_be_sent_does_not_end_the_control_link():
    heard = queue.Queue()
    router = ControlRouter(lambda engine, message: heard.put(message))
    link = ControlLink(3, router.url, router.key, {"pid": 1})
    try:
        link.emit(Noted(text={1, 2}))  # type: ignore[arg-type]  # no JSON
        link.emit(Noted(text="after it"))
        while heard.get(timeout=WAIT_S) != Happened(run=0, event=Noted(text="after it", deaths=[])):
            pass
        assert link.faults <= 1
    finally:
        link.close()
        router.close()


def test_an_engine_that_cannot_open_its_files_trains_without(nowhere):
    told, attached = [], []
    engine = SimpleNamespace(link=SimpleNamespace(attach=lambda *args: attached.append(args)))
    run = SimpleNamespace(
        spec=RunSpec(mode="run", rank=1, world_size=2, ranks=(0, 1), run_dir=str(nowhere)),
        emit=lambda event: told.append(event.to_wire()),
    )
    runtime._attach(engine, run)
    assert attached == [(run, None)]
    assert told[0]["topic"] == Topic.NOT_ON_DISK.value


def test_weights_that_cannot_be_written_leave_no_half_and_no_failure(tmp_path):
    told = []

    def save(folder, rank, arrays):
        (folder / "weights-rank1.npz").write_bytes(b"half")
        raise FULL

    (tmp_path / "weights.npz").touch()  # another rank's
    run = SimpleNamespace(
        spec=RunSpec(mode="run", rank=1, world_size=2, ranks=(0, 1), run_dir=str(tmp_path)),
        weights=lambda: {"w": np.ones(3)},
        emit=lambda event: told.append(event.to_wire()),
    )
    assert runtime._save_weights(run, SimpleNamespace(save_weights=save)) is None
    assert os.listdir(tmp_path) == ["weights.npz"]
    assert told[0]["value"] == "No space left on device"


# -- the kernel -----------------------------------------------------------------------------------


def test_a_runs_description_that_cannot_be_written_costs_one_note(nowhere):
    run = a_run(nowhere)
    run.record()
    run.finish(None)
    assert (run.is_over, run.state) == (True, "finished")
    assert len(run.snapshot().notes) == 1
    with pytest.raises(RunError, match="WB-RUN-086"):
        run.weights()
    with pytest.raises(RunError, match="WB-RUN-042"):
        run.save(nowhere / "copy")


@pytest.mark.parametrize("part", ["_halting.close", "history.finish", "_conclude", "record"])
@pytest.mark.parametrize("error", [None, RunError("Rank 1 failed.", code="WB-RUN-000")])
def test_whatever_fails_at_a_runs_end_it_is_over(tmp_path, monkeypatch, part, error):
    run = a_run(tmp_path)
    owner, _, name = part.rpartition(".")
    monkeypatch.setattr(getattr(run, owner) if owner else run, name, fails)
    run.finish(error)
    assert run.is_over
    if part != "_conclude":
        assert run.state == ("finished" if error is None else "failed")
    run.finish(RunError("again", code="WB-RUN-000"))
    assert run.error is (None if part == "_conclude" else error)


@pytest.mark.parametrize("name", ["_sweep", "_replace", "plan"])
def test_whatever_fails_in_settling_a_run_it_is_over(tmp_path, monkeypatch, name):
    run = a_run(tmp_path)
    launch = RunExecution(None, run, (), None)
    monkeypatch.setattr(launch, "_replace", lambda outcomes: False)
    monkeypatch.setattr(launch, name, fails)
    task = SimpleNamespace(outcomes={}, failure=lambda: None, cause=None, interrupted=False)
    launch.settled(task)
    assert run.is_over
    assert run.state == "failed"
    assert run.error.code == "WB-RUN-071"


def test_where_no_folder_can_be_made_runs_are_kept_in_memory(nowhere, monkeypatch):
    monkeypatch.setenv(folders.HOME_VARIABLE, str(nowhere))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(nowhere))
    plan = make_plan(Recipe("wb.fit()"), "mirrored", workers=2, name="in-memory")
    try:
        run = registry.new_run(plan, number=1, engines=[0, 1], devices=["cpu"] * 2)
        assert registry.runs["in-memory"] is run
        assert not run.folder.exists()
    finally:
        registry.runs.clear()


def test_a_run_whose_rows_are_in_memory_only_is_saved_whole(tmp_path):
    run = a_run(tmp_path / "full")
    rows = make_rows(40, 2, slow_rank=1, slow_s=0.02)
    writer = disk.RunWriter(run.folder, 0)  # what there was room for
    writer.append_records(rows[:5, 0].tobytes())
    writer.close()
    run.history.hear("run_started", {"rank": 0, "t_s": 99.0, "device": "cpu", "total_steps": 40})
    run.history.append(rows.reshape(-1))
    for step in (9, 19):
        run.history.hear("log", {"rank": 1, "step": step, "values": {"lr": 0.1 * step}})
        run.history.hear("eval", {"step": step, "epoch": 0, "values": {"accuracy": step / 40}})
    run.history.event(disk.unwritten(run.folder, FULL))
    run.history.hear("note", {"text": "chosen", "topic": Topic.ALLREDUCE_CHOSEN, "value": "ring"})
    for rank in (0, 1):
        run.history.hear("run_finished", {"rank": rank, "t_s": 120.0, "steps": 40})
    run.finish(None)
    for target in (tmp_path / "elsewhere", run.folder):  # or there, when there is room again
        saved = load(run.save(target))
        assert saved.history.columns == run.history.columns
        for name in run.history.columns:
            np.testing.assert_allclose(saved.history[name], run.history[name], rtol=1e-6, atol=1e-7)
        ours, theirs = run.history.totals, saved.history.totals
        np.testing.assert_allclose(theirs.blame_s, ours.blame_s, rtol=1e-6)
        assert (theirs.steps, theirs.samples) == (ours.steps, ours.samples) == (40, 640)
        assert saved.history.evals == run.history.evals
        assert saved.history.story.notes == run.history.story.notes
        assert saved.history.story.facts == {Topic.ALLREDUCE_CHOSEN: "ring"}
        assert saved.history.story.finished.keys() == {0, 1}


def test_a_run_saved_from_memory_keeps_who_waited_for_whom_among_fewer(tmp_path):
    run = a_run(tmp_path / "none")
    run.history.append(make_rows(10, 2).reshape(-1))
    run.history.rewind(10, run.folder, [1])
    later = make_rows(5, 1, first=10)
    later["rank"], later["wait_s"], later["waited_for"] = 1, 0.003, 0
    run.history.append(later.reshape(-1))
    run.history.event(disk.unwritten(run.folder, FULL))
    run.finish(None)
    assert run.history["blamed_rank"].tolist() == [-1] * 20 + [1] * 5
    saved = load(run.save(tmp_path / "elsewhere"))
    assert saved.history["blamed_rank"].tolist() == run.history["blamed_rank"].tolist()


def test_a_long_run_that_is_saved_from_memory_says_which_steps_it_has(tmp_path):
    run = a_run(tmp_path / "none")
    run.history = RunHistory([0, 1], memory_limit_bytes=1)
    run.history.append(make_rows(40_000, 2).reshape(-1))
    run.history.event(disk.unwritten(run.folder, FULL))
    run.finish(None)
    saved = load(run.save(tmp_path / "elsewhere"))
    assert saved.history["step"].tolist() == run.history["step"].tolist()
    assert f" {run.history.stride} " in saved.history.story.notes[-1]


def test_rows_stay_in_memory_where_a_rewind_finds_no_room(tmp_path, monkeypatch):
    history = RunHistory([0])
    rows = np.zeros(10, RECORD)
    rows["step"], rows["samples"], rows["local_loss"] = np.arange(10), 8, 1.0
    rows["end_s"] = rows["start_s"] = np.arange(10.0)
    writer = disk.RunWriter(tmp_path, 0)
    writer.append_records(rows.tobytes())
    writer.close()
    history.append(rows)
    monkeypatch.setattr(events.cluster_env, "replace", fails)
    assert history.rewind(4, tmp_path) == 6
    assert history.totals.steps == 10
    assert any("No space left" in note for note in history.story.notes)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text("old")

    def half(path, content):
        os.close(os.open(path, os.O_CREAT))
        raise FULL

    monkeypatch.setattr(cluster_env.Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space"):
        cluster_env.replace(tmp_path / "run.json", "new")
    run = a_run(tmp_path, checkpoint=str(tmp_path / "kept"))
    with pytest.raises(PlanError, match="WB-PLAN-098"):
        checkpoints.describe(run)
    with pytest.raises(RunError, match=r"No space left on device.*WB-RUN-058"):
        cluster_env.export(tmp_path / "run.json", b"new")
    assert sorted(os.listdir(tmp_path)) == ["kept", "run.json"]
    assert os.listdir(tmp_path / "kept") == []
    assert (tmp_path / "run.json").read_text() == "old"


# -- views and sinks ------------------------------------------------------------------------------


class View:
    def __init__(self, failing):
        setattr(self, failing, fails)

    def begin(self, snapshot):
        pass

    def update(self, snapshot):
        pass

    def end(self, snapshot):
        pass


@pytest.mark.parametrize("failing", ["begin", "update", "end"])
def test_a_view_that_fails_costs_a_note_not_the_run(tmp_path, monkeypatch, failing, capsys):
    monkeypatch.setattr(run_view, "make_view", lambda *unused, brief: View(failing))
    run = a_run(tmp_path)
    view = RunView(run, "widget")
    view._draw()
    run.finish(None)
    assert view.wait() is run
    assert run.state == "finished"
    assert [note for note in run.snapshot().notes if "view" in note]
    assert ("full" in capsys.readouterr().out) == (failing == "end")


class Sink:
    place = "here"

    def __init__(self, failing):
        self.failing = failing

    def __getattr__(self, name):
        return fails if name == self.failing else lambda *unused: None


@pytest.mark.parametrize("failing", ["open", "settings", "write", "rewind", "end", "place"])
def test_a_sink_that_fails_costs_a_note_not_the_run(tmp_path, monkeypatch, failing):
    def opened(where, about):
        return fails() if failing in ("open", "place") else Sink(failing)

    kind = SimpleNamespace(open=opened, check=lambda where: None)
    monkeypatch.setattr(logging_to, "kind_of", lambda target: kind)
    monkeypatch.setattr(logging_to.Feed, "fresh", lambda self, over: SimpleNamespace(
        scalars=[SimpleNamespace(t_s=1.0)], rewound=3))  # fmt: skip
    run = a_run(tmp_path)
    log = run.log_to(f"tensorboard:{tmp_path}")
    run.finish(None)
    run.wait(WAIT_S)
    assert log.wait(WAIT_S)
    assert run.state in OVER
    assert any("--log" in note for note in run.snapshot().notes)
