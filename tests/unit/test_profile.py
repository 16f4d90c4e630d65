import json
import os
import subprocess
import sys

import psutil
import pytest

from workbench.cluster import profile


@pytest.fixture(autouse=True)
def own_temp(tmp_path, monkeypatch):
    monkeypatch.setattr(profile.tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def dead():
    """A process that has ended: its pid and start time."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    about = {"pid": process.pid, "create_time": psutil.Process(process.pid).create_time()}
    process.communicate()
    return about


def test_a_cluster_gets_a_private_folder_with_what_ipyparallel_needs():
    folder = profile.create()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {"security", "log", "pid"} <= {entry.name for entry in folder.iterdir()}
    profile.remove(folder)
    assert not folder.exists()


def test_sweep_removes_only_folders_whose_owner_is_dead(own_temp, dead):
    mine, stale, unmarked = profile.create(), profile.create(), own_temp / "workbench-other"
    unmarked.mkdir()
    (stale / profile.OWNER_FILE).write_text(json.dumps(dead))
    assert profile.sweep() == [stale]
    assert mine.exists()
    assert unmarked.exists()
    assert not stale.exists()


def test_a_pid_that_was_given_to_another_process_counts_as_dead():
    began = psutil.Process().create_time()
    assert profile.same_process(os.getpid(), began)
    assert not profile.same_process(os.getpid(), began - 3600)


def test_sweep_takes_a_garbled_owner_for_dead():
    folder = profile.create()
    (folder / profile.OWNER_FILE).write_text("{")
    assert profile.sweep() == [folder]


def test_nothing_but_a_clusters_folder_is_ever_removed(own_temp):
    elsewhere = own_temp / "precious"
    elsewhere.mkdir()
    nested = elsewhere / "workbench-x"
    nested.mkdir()
    link = own_temp / "workbench-link"
    link.symlink_to(elsewhere)
    for path in (elsewhere, nested, link, own_temp):
        assert not profile.is_ours(path)
        profile.remove(path)
        assert path.exists()
