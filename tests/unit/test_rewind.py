"""A history whose run goes on from an earlier step: exact totals, nothing twice."""

import numpy as np
import pytest

from workbench.history import disk, events, store
from workbench.history.disk import RunWriter
from workbench.history.store import RunHistory
from workbench.shared.record import RECORD


def rows(rank, steps, loss=1.0, offset_s=0.0, samples=16):
    found = np.zeros(len(steps), RECORD)
    found["rank"], found["step"], found["samples"], found["local_loss"] = rank, steps, samples, loss
    found["start_s"] = offset_s + np.asarray(steps) * 0.1
    found["end_s"] = found["start_s"] + 0.1
    found["ready_s"] = found["start_s"] + 0.05 + 0.01 * rank
    for name in ("data_wait_s", "compute_s", "exposed_s"):
        found[name] = 0.01
    found["wait_s"], found["waited_for"] = np.nan, -1
    found["sent_bytes"] = found["staleness"] = found["bubble_s"] = np.nan
    return found


class Recorded:
    """A run of some ranks: what its engines write and what they send."""

    def __init__(self, folder, ranks=3, **kwargs):
        self.folder = folder
        self.history = RunHistory([10 + r for r in range(ranks)], **kwargs)

    def do(self, rank, steps, **kwargs):
        part = rows(rank, steps, **kwargs)
        writer = RunWriter(self.folder, rank)
        writer.append_records(part.tobytes())
        writer.close()
        self.history.append(part)

    def tell(self, writer_rank, name, **fields):
        writer = RunWriter(self.folder, writer_rank)
        writer.append_event(name, fields)
        writer.close()
        self.history.hear(name, fields)


@pytest.fixture
def run(tmp_path):
    return Recorded(tmp_path)


def test_a_repeated_step_counts_once_and_as_it_was_done_last(run):
    for rank in range(3):
        run.do(rank, range(12 if rank else 10), loss=1.0)  # rank 0 died, the others were ahead
    assert run.history.rewind(6, run.folder) == 6
    assert run.history.totals.steps == 6
    for rank in range(3):
        run.do(rank, range(6, 20), loss=2.0, offset_s=5.0)
    run.history.finish()
    assert run.history.totals.steps == 20
    assert run.history.totals.samples == 20 * 48
    assert run.history.totals.rows.tolist() == [20, 20, 20]
    assert sorted(set(zip(run.history["rank"], run.history["step"], strict=True))) == [
        (rank, step) for rank in range(3) for step in range(20)
    ]
    assert run.history["loss"][run.history["step"] < 6].tolist() == [1.0] * 18
    assert run.history["loss"][run.history["step"] >= 6].tolist() == [2.0] * 42
    assert run.history.totals.step_s == pytest.approx([2.0] * 3)


def test_events_of_repeated_steps_are_forgotten_and_the_others_kept(run):
    run.tell(0, "run_started", rank=0, total_steps=20)
    for step in (4, 9):
        run.tell(0, "eval", step=step, epoch=0, values={"loss": float(step)}, seconds=0.0)
        run.tell(0, "log", rank=0, step=step, values={"lr": float(step)})
    run.tell(1, "run_finished", rank=1, status="error")
    run.history.hear("note", {"text": "kept"})
    for rank in range(3):
        run.do(rank, range(10))
    run.history.rewind(6, run.folder)
    assert [one["step"] for one in run.history.evals] == [4]
    assert run.history["lr"][run.history["rank"] == 0].tolist()[4] == 4.0
    assert run.history.story.notes == ["kept"]
    assert not run.history.story.finished
    assert [name for name, _ in disk.read_events(run.folder)] == ["run_started", "eval", "log"]


def test_fewer_workers_complete_a_step_and_keep_their_rows(run):
    for rank in range(3):
        run.do(rank, range(10))
    assert run.history.rewind(10, run.folder, [0, 2]) == 0
    for rank in (0, 2):
        run.do(rank, range(10, 15), samples=24)
    run.history.finish()
    assert run.history.totals.steps == 15
    assert run.history.totals.rows.tolist() == [15, 10, 15]
    assert run.history.totals.samples == 15 * 48
    blamed = run.history["blamed_rank"][run.history["step"] >= 10]
    assert set(blamed.tolist()) <= {-1, 0, 2}
    assert 2 in blamed  # the slowest, by the rank it had
    assert run.history["engine"][run.history["step"] == 12].tolist() == [10, 12]


def test_steps_whose_last_row_died_with_its_engine_count_as_done(run):
    run.do(0, range(8))
    for rank in (1, 2):
        run.do(rank, range(10))
    assert run.history.rewind(10, run.folder, [1, 2]) == 0
    for rank in (1, 2):
        run.do(rank, range(10, 15), samples=24)
    run.history.finish()
    disk.write_meta(run.folder, {"ranks": [10, 11, 12], "phases": run.history.phases})
    for history in (run.history, store.read_run(run.folder)[1]):
        assert history.totals.steps == 15
        assert history.totals.rows.tolist() == [8, 15, 15]


def test_a_saved_run_that_went_on_with_fewer_reads_the_same(run):
    for rank in range(3):
        run.do(rank, range(10))
    run.history.rewind(8, run.folder, [0, 2])
    for rank in (0, 2):
        run.do(rank, range(8, 15), samples=24)
    run.history.rewind(12, run.folder, [2])
    run.do(2, range(12, 20), samples=48)
    run.history.finish()
    meta = {"ranks": [10, 11, 12], "phases": run.history.phases}
    disk.write_meta(run.folder, meta)
    again = store.read_run(run.folder)[1]
    for history in (run.history, again):
        assert history.totals.steps == 20
        assert history.totals.rows.tolist() == [12, 8, 20]
        assert history.totals.samples == 20 * 48
    assert again["loss"].tolist() == run.history["loss"].tolist()


def test_going_back_before_workers_were_lost_brings_their_steps_back(run):
    for rank in range(3):
        run.do(rank, range(10))
    run.history.rewind(8, run.folder, [0, 2])
    run.history.rewind(4, run.folder)
    assert run.history.phases == []
    assert run.history.totals.rows.tolist() == [4, 4, 4]


def test_rows_out_of_reach_are_kept_and_repeated_ones_left_out(tmp_path):
    run = Recorded(tmp_path)
    for rank in range(3):
        run.history.append(rows(rank, range(10), loss=1.0))
    assert run.history.rewind(6, tmp_path) == 4
    for rank in range(3):
        run.history.append(rows(rank, range(6, 20), loss=2.0))
    run.history.finish()
    assert run.history.totals.steps == 20
    assert run.history.totals.rows.tolist() == [20, 20, 20]


def test_workers_that_meet_nowhere_count_their_own_steps(tmp_path):
    run = Recorded(tmp_path, ranks=2, joined=False)
    run.do(0, range(10))
    run.do(1, range(30))
    assert run.history.rewind(10, tmp_path) == 20
    run.do(0, range(10, 20))
    run.do(1, range(10, 20))
    assert run.history.totals.rows.tolist() == [20, 20]
    assert run.history.totals.samples == 40 * 16


def test_half_a_row_is_cut_off(tmp_path):
    run = Recorded(tmp_path, ranks=1)
    run.do(0, range(4))
    path = disk.records_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-7])
    assert events.cut(tmp_path, [0], 10)
    assert path.stat().st_size == 3 * RECORD.itemsize
