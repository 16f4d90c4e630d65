"""A history is as large as what it holds, and old ones rest on the disk."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from workbench.errors import RunError
from workbench.history import folders
from workbench.history.disk import RunWriter
from workbench.history.store import RunHistory
from workbench.shared.record import RECORD

RANKS = 2


def rows(rank, steps, first=0):
    made = np.zeros(steps, RECORD)
    made["rank"], made["step"] = rank, np.arange(first, first + steps)
    made["start_s"] = made["step"] * 1.0 + 100
    made["end_s"] = made["start_s"] + 0.5 + 0.1 * rank
    made["compute_s"], made["samples"] = 0.25, 8
    made["ready_s"] = made["start_s"] + 0.25 + 0.1 * rank
    made["local_loss"] = 1.0 / (1 + made["step"])
    for name in ("exposed_s", "wait_s", "sent_bytes", "staleness", "bubble_s"):
        made[name] = np.nan
    made["waited_for"] = -1
    return made


def written(folder, steps, *, joined=True):
    """Return a history whose rows are in `folder` too, as the engines write them."""
    history = RunHistory(range(RANKS), joined=joined)
    for rank in range(RANKS):
        writer, made = RunWriter(folder, rank), rows(rank, steps)
        writer.append_records(made.tobytes())
        logged = {"rank": rank, "step": 3, "values": {"lr": 0.5 + rank}, "t_s": 103.0}
        writer.append_event("log", logged)
        writer.close()
        history.append(made)
        history.hear("log", logged)
    history.hear("note", {"text": "said by the kernel"})
    history.hear("eval", {"step": 2, "epoch": 0, "values": {"accuracy": 0.5}, "seconds": 0.25})
    history.finish()
    return history


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv(folders.HOME_VARIABLE, str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("joined", [True, False])
def test_a_history_at_rest_holds_nothing_and_reads_the_same(tmp_path, joined):
    history, same = written(tmp_path, 300, joined=joined), written(tmp_path / "other", 300)
    same = same if joined else written(tmp_path / "third", 300, joined=False)
    assert history.nbytes > 300 * RANKS * 72
    assert history.rest(tmp_path)
    assert history.rests
    assert history.nbytes == 0
    assert history.columns == same.columns
    assert not history.rests
    for name in same.columns:
        np.testing.assert_array_equal(history[name], same[name])
    np.testing.assert_allclose(history.totals.parts_s, same.totals.parts_s)
    assert (history.totals.steps, history.totals.samples) == (same.totals.steps, 2 * 300 * 8)
    assert history.totals.eval_s == same.totals.eval_s == 0.25
    assert history.evals == same.evals
    assert history.story.notes == same.story.notes == ["said by the kernel"]
    one, other = history.snapshot(), same.snapshot()
    for curve in ("loss_curve", "throughput_curve"):
        np.testing.assert_allclose(getattr(one, curve).mean, getattr(other, curve).mean)
    assert history.unmeasured == same.unmeasured


def test_it_may_rest_again_and_again(tmp_path):
    history = written(tmp_path, 20)
    for _ in range(3):
        assert history.rest(tmp_path)
        assert history.rest(tmp_path)
        assert len(history) == 20 * RANKS


def test_words_about_a_history_do_not_wake_it(tmp_path):
    history = written(tmp_path, 20)
    history.rest(tmp_path)
    assert history.evals[0]["accuracy"] == 0.5
    history.hear("note", {"text": "later"})
    history.finish()
    assert history.rests
    assert history.story.notes[-1] == "later"


def test_rows_that_come_late_are_counted_once(tmp_path):
    history = written(tmp_path, 20)
    history.rest(tmp_path)
    writer = RunWriter(tmp_path, 0)
    writer.append_records(rows(0, 1, first=20).tobytes())
    writer.close()
    history.append(rows(0, 1, first=20))
    assert len(history) == 20 * RANKS + 1
    assert history.totals.rows.tolist() == [21, 20]


def test_what_is_not_on_the_disk_stays_in_memory(tmp_path):
    history = written(tmp_path, 20)
    assert not history.rest(tmp_path / "elsewhere")
    (tmp_path / "records-rank1.bin").write_bytes(rows(1, 19).tobytes())
    assert not history.rest(tmp_path)
    assert not history.rests
    assert len(history) == 20 * RANKS


def test_rows_that_somebody_has_removed_are_named(tmp_path):
    folder = tmp_path / "run"
    history = written(folder, 20)
    history.rest(folder)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(RunError, match="WB-RUN-045"):
        history["loss"]
    assert history.rests


def test_a_short_history_takes_little_memory_and_a_long_one_what_it_needs():
    sizes = {}
    for steps in (0, 5, 500, 50_000):
        history = RunHistory(range(RANKS))
        for rank in range(RANKS):
            history.append(rows(rank, steps))
        history.finish()
        assert len(history) == steps * RANKS
        sizes[steps] = history.nbytes
    assert sizes[5] < 32 << 10
    assert sizes[500] < 400 << 10
    assert sizes[50_000] < 50_000 * RANKS * 72 + (3 << 20)


def test_rings_that_grow_keep_what_they_hold():
    whole, pieces = RunHistory(range(RANKS)), RunHistory(range(RANKS))
    for rank in range(RANKS):
        whole.append(rows(rank, 1000))
    for first in range(0, 1000, 7):
        for rank in range(RANKS):
            pieces.append(rows(rank, min(7, 1000 - first), first))
        pieces.snapshot()
    one, other = whole.snapshot(), pieces.snapshot()
    np.testing.assert_array_equal(one.timeline.step, other.timeline.step)
    np.testing.assert_allclose(one.timeline.parts_s, other.timeline.parts_s)
    np.testing.assert_allclose(one.loss_curve.mean, other.loss_curve.mean)
    assert one.samples_per_s == other.samples_per_s


def aged(folder):
    """Let a folder's last change be long ago."""
    for path in (*folder.iterdir(), folder):
        os.utime(path, (1e9, 1e9))


def test_a_folder_in_which_a_history_rests_is_not_pruned_by_another_notebook(home):
    folder, other = folders.new_run_dir("old"), folders.new_run_dir("unused")
    history = written(folder, 20)
    history.rest(folder)
    aged(folder)
    aged(other)
    code = "from workbench.history import folders; print(*folders.prune(keep=0))"
    gone = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert gone.stdout.split() == [str(other)]
    assert len(history) == 20 * RANKS


def test_marks_of_processes_that_ended_hold_nothing(home):
    folder = folders.new_run_dir("old")
    folders.mark(folder)
    (mark,) = [path for path in folder.iterdir() if path.name.startswith(".in-use")]
    assert folders.is_marked(folder)
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "began": 1.0}))  # the pid is reused
    assert not folders.is_marked(folder)
    mark.write_text("half a li")
    assert not folders.is_marked(folder)


def test_marks_of_another_host_of_the_same_name_hold(home, monkeypatch):
    folder = folders.new_run_dir("there")
    with monkeypatch.context() as there:
        there.setattr(folders.cluster_env, "host_token", lambda: f"{socket.gethostname()}-other")
        folders.mark(folder)
    (mark,) = [path for path in folder.iterdir() if path.name.startswith(".in-use")]
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "began": 1.0}))  # of no pid here
    assert folders.is_marked(folder)
