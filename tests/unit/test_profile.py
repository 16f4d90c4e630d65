import json
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from workbench.cluster import folders


@pytest.fixture(autouse=True)
def own_temp(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def dead():
    """A process that has ended: its pid and start time."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    about = {"pid": process.pid, "create_time": psutil.Process(process.pid).create_time()}
    process.communicate()
    return about


def test_a_cluster_gets_a_private_folder_with_what_ipyparallel_needs():
    folder = folders.create()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {"security", "log", "pid"} <= {entry.name for entry in folder.iterdir()}
    folders.remove(folder)
    assert not folder.exists()


def test_sweep_removes_only_folders_whose_owner_is_dead(own_temp, dead):
    mine, stale, unmarked = folders.create(), folders.create(), own_temp / "workbench-other"
    unmarked.mkdir()
    (stale / folders.OWNER_FILE).write_text(json.dumps(dead))
    assert folders.sweep() == [stale]
    assert mine.exists()
    assert unmarked.exists()
    assert not stale.exists()


def test_a_pid_that_was_given_to_another_process_counts_as_dead():
    began = psutil.Process().create_time()
    assert folders.same_process(os.getpid(), began)
    assert not folders.same_process(os.getpid(), began - 3600)


def test_sweep_takes_a_garbled_owner_for_dead():
    folder = folders.create()
    (folder / folders.OWNER_FILE).write_text("{")
    assert folders.sweep() == [folder]


def test_nothing_but_a_clusters_folder_is_ever_removed(own_temp):
    elsewhere = own_temp / "precious"
    elsewhere.mkdir()
    nested = elsewhere / "workbench-x"
    nested.mkdir()
    link = own_temp / "workbench-link"
    link.symlink_to(elsewhere)
    for path in (elsewhere, nested, link, own_temp):
        assert not folders.is_ours(path)
        folders.remove(path)
        assert path.exists()


HEEDLESS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
                         env={**os.environ, sys.argv[1]: sys.argv[2]}, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_process_that_nobody_reaps_has_ended(tmp_path, monkeypatch):
    """As in a container whose first process reaps late."""
    monkeypatch.setattr(folders, "END_S", 20.0)
    heedless = [sys.executable, "-c", HEEDLESS, folders.MARK, str(tmp_path)]
    with subprocess.Popen(heedless, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        began = time.monotonic()
        folders.end_family(tmp_path)
        assert time.monotonic() - began < folders.END_S / 2
        assert child.status() == psutil.STATUS_ZOMBIE
        parent.communicate()


def test_a_process_that_takes_its_time_to_end_is_waited_for(tmp_path, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    one = psutil.Process(process.pid)
    families = [[one], []]
    monkeypatch.setattr(folders, "family", lambda path: families.pop(0))
    monkeypatch.setattr(one, "kill", lambda: threading.Timer(0.1, process.kill).start())
    folders.end_family(tmp_path)
    ended = one.status() == psutil.STATUS_ZOMBIE
    process.communicate()
    assert ended
