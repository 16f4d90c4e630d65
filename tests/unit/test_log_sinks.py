"""Runs that never happened, written to TensorBoard and MLflow and read back by their readers."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from history_rows import make_rows
from needs import need
from read_logs import read_board, read_tracked

from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError, RunError
from workbench.execution import logging_to, sinks
from workbench.execution.run import Run
from workbench.history.analysis import series
from workbench.shared.plan import make_plan

need("tensorboard", "mlflow")
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # these tests talk to nobody

STEPS = 12


def make_run(folder, name="base", **given):
    plan = make_plan(
        Recipe("x = 1"), "mirrored", workers=2, options={"bucket_mb": "10"}, overrides={"seed": 3},
        **given,
    )  # fmt: skip
    run = Run(plan, number=1, name=name, engines=[0, 1], devices=["cpu", "cpu"], folder=folder)
    run.advance("submit")
    return run


def train(run, first=0, steps=STEPS):
    if run.state == "starting":
        run.advance("start")
        run.history.hear("run_started", {"rank": 0, "batch_size": 16, "total_steps": STEPS,
                                          "device": "cpu"})  # fmt: skip
    rows = make_rows(steps, 2, first=first, slow_rank=1, slow_s=0.02)
    for rank in range(2):
        run.history.append(rows[:, rank])
    run.history.hear("log", {"rank": 0, "step": first, "values": {"lr": 0.25}})


def finish(run, error=None):
    run.history.hear("eval", {"step": 11, "epoch": 0, "values": {"accuracy": 0.75}})
    run.note("something to know")
    run.finish(error)
    assert all(log.wait(60) for log in run.logs)


@pytest.fixture
def run(tmp_path):
    run = make_run(tmp_path / "run-1")
    yield run
    for log in run.logs:
        log.close(30)


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """A database with MLflow's tables, which take it seconds to make."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    sinks.kind_of(logging_to.parse_target("mlflow:")).check(f"sqlite:///{path}")
    return path


@pytest.fixture
def uri(empty_store, tmp_path, monkeypatch):
    """An MLflow store of the test's own."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "own")  # its files lie beside the copy
    return f"sqlite:///{tmp_path}/mlflow.db"


def close(wanted):
    return [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted]


def test_a_finished_run_is_whole_in_tensorboard(run, tmp_path):
    train(run)
    finish(run)
    log = run.log_to(f"tensorboard:{tmp_path}/board")
    assert log.complete
    assert log.places == {f"tensorboard:{tmp_path}/board": f"{tmp_path}/board/base"}
    board = read_board(tmp_path / "board" / "base")
    history = run.history
    for tag, column in (("loss", "loss"), ("sync_wait_s/rank_0", "sync_wait_s")):
        own = history["rank"] == 0
        wanted = zip(history["step"][own].tolist(), history[column][own].tolist(), strict=True)
        assert board.scalars[tag] == close(wanted)
    assert board.scalars["log/lr"] == [(0, 0.25)]
    assert board.scalars["eval/accuracy"] == [(11, 0.75)]
    assert len(board.scalars["compute_share/rank_1"]) == STEPS
    wanted = {"strategy": "mirrored", "framework": "torch", "workers": 2, "seed": 3,
              "batch_size": 16, "option.bucket_mb": 10}  # fmt: skip
    assert wanted.items() <= board.hparams.items()
    width, height, png = board.images["run"]
    assert png.startswith(b"\x89PNG")
    assert (width, height) > (100, 100)
    assert "something to know" in board.texts["notes"]
    assert "state: finished" in board.texts["notes"]
    assert "bucket_mb" in board.texts["settings"]
    assert board.status == 1  # success
    assert board.scalars["final/loss"] == close([(STEPS, float(history["loss"][-1]))])


def test_wall_times_follow_the_run(run, tmp_path):
    train(run)
    finish(run)
    run.log_to(f"tensorboard:{tmp_path}/board")
    walls = np.array(read_board(tmp_path / "board" / "base").walls["loss"])
    own = run.history["rank"] == 0
    ends = (run.history["start_s"] + run.history["step_s"])[own]
    assert np.diff(walls) == pytest.approx(np.diff(ends), abs=1e-3)


def test_a_finished_run_is_whole_in_mlflow(run, tmp_path, uri):
    train(run)
    finish(run)
    run.log_to(f"mlflow:{uri}")
    (tracked,) = read_tracked(uri, "own")
    history = run.history
    own = history["rank"] == 0
    steps = history["step"][own].tolist()
    assert tracked.metrics["loss"] == close(zip(steps, history["loss"][own].tolist(), strict=True))
    assert tracked.metrics["eval/accuracy"] == [(11, 0.75)]
    assert len(tracked.metrics["sync_wait_s/rank_1"]) == STEPS
    wanted = {"strategy": "mirrored", "workers": "2", "seed": "3", "batch_size": "16",
              "option.bucket_mb": "10.0"}  # fmt: skip
    assert wanted.items() <= tracked.params.items()
    assert (tracked.name, tracked.status) == ("base", "FINISHED")
    assert tracked.tags["workbench.state"] == "finished"
    assert "something to know" in tracked.tags["mlflow.note.content"]
    assert tracked.files["run.png"].startswith(b"\x89PNG")
    assert json.loads(tracked.files["run.json"])["name"] == "base"
    assert list((tmp_path / "mlruns" / "own").rglob("run.png")), "files lie beside the database"


def test_a_running_run_is_followed(run, tmp_path):
    train(run, steps=6)
    log = run.log_to(f"tensorboard:{tmp_path}/board")
    seen = threading.Event()
    write = log._feed.fresh
    log._feed.fresh = lambda **how: (write(**how), seen.set())[0]
    assert seen.wait(30)
    assert not log.complete
    train(run, first=6, steps=6)
    finish(run)
    steps = [step for step, _ in read_board(tmp_path / "board" / "base").scalars["loss"]]
    assert steps == list(range(STEPS))


@pytest.mark.parametrize(("state", "status"), [("stopped", "KILLED"), ("failed", "FAILED")])
def test_runs_that_end_early_are_completed_too(run, tmp_path, uri, state, status):
    run.log_to(f"tensorboard:{tmp_path}/board", f"mlflow:{uri}")
    train(run, steps=4)
    if state == "stopped":
        run.advance("stop")
        finish(run)
    else:
        finish(run, RunError("Rank 1 broke", code="WB-RUN-000"))
    assert run.state == state
    (tracked,) = read_tracked(uri, "own")
    assert tracked.status == status
    assert len(tracked.metrics["loss"]) == 4
    board = read_board(tmp_path / "board" / "base")
    assert f"state: {state}" in board.texts["notes"]
    assert ("Rank 1 broke" in board.texts["notes"]) == (state == "failed")
    assert len(board.scalars["loss"]) == 4


def test_a_run_without_a_step_is_written_too(run, tmp_path):
    run.log_to(f"tensorboard:{tmp_path}/board")
    run.finish(RunError("nothing came of it", code="WB-RUN-000"))
    assert run.logs[0].wait(60)
    board = read_board(tmp_path / "board" / "base")
    assert "nothing came of it" in board.texts["notes"]
    assert "final/loss" not in board.scalars


def test_steps_that_are_done_again_take_the_place_of_the_old(run, tmp_path):
    from workbench.execution.sinks import tensorboard

    one = sinks.kind_of(logging_to.parse_target(f"tensorboard:{tmp_path}")).open(
        str(tmp_path), sinks.About("base", "id", 1.0, {})
    )
    assert isinstance(one, tensorboard.EventFile)
    before = [series.Scalar("loss", step, 1.0, step) for step in range(6)]
    again = [series.Scalar("loss", step, 2.0, step) for step in range(3, 8)]
    one.write(before, 0.0)
    one.rewind(3)
    one.write(again, 0.0)
    one.end(sinks.Ending("finished", 9.0, "report"))
    board = read_board(tmp_path / "base")
    assert board.scalars["loss"] == [(s, 1.0) for s in range(3)] + [(s, 2.0) for s in range(3, 8)]


def test_runs_of_one_name_lie_beside_each_other(tmp_path):
    for number in range(2):
        run = make_run(tmp_path / f"run-{number}", name="a/b")
        train(run)
        finish(run)
        run.log_to(f"tensorboard:{tmp_path}/board")
    assert sorted(p.name for p in (tmp_path / "board").iterdir()) == ["a-b", "a-b-2"]


class Broken:
    """A place that fails when `at` is called."""

    def __init__(self, at):
        self._at = at

    def __getattr__(self, name):
        def act(*args, **kwargs):
            if name == self._at:
                raise OSError("drive 7 is broken")
            return self

        return act

    place = "nowhere"


@pytest.mark.parametrize("at", ["open", "settings", "write", "end"])
def test_a_place_that_fails_costs_a_note_and_no_other_place(run, tmp_path, monkeypatch, at):
    real = sinks.kind_of
    monkeypatch.setattr(
        logging_to, "kind_of", lambda t: Broken(at) if t.kind == "mlflow" else real(t)
    )
    run.log_to("mlflow:sqlite:////nowhere.db", f"tensorboard:{tmp_path}/board")
    train(run)
    finish(run)
    assert run.state == "finished"
    (note,) = [n for n in run.history.story.notes if "--log" in n]
    assert "mlflow:sqlite:////nowhere.db failed" in note
    assert "drive 7 is broken" in note
    assert len(read_board(tmp_path / "board" / "base").scalars["loss"]) == STEPS


def test_what_cannot_be_written_to_is_refused(run, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match="WB-PLAN-126"):
        run.log_to(f"tensorboard:{tmp_path}/file")
    with pytest.raises(PlanError, match="WB-PLAN-119"):
        run.log_to("tensorboard:/proc/runs")
    with pytest.raises(PlanError, match="WB-PLAN-119"):
        run.log_to(f"mlflow:sqlite:///{tmp_path}/none/mlflow.db")
    (tmp_path / "bad.db").write_bytes(b"no database " * 1000)
    with pytest.raises(PlanError, match="WB-PLAN-121"):
        run.log_to(f"mlflow:sqlite:///{tmp_path}/bad.db")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(PlanError, match="WB-PLAN-122"):
        run.log_to("mlflow:")
    with pytest.raises(PlanError, match="WB-PLAN-118"):
        run.log_to()
    assert not run.logs


def test_a_server_that_is_not_there_is_refused_at_once(run):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(PlanError, match="WB-PLAN-124") as refused:
        run.log_to(f"mlflow:http://127.0.0.1:{port}")
    assert "mlflow server" in refused.value.next_step


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_a_missing_package_names_the_extra(run, monkeypatch, kind):
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError) as refused:
        run.log_to(f"{kind}:/a" if kind == "tensorboard" else f"{kind}:sqlite:////a.db")
    assert f"distributed-workbench[{kind}]" in refused.value.next_step


ALONE = """
import sys, tempfile
sys.path.insert(0, {tests!r})
import test_log_sinks as t
from pathlib import Path
folder = Path(tempfile.mkdtemp())
run = t.make_run(folder / "run")
run.log_to(f"tensorboard:{{folder}}/board", f"mlflow:sqlite:///{{folder}}/mlflow.db")
t.train(run)
t.finish(run)
assert (folder / "mlflow.db").exists() and list((folder / "board" / "base").iterdir())
assert not [note for note in run.history.story.notes if "--log" in note]
"""


def test_writing_loads_no_framework():
    here = os.path.dirname(__file__)
    code = ALONE.format(tests=here).replace(
        "import sys, tempfile", "import sys, tempfile\nimport importlib.util as u, types"
    )
    code = code.replace("import test_log_sinks as t", "import test_log_sinks as t\n"
                        "sys.modules.pop('tensorboard.compat.notf', None)")  # fmt: skip
    check = "\nprint([m for m in ('torch', 'tensorflow', 'keras') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code + check],
        capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(here), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
