"""Runs that never happened, written to W&B (offline) and Trackio and read back by their readers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import numpy as np
import psutil
import pytest
from history_rows import make_rows
from needs import need
from read_logs import read_trackio, read_wandb

from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError, RunError
from workbench.execution import sinks
from workbench.execution.run import Run
from workbench.history.analysis.series import Scalar
from workbench.shared.log_targets import parse_target
from workbench.shared.plan import make_plan

STEPS = 12
MINE = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE")


@pytest.fixture(autouse=True)
def nobody_is_asked(tmp_path, monkeypatch):
    """A user without a key, in a folder of the test's own; who calls elsewhere calls the proxy."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (*MINE, "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        yield
        with pytest.raises(BlockingIOError):
            proxy.accept()


@pytest.fixture
def offline(monkeypatch):
    need("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Trackio's folder, which it takes from the environment when it is imported."""
    need("trackio")
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        patch.delenv("TRACKIO_STORAGE_MODE", raising=False)
        import trackio.utils

        yield trackio.utils.TRACKIO_DIR


@pytest.fixture
def run(tmp_path):
    plan = make_plan(
        Recipe("x = 1"), "mirrored", workers=2, options={"bucket_mb": "10"}, overrides={"seed": 3}
    )
    run = Run(
        plan, number=1, name="base", engines=[0, 1], devices=["cpu", "cpu"],
        folder=tmp_path / "run-1",
    )  # fmt: skip
    run.advance("submit")
    yield run
    for log in run.logs:
        log.close(30)


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


def notes_of_log(run):
    return [note for note in run.history.story.notes if "--log" in note]


def sink(kind, where="lessons"):
    about = sinks.About("base", "id", 1.0, {"strategy": "mirrored", "folder": "/home/me"})
    return sinks.kind_of(parse_target(f"{kind}:x")).open(where, about)


def scalars(steps, value):
    return [Scalar("loss", step, value, float(step)) for step in steps]


def own(run, column, rank=0):
    mine = run.history["rank"] == rank
    pairs = zip(run.history["step"][mine].tolist(), run.history[column][mine].tolist(), strict=True)
    return [(step, pytest.approx(value, rel=1e-6)) for step, value in pairs]


# -- Weights & Biases ------------------------------------------------------------------------------


def test_a_finished_run_is_whole_in_wandb(run, tmp_path, offline):
    train(run)
    finish(run)
    log = run.log_to("wandb:me/lessons")
    assert log.complete
    assert notes_of_log(run) == []
    kept = read_wandb(tmp_path / "wandb")
    assert log.places["wandb:me/lessons"].startswith(f"{tmp_path}/wandb/offline-run-")
    for rank in (0, 1):
        assert kept.series[f"sync_wait_s/rank_{rank}"] == own(run, "sync_wait_s", rank)
        assert len(kept.series[f"compute_share/rank_{rank}"]) == STEPS
    assert kept.series["loss"] == own(run, "loss")
    assert kept.series["log/lr"] == [(0, 0.25)]
    assert kept.series["eval/accuracy"] == [(11, 0.75)]
    mine = run.history["rank"] == 0
    ends = (run.history["start_s"] + run.history["step_s"])[mine]
    assert np.diff(kept.walls["loss"]) == pytest.approx(np.diff(ends), abs=1e-3)
    drawn = {tag for tag in kept.series if not tag.startswith("run.")}  # the picture's parts
    assert {tag: kept.axes[tag] for tag in drawn} == dict.fromkeys(drawn, "step")
    wanted = {"strategy": "mirrored", "framework": "torch", "workers": 2, "seed": 3,
              "batch_size": 16, "option.bucket_mb": 10, "state": "finished"}  # fmt: skip
    assert wanted.items() <= kept.config.items()
    assert (kept.run["entity"], kept.run["project"]) == ("me", "lessons")
    assert (kept.run["display_name"], kept.exit_code) == ("base", 0)
    assert "something to know" in kept.run["notes"]
    assert kept.summary["final/loss"] == pytest.approx(float(run.history["loss"][-1]))
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert "mirrored" in (folder / "files" / "report.txt").read_text()
    assert "report.txt" in kept.files
    ((_, picture),) = kept.series["run.path"]
    assert (folder / "files" / picture).read_bytes().startswith(b"\x89PNG")


def test_a_run_that_fails_is_followed_to_its_end_in_wandb(run, tmp_path, offline):
    run.log_to("wandb:lessons")
    train(run, steps=4)
    finish(run, RunError("Rank 1 broke", code="WB-RUN-000"))
    kept = read_wandb(tmp_path / "wandb")
    assert (kept.config["state"], kept.exit_code) == ("failed", 1)
    assert "Rank 1 broke" in kept.run["notes"]
    assert len(kept.series["loss"]) == 4


def test_steps_that_are_done_again_are_in_wandb_twice(tmp_path, offline):
    one = sink("wandb")
    one.write(scalars(range(6), 1.0), 0.0)
    one.rewind(3)
    one.write(scalars(range(3, 8), 2.0), 0.0)
    one.end(sinks.Ending("stopped", 9.0, "report"))
    kept = read_wandb(tmp_path / "wandb")
    assert (kept.config["state"], kept.exit_code) == ("stopped", 255)
    assert kept.series["loss"] == [(s, 1.0) for s in range(6)] + [(s, 2.0) for s in range(3, 8)]
    assert kept.config["rewound_to_step"] == 3


def test_wandb_learns_nothing_of_the_machine_and_leaves_nothing_running(
    tmp_path, offline, monkeypatch
):
    monkeypatch.setenv("A_SECRET", "s3cret")
    one = sink("wandb")
    one.write(scalars(range(3), 1.0), 0.0)
    child = psutil.Process(one._process.pid)
    family = [child, *child.children(recursive=True)]
    assert any("wandb-core" in process.name() for process in family), "its service"
    one.end(sinks.Ending("finished", 9.0, "report", meta={"recipe": "its source"}))
    assert psutil.wait_procs(family, timeout=10)[1] == []
    kept = read_wandb(tmp_path / "wandb")
    for secret in ("s3cret", "its source", "/home/me", socket.gethostname(), str(tmp_path)):
        assert secret not in kept.text
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert [path.name for path in (folder / "files").iterdir()] == ["report.txt"]


def test_wandbs_processes_end_when_the_notebook_goes(offline, tmp_path):
    code = (
        "import sys; sys.path[:] = eval(sys.argv[1]); import os, signal, test_log_trackers as t; "
        "one = t.sink('wandb'); one.write(t.scalars(range(3), 1.0), 0.0); "
        "print(one._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = [os.path.dirname(__file__), *sys.path]
    with subprocess.Popen(
        [sys.executable, "-c", code, repr(path)], stdout=subprocess.PIPE, text=True
    ) as notebook:
        said = notebook.communicate(timeout=60)[0]
    assert notebook.returncode == -signal.SIGKILL
    try:
        child = psutil.Process(int(said.splitlines()[-1]))
        family = [child, *child.children(recursive=True)]
        assert psutil.wait_procs(family, timeout=30)[1] == []
    except psutil.NoSuchProcess:
        pass  # it was faster than we
    kept = read_wandb(tmp_path / "wandb")
    assert len(kept.series["loss"]) == 3
    assert kept.exit_code == 255


def test_a_wandb_process_that_dies_costs_a_note(run, offline):
    log = run.log_to("wandb:lessons")
    while not log.places:
        assert not log.wait(0.05)
    child = psutil.Process(log._sinks["wandb:lessons"]._process.pid)
    service = child.children(recursive=True)
    child.kill()
    train(run)
    finish(run)
    (note,) = notes_of_log(run)
    assert "wandb:lessons failed" in note
    assert run.state == "finished"
    assert psutil.wait_procs(service, timeout=20)[1] == []


def test_without_a_key_a_run_stays_offline_and_says_so(run, tmp_path):
    need("wandb")
    train(run)
    run.log_to("wandb:lessons")
    finish(run)
    (note,) = notes_of_log(run)
    assert "offline" in note
    assert "wandb sync" in note
    assert len(read_wandb(tmp_path / "wandb").series["loss"]) == STEPS


def test_a_server_that_is_not_there_keeps_a_run_offline(run, tmp_path, monkeypatch):
    need("wandb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setattr("workbench.execution.sinks.wandb._CHILD", QUICK)
        train(run)
        run.log_to("wandb:lessons")
        finish(run)
    (note,) = notes_of_log(run)
    assert "offline" in note
    (kept,) = (tmp_path / "wandb").glob("offline-run-*")
    assert kept.is_dir()


QUICK = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from workbench.execution.sinks import wandb; wandb.CONNECT_S = 1.0; wandb.serve()"
)


def test_a_wandb_that_is_switched_off_writes_nothing(run, tmp_path, monkeypatch):
    need("wandb")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    train(run)
    run.log_to("wandb:lessons")
    finish(run)
    (note,) = notes_of_log(run)
    assert "disabled" in note
    assert not (tmp_path / "wandb").exists()


def test_what_wandb_cannot_do_is_refused(run, tmp_path, monkeypatch):
    need("wandb")
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(PlanError, match="WB-PLAN-247"):
        run.log_to("wandb:lessons")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", "/proc/runs")
    with pytest.raises(PlanError, match="WB-PLAN-119"):
        run.log_to("wandb:lessons")
    assert not run.logs


# -- Trackio ---------------------------------------------------------------------------------------


def test_a_finished_run_is_whole_in_trackio(run, store):
    train(run)
    finish(run)
    log = run.log_to("trackio:whole")
    assert notes_of_log(run) == []
    assert log.places["trackio:whole"] == f"run base of whole in {store}"
    series, config, name = read_trackio("whole")
    for rank in (0, 1):
        assert series[f"sync_wait_s/rank_{rank}"] == own(run, "sync_wait_s", rank)
        assert len(series[f"compute_share/rank_{rank}"]) == STEPS
    assert series["loss"] == own(run, "loss")
    assert series["log/lr"] == [(0, 0.25)]
    assert series["eval/accuracy"] == [(11, 0.75)]
    wanted = {"strategy": "mirrored", "framework": "torch", "workers": 2, "seed": 3,
              "batch_size": 16, "option.bucket_mb": 10, "state": "finished"}  # fmt: skip
    assert wanted.items() <= config.items()
    assert name == "base"
    ((_, last),) = series["final/loss"]
    assert last == pytest.approx(float(run.history["loss"][-1]))
    ((_, report),) = series["report"]
    assert "something to know" in report["_value"]
    ((_, picture),) = series["run"]
    assert (store / "media" / picture["file_path"]).read_bytes().startswith(b"\x89PNG")


def test_steps_that_are_done_again_take_the_place_of_the_old_in_trackio(store):
    one, other = sink("trackio", "again"), sink("trackio", "beside")
    for each in (one, other):
        each.write(scalars(range(6), 1.0), 0.0)
    one.rewind(3)
    one.write(scalars(range(3, 8), 2.0), 0.0)
    one.end(sinks.Ending("finished", 9.0, "report"))
    series, config, _ = read_trackio("again")
    assert series["loss"] == [(s, 1.0) for s in range(3)] + [(s, 2.0) for s in range(3, 8)]
    assert config["rewound_to_step"] == 3
    assert len(read_trackio("beside")[0]["loss"]) == 6


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_runs_that_end_early_end_in_trackio(run, store, state):
    run.log_to(f"trackio:{state}")
    train(run, steps=4)
    if state == "stopped":
        run.advance("stop")
        finish(run)
    else:
        finish(run, RunError("Rank 1 broke", code="WB-RUN-000"))
    series, config, _ = read_trackio(state)
    assert config["state"] == state
    assert len(series["loss"]) == 4
    assert ("Rank 1 broke" in series["report"][0][1]["_value"]) == (state == "failed")


def test_a_trackio_folder_on_the_network_gets_files_to_import(store, monkeypatch):
    monkeypatch.setenv("TRACKIO_STORAGE_MODE", "jsonl")
    one = sink("trackio", "network")
    one.settings({"workers": 2})
    one.write(scalars(range(3), 1.0), 0.0)
    one.end(sinks.Ending("finished", 9.0, "report"))
    assert not (store / "network.db").exists()
    from trackio import fragments

    assert fragments.import_inbox_dir() == 4
    series, config, _ = read_trackio("network")
    assert series["loss"] == [(s, 1.0) for s in range(3)]
    assert (config["workers"], config["state"]) == (2, "finished")


def test_a_name_that_trackio_keeps_is_refused(run, store):
    with pytest.raises(PlanError, match="WB-PLAN-248"):
        run.log_to("trackio:registry-mine")
    assert not run.logs


# -- both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("wandb:lessons", "lessons"),
        ("wandb:me/lessons", "me/lessons"),
        ("wandb: my lessons ", "my lessons"),
        ("trackio:lessons", "lessons"),
    ],
)
def test_projects_are_places(text, where):
    target = parse_target(text)
    assert target.where == where
    assert parse_target(target.text) == target


@pytest.mark.parametrize(
    "text",
    ["wandb", "wandb:", "wandb:/a", "wandb:a/", "wandb:a/b/c", "wandb:a?b", "wandb:" + "a" * 129,
     "trackio", "trackio: ", "trackio:a/b", "trackio:.", "trackio:..\\x"],
)  # fmt: skip
def test_what_is_no_project_is_refused(text):
    with pytest.raises(PlanError, match="WB-PLAN-246") as refused:
        parse_target(text)
    assert refused.value.allowed


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_a_missing_package_names_the_extra(run, monkeypatch, kind):
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match="WB-PLAN-120") as refused:
        run.log_to(f"{kind}:lessons")
    assert f"distributed-workbench[{kind}]" in refused.value.next_step


ALONE = """
import os, sys
sys.path[:] = eval(sys.argv[1])
before = dict(os.environ)
import test_log_trackers as t
from pathlib import Path
run = next(t.run.__wrapped__(Path.cwd()))
run.log_to("wandb:lessons", "trackio:lessons")
t.train(run)
t.finish(run)
assert not [n for n in run.history.story.notes if "--log" in n], run.history.story.notes
assert dict(os.environ) == before
print([m for m in ("torch", "tensorflow", "keras", "wandb") if m in sys.modules])
"""


def test_nothing_is_printed_and_nothing_heavy_is_loaded(offline, tmp_path):
    need("trackio")
    path = [os.path.dirname(__file__), *sys.path]
    command = [sys.executable, "-c", ALONE, repr(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_TOKEN": "hf_none"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
    assert done.stderr == ""
