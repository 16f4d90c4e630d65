"""`--log` in a real run: the tools' own readers find what the history holds."""

from __future__ import annotations

import os
import sys

import pytest
from needs import need
from notebook_shell import soon
from trace_format import check, nested, read

from workbench.errors import PlanError
from workbench.notebook.session import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch", "tensorboard", "mlflow")
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

from read_logs import read_board, read_tracked, read_trackio, read_wandb  # noqa: E402

FIT = """import torch
from torch import nn
wb.fit(nn.Linear(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=STEPS,
       eval_data=wb.data.synthetic(64, shape=(64,), classes=10),
       metrics={"accuracy": lambda out, y: (out.argmax(1) == y).float().mean()})
"""
SHORT = FIT.replace("STEPS", "16")
ENDLESS = FIT.replace("STEPS", "1_000_000")


def curve(run, column, rank=0):
    own = run.history["rank"] == rank
    return list(zip(run.history["step"][own].tolist(), run.history[column][own], strict=True))


def test_a_run_is_written_to_both_while_its_notebook_loads_no_framework(book, tmp_path):
    before = {name for name in ("torch", "tensorflow", "keras") if name in sys.modules}
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    book.ok(
        f"%%distributed mirrored --name logged --seed 4 --plot off --log tensorboard:{tmp_path}/tb "
        f"--log mlflow:{uri}\n{SHORT}"
    )
    run = book["_run"]
    assert [log.complete for log in run.logs] == [True], "the cell ends when all is written"
    board = read_board(tmp_path / "tb" / "logged")
    (tracked,) = read_tracked(uri)
    for tag, column in (("loss", "loss"), ("sync_wait_s/rank_0", "sync_wait_s")):
        wanted = [(s, pytest.approx(float(v), rel=1e-6)) for s, v in curve(run, column)]
        assert len(wanted) == 16
        assert board.scalars[tag] == wanted
        assert tracked.metrics[tag] == wanted
    accuracy = run.evals[-1]["accuracy"]
    assert board.scalars["eval/accuracy"][-1][1] == pytest.approx(accuracy)
    assert tracked.metrics["eval/accuracy"][-1][1] == pytest.approx(accuracy)
    assert {"batch_size": "32", "seed": "4", "workers": "2"}.items() <= tracked.params.items()
    assert board.hparams["batch_size"] == 32
    assert tracked.status == "FINISHED"
    assert tracked.files["run.png"].startswith(b"\x89PNG")
    assert board.images["run"][2].startswith(b"\x89PNG")
    assert {name for name in ("torch", "tensorflow", "keras") if name in sys.modules} == before


def test_a_run_is_written_to_wandb_and_trackio(book, tmp_path, monkeypatch):
    need("wandb", "trackio")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HOME", str(tmp_path))
    run = session.cluster.run(
        SHORT, strategy="mirrored", log=["wandb:lessons", f"trackio:{tmp_path.name}"]
    ).wait(60)
    assert not [note for note in run.snapshot().notes if "--log" in note]
    kept = read_wandb(tmp_path / "wandb")
    series, config, _ = read_trackio(tmp_path.name)
    for tag, column, rank in (("loss", "loss", 0), ("sync_wait_s/rank_0", "sync_wait_s", 0),
                              ("sync_wait_s/rank_1", "sync_wait_s", 1)):  # fmt: skip
        wanted = [(s, pytest.approx(float(v), rel=1e-6)) for s, v in curve(run, column, rank)]
        assert len(wanted) == 16
        assert kept.series[tag] == series[tag] == wanted
    assert kept.config["state"] == config["state"] == "finished"
    assert kept.exit_code == 0


def test_a_stopped_run_is_completed(book, tmp_path):
    run = session.cluster.run(ENDLESS, strategy="mirrored", log=[f"tensorboard:{tmp_path}"])
    assert soon(lambda: run.history.totals.steps > 5)
    run.stop()
    run.wait(60)
    board = read_board(tmp_path / run.name)
    assert "state: stopped" in board.texts["notes"]
    last = int(run.history["step"].max())
    assert board.scalars["loss"][-1] == (last, pytest.approx(run.history["loss"][-1], rel=1e-6))


def test_places_are_checked_before_an_engine_is_touched(book, tmp_path):
    (tmp_path / "file").touch()
    before = session.cluster.last_task
    book.refused(f"%%distributed mirrored --log neptune:x\n{SHORT}", "tensorboard:DIR")
    book.refused(f"%%distributed mirrored --log tensorboard:{tmp_path}/file\n{SHORT}", "a file")
    book.refused(f"%%distributed --log tensorboard:{tmp_path}\n1", "WB-PLAN-129")
    with pytest.raises(PlanError, match="WB-PLAN-146"):
        session.cluster.run(SHORT, strategy="mirrored", log=["mlflow:http://"])
    assert session.cluster.last_task is before


def test_the_trace_of_a_real_run_keeps_the_formats_rules(book, tmp_path):
    run = session.cluster.run(SHORT, strategy="mirrored", inject=["slow=1:10ms"]).wait(60)
    path = run.trace(tmp_path / "trace.json.gz")
    events = check(read(path))
    phases = nested(events)
    assert len(phases) == len(run.history) == 32
    lengths = {
        (e["args"]["rank"], e["args"]["step"]): e["dur"] for e in events if e.get("cat") == "step"
    }
    for key, inside in phases.items():
        assert sum(p["dur"] for p in inside) == pytest.approx(lengths[key], abs=0.01)
    assert [e["name"] for e in events if e["ph"] == "i" and e["cat"] == "inject"] == [
        "faults: slow=1:10ms"]  # fmt: skip
    evaluation = next(e for e in events if e["ph"] == "i" and e["cat"] == "eval")
    assert evaluation["args"]["accuracy"] == pytest.approx(run.evals[0]["accuracy"])
    end = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert 0 < evaluation["ts"] < 2 * end + 60e6
