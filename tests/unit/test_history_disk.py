from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from history_rows import NAN, make_history, make_rows

from workbench.cookbook.recipe import Recipe
from workbench.engine.training import initial
from workbench.errors import RunDamagedWarning, RunError
from workbench.execution.registry import load
from workbench.execution.run import Run
from workbench.history import disk, folders, store
from workbench.history.analysis.summary import summarise
from workbench.notebook.compare import compare
from workbench.shared.events import Gained, Healed, Joined, Shed, Topic
from workbench.shared.plan import make_plan
from workbench.shared.record import FLAG_LOSS_SEEN


def write_run(folder: Path, rows: np.ndarray, **meta: object) -> Path:
    for rank in range(rows.shape[1]):
        writer = disk.RunWriter(folder, rank)
        for start in range(0, len(rows), 7):
            writer.append_records(rows[start : start + 7, rank].tobytes())
        writer.append_event("run_started", {"rank": rank, "total_steps": len(rows)})
        writer.close()
    disk.write_meta(folder, {"ranks": [5, 6, 7, 8][: rows.shape[1]], **meta})
    return folder


def test_a_run_is_read_back_as_it_was(tmp_path: Path) -> None:
    rows = make_rows(30, 3, slow_rank=1, slow_s=0.01)
    meta, history = store.read_run(write_run(tmp_path, rows, name="base"))
    live = make_history(rows)
    assert meta["name"] == "base"
    assert history.engines == (5, 6, 7)
    for name in set(history.columns) - {"engine"}:
        assert np.array_equal(history[name], live[name], equal_nan=True)
    assert history.story.started["total_steps"] == 30


def test_what_notes_are_about_is_read_back(tmp_path: Path) -> None:
    writer = disk.RunWriter(write_run(tmp_path, make_rows(3, 1)), 0)
    about = {"topic": Topic.ALLREDUCE_CHOSEN, "value": "ring"}
    writer.append_event("note", {"rank": 0, "text": "in any words", **about})
    writer.close()
    _, history = store.read_run(tmp_path)
    assert history.story.facts == {Topic.ALLREDUCE_CHOSEN: "ring"}


def test_a_long_run_loses_no_step_to_the_order_of_files(tmp_path: Path) -> None:
    _, history = store.read_run(write_run(tmp_path, make_rows(40_000, 2)))
    assert history.totals.steps == 40_000


@pytest.mark.parametrize("cut", [1, 87, 88, 200])
def test_a_run_cut_off_within_a_row_is_read_up_to_there(tmp_path: Path, cut: int) -> None:
    write_run(tmp_path, make_rows(10, 2))
    path = disk.records_path(tmp_path, 1)
    os.truncate(path, path.stat().st_size - cut)
    _, history = store.read_run(tmp_path)
    whole = (10 * 88 - cut) // 88
    assert history.totals.steps == whole
    assert len(history) == 10 + whole


def test_an_event_cut_off_within_its_line_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, make_rows(2, 1))
    with disk.events_path(tmp_path, 0).open("ab") as file:
        file.write(b'{"name": "note", "text": "hal')
    assert [name for name, _ in disk.read_events(tmp_path)] == ["run_started"]
    writer = disk.RunWriter(tmp_path, 0)
    writer.append_event("note", {"text": "whole"})
    writer.close()
    assert [name for name, _ in disk.read_events(tmp_path)] == ["run_started", "note"]


def test_writing_goes_on_after_half_a_row(tmp_path: Path) -> None:
    rows = make_rows(4, 1)[:, 0]
    disk.records_path(tmp_path, 0).write_bytes(rows[:2].tobytes()[:-13])
    writer = disk.RunWriter(tmp_path, 0)
    writer.append_records(rows[1:].tobytes())
    writer.close()
    assert store.read_run(tmp_path)[1]["step"].tolist() == [0, 1, 2, 3]


def test_each_append_is_on_disk_at_once(tmp_path: Path) -> None:
    writer = disk.RunWriter(tmp_path, 0)
    writer.append_records(make_rows(3, 1).tobytes())
    writer.append_event("eval", {"step": 1, "values": {"loss": np.float32(0.5)}})
    assert disk.records_path(tmp_path, 0).stat().st_size == 3 * 88
    line = json.loads(disk.events_path(tmp_path, 0).read_text())
    assert line["values"] == {"loss": 0.5}
    assert line["t_s"] > 0
    writer.close()
    writer.close()


def test_a_run_whose_kernel_died_before_run_json_is_still_read(tmp_path: Path) -> None:
    write_run(tmp_path, make_rows(5, 2))
    (tmp_path / disk.META).unlink()
    meta, history = store.read_run(tmp_path)
    assert meta == {}
    assert history.totals.steps == 5


def test_an_asynchronous_run_is_read_back_without_joining(tmp_path: Path) -> None:
    rows = make_rows(5, 2)
    rows["wait_s"] = 0.0
    write_run(tmp_path, rows, joined=False)
    os.truncate(disk.records_path(tmp_path, 1), 88)
    _, history = store.read_run(tmp_path)
    assert len(history) == 6
    assert not np.isnan(history["loss"]).any()


def test_rows_of_another_version_are_refused_not_misread(tmp_path: Path) -> None:
    write_run(tmp_path, make_rows(5, 1))
    meta = json.loads((tmp_path / disk.META).read_text())
    for other in (80, None):
        meta["record_bytes"] = other
        (tmp_path / disk.META).write_text(json.dumps(meta))
        with pytest.raises(RunError, match="WB-RUN-039"):
            store.read_run(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="WB-RUN-036"):
        store.read_run(tmp_path / "nothing")
    (tmp_path / disk.META).write_text("[1, 2")
    with pytest.raises(RunError, match="WB-RUN-037"):
        store.read_run(tmp_path)
    (tmp_path / disk.META).write_text("[1, 2]")
    with pytest.raises(RunError, match="WB-RUN-038"):
        store.read_run(tmp_path)


def test_a_saved_run_is_complete_and_replaces_an_older_one(tmp_path: Path) -> None:
    source = write_run(tmp_path / "live", make_rows(6, 2))
    for name in ("weights.npz", "weights.pt", "scratch.tmp"):
        (source / name).write_bytes(b"w")
    target = disk.save(source, tmp_path / "deep" / "kept")
    names = {path.name for path in target.iterdir()}
    assert {"run.json", "weights.npz", "weights.pt", "records-rank1.bin"} <= names
    assert "scratch.tmp" not in names
    assert store.read_run(target)[1].totals.steps == 6
    disk.save(write_run(tmp_path / "other", make_rows(9, 1)), target)
    assert store.read_run(target)[1].totals.steps == 9
    assert not (target / "weights.pt").exists()
    assert [path.name for path in target.parent.iterdir()] == ["kept"]


def test_saving_never_touches_a_folder_that_holds_something_else(tmp_path: Path) -> None:
    source = write_run(tmp_path / "live", make_rows(2, 1))
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    with pytest.raises(RunError, match="WB-RUN-041"):
        disk.save(source, tmp_path / "thesis")
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]
    with pytest.raises(RunError, match="WB-RUN-036"):
        disk.save(tmp_path / "absent", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_saving_a_run_onto_itself_changes_nothing(tmp_path: Path) -> None:
    source = write_run(tmp_path / "live", make_rows(3, 1))
    assert disk.save(source, source) == source
    assert store.read_run(source)[1].totals.steps == 3


def test_a_failed_copy_leaves_the_older_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = disk.save(write_run(tmp_path / "a", make_rows(3, 1)), tmp_path / "kept")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.shutil, "copy2", full)
    with pytest.raises(RunError, match="WB-RUN-042") as told:
        disk.save(write_run(tmp_path / "b", make_rows(8, 1)), target)
    assert "No space left on device" in str(told.value)  # the system's own words
    assert told.value.next_step
    assert store.read_run(target)[1].totals.steps == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "kept"]


def test_meta_may_hold_numpy_numbers_and_paths(tmp_path: Path) -> None:
    disk.write_meta(tmp_path, {"loss": np.float64(0.5), "where": tmp_path, "ranks": np.arange(2)})
    expected = {"loss": 0.5, "where": str(tmp_path), "ranks": [0, 1]}
    assert disk.read_meta(tmp_path).items() >= expected.items()


def test_engines_can_import_the_writer_without_the_kernels_modules() -> None:
    code = (
        "import sys, workbench.history.disk\n"
        "bad = {'IPython', 'ipyparallel', 'ipywidgets', 'matplotlib', 'pandas', 'torch', "
        "'platformdirs', 'workbench.history.store'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def trained(folder: Path, steps: int = 20) -> Run:
    """Return a run as its end leaves it, weights and all, in `folder`."""
    plan = make_plan(Recipe("x"), "mirrored", workers=2)
    run = Run(plan, number=1, name="base", engines=(0, 1), devices=("cpu",) * 2, folder=folder)
    rows = make_rows(steps, 2)
    write_run(folder, rows)
    np.savez(folder / "weights.npz", bias=np.arange(40.0))
    (folder / "weights.pt").write_bytes(b"tensors")
    run.advance("submit")
    run.advance("start")
    run.history.append(rows.reshape(-1))
    run.finish(None)
    return run


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


HARM: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: path.write_bytes(b""),
    "removed": Path.unlink,
    "flipped": flip,
}


def test_a_whole_run_is_loaded_without_a_word(tmp_path: Path) -> None:
    run = trained(tmp_path / "live")
    run.save(tmp_path / "kept")
    for folder in (tmp_path / "live", tmp_path / "kept"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = load(folder)
        assert again.history.totals.steps == 20
        assert again.weights()["bias"][-1] == 39
        assert Topic.DAMAGED not in again.history.story.facts


@pytest.mark.parametrize("name", ["records-rank0.bin", "weights.npz"])
@pytest.mark.parametrize("harm", HARM)
def test_what_is_damaged_in_a_saved_run_is_named(tmp_path: Path, name: str, harm: str) -> None:
    kept = trained(tmp_path / "live").save(tmp_path / "kept")
    HARM[harm](kept / name)
    with pytest.warns(RunDamagedWarning, match=name) as warned:
        again = load(kept)
    assert all(word in str(warned[0].message) for word in ("seen:", "allowed:", "next:"))
    assert again.summarise().damaged
    other = trained(tmp_path / "other")
    compared = compare(again, other).comparison
    assert re.match("No verdict.* base is damaged", compared.verdict)
    assert any(name in note for note in compared.notes)
    with pytest.warns(RunDamagedWarning, match=name):  # a copy of it is no better
        load(again.save(tmp_path / "copy"))
    if name == "weights.npz":
        for read in (again.weights, lambda: initial.read(kept)):
            with pytest.raises(RunError, match=r"(?s)WB-RUN-040.*torch\.load"):
                read()


@pytest.mark.parametrize("harm", ["cut", "emptied", "removed"])
def test_rows_that_are_gone_are_missed_in_a_runs_own_folder_too(tmp_path: Path, harm: str) -> None:
    trained(tmp_path / "live")
    HARM[harm](tmp_path / "live" / "records-rank1.bin")
    with pytest.warns(RunDamagedWarning, match=r"records-rank1\.bin"):
        load(tmp_path / "live")


@pytest.mark.parametrize("harm", HARM)
def test_damage_is_met_in_runs_of_versions_that_kept_no_checksums(
    tmp_path: Path, harm: str
) -> None:
    kept = trained(tmp_path / "live").save(tmp_path / "kept")
    meta = disk.read_meta(kept)
    del meta[disk.FILES]
    disk.write_meta(kept, meta)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(kept).weights()
    HARM[harm](kept / "weights.npz")
    with pytest.raises(RunError):
        load(kept).weights()
    (kept / "records-rank0.bin").write_bytes(b"")
    with pytest.warns(RunDamagedWarning, match=r"(?s)WB-WARN-002.*rank 0"):
        load(kept)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(folders.HOME_VARIABLE, str(tmp_path / "home"))
    return tmp_path / "home"


def old_run(name: str, size: int = 10) -> Path:
    folder = folders.new_run_dir(name)
    (folder / "records-rank0.bin").write_bytes(b"x" * size)
    for path in (folder / "records-rank0.bin", folder):
        os.utime(path, (1.0, 1.0))
    return folder


def test_the_environment_says_where_runs_are_kept(home: Path) -> None:
    assert folders.runs_root() == home / "runs"
    assert folders.new_run_dir("base").parent == home / "runs"


def test_without_it_they_are_in_the_users_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(folders.HOME_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path in folders.runs_root().parents


def test_where_nothing_may_be_written_runs_are_kept_in_a_private_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv(folders.HOME_VARIABLE, str(home / "deeper"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert folders.moved() == ""
    home.write_text("a file, in which nobody can make a folder")
    root = folders.runs_root()
    assert root.parent == tmp_path
    assert root.stat().st_mode & 0o077 == 0
    assert folders.new_run_dir("base").parent == root
    assert [word in folders.moved() for word in (str(root), str(home), "WORKBENCH_HOME")] == [
        True
    ] * 3
    root.chmod(0o755)  # as another user might have made it, to read along
    assert folders.moved() == ""
    assert not folders.new_run_dir("base").exists()


@pytest.mark.parametrize("name", ["../../etc", "a/b", "", "..", "x" * 300, "läuft gut?"])
def test_a_runs_name_cannot_lead_out_of_the_folder(home: Path, name: str) -> None:
    folder = folders.new_run_dir(name)
    assert folder.resolve().parent == (home / "runs").resolve()
    assert folder.stat().st_mode & 0o077 == 0


def test_folders_sort_by_time_and_never_collide(home: Path) -> None:
    made = [folders.new_run_dir("base") for _ in range(20)]
    assert sorted(made) == made
    assert len(set(made)) == 20


def test_the_oldest_runs_are_pruned_by_number(home: Path) -> None:
    made = [old_run(f"r{i}") for i in range(5)]
    assert folders.prune(keep=2) == made[:3]
    assert [path.exists() for path in made] == [False, False, False, True, True]


def test_the_oldest_runs_are_pruned_by_size(home: Path) -> None:
    made = [old_run(f"r{i}", size=1000) for i in range(4)]
    assert folders.prune(max_bytes=2500) == made[:2]


def test_runs_in_use_are_never_pruned(home: Path) -> None:
    guarded, fresh, old = old_run("guarded"), folders.new_run_dir("fresh"), old_run("old")
    assert folders.prune(keep=0, protect=[guarded]) == [old]
    assert guarded.exists()
    assert fresh.exists()


def test_two_notebooks_may_prune_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [old_run(f"r{i}") for i in range(3)]
    walk = os.walk

    def gone_meanwhile(folder: Path) -> Any:
        found = list(walk(folder))
        shutil.rmtree(made[0], ignore_errors=True)  # what another notebook does
        return found

    monkeypatch.setattr(folders.os, "walk", gone_meanwhile)
    assert folders.prune(keep=1) == made[:2]
    assert made[2].exists()


def test_rows_without_a_measured_loss_survive_the_round_trip(tmp_path: Path) -> None:
    rows = make_rows(3, 2)
    rows["local_loss"] = NAN
    _, history = store.read_run(write_run(tmp_path, rows))
    assert "loss" in history.unmeasured


def test_who_went_and_came_is_read_back_and_saved_with_the_run(tmp_path: Path) -> None:
    plan = make_plan(Recipe("x"), "mirrored", workers=3)
    folder = tmp_path / "run"
    run = Run(plan, number=1, name="heals", engines=(0, 1, 2), devices=(), folder=folder)
    write_run(folder, make_rows(60, 3))
    run.tell(Healed(ranks=[1], step=20, seconds=0.25, workers=2))
    run.tell(Shed(ranks=[2], step=30, seconds=0.01, workers=2, shares=[10, 5], before_s=0.04))
    run.tell(Gained(step=30, before_s=0.04, after_s=0.03))
    run.tell(Joined(ranks=[1], step=40, seconds=0.125, workers=3))
    for loaded in (load(run.save(tmp_path / "saved")), load(folder)):
        assert loaded.events == run.events
        assert loaded.snapshot().changes == tuple(run.events)
    assert run.events[1]["after_s"] == 0.03


def test_what_happens_after_a_runs_files_were_counted_is_not_written_to_them(
    tmp_path: Path,
) -> None:
    plan = make_plan(Recipe("x"), "mirrored", workers=3)
    run = Run(plan, number=1, name="over", engines=(0, 1, 2), devices=(), folder=tmp_path)
    write_run(tmp_path, make_rows(6, 3))
    run.over.set()
    run.tell(Joined(ranks=[1], step=5, seconds=0.1, workers=3))
    assert not (tmp_path / disk.KERNELS_EVENTS).exists()
    assert len(run.events) == 1


@pytest.mark.parametrize("first", [0, 2])
def test_a_lost_loss_is_known_from_the_disk_and_from_a_copy(tmp_path: Path, first: int) -> None:
    rows = make_rows(4, 1)
    rows["local_loss"][first:] = np.nan
    rows["flags"] |= FLAG_LOSS_SEEN
    _, history = store.read_run(write_run(tmp_path / "run", rows))
    history.write(tmp_path / "copy")
    disk.write_meta(tmp_path / "copy", {"ranks": [5]})
    for found in (history, store.read_run(tmp_path / "copy")[1]):
        assert found.story.facts[Topic.LOSS_LOST] == first
        assert summarise(found, {"strategy": "one_device", "name": "lost"}).diverged


@pytest.mark.parametrize("joined", [True, False])
def test_the_lost_loss_of_one_worker_is_the_runs(tmp_path: Path, joined: bool) -> None:
    rows = make_rows(4, 2)
    rows["flags"] |= FLAG_LOSS_SEEN
    rows["local_loss"][2:, 1] = np.nan
    _, history = store.read_run(write_run(tmp_path / "run", rows, joined=joined))
    history.write(tmp_path / "copy")
    disk.write_meta(tmp_path / "copy", {"ranks": [5, 6], "joined": joined})
    for found in (history, store.read_run(tmp_path / "copy")[1]):
        assert found.story.facts[Topic.LOSS_LOST] == 2
        assert np.isnan(found["loss"]).sum() == (4 if joined else 2)


def test_a_loss_that_an_asynchronous_worker_never_returned_is_not_lost(tmp_path: Path) -> None:
    rows = make_rows(4, 2)
    rows["flags"] |= FLAG_LOSS_SEEN
    rows["local_loss"][2:, 1] = np.nan
    rows["flags"][2:, 1] = 0
    _, history = store.read_run(write_run(tmp_path, rows, joined=False))
    assert Topic.LOSS_LOST not in history.story.facts
