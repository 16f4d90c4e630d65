"""Imports ahead of need take turns, need free memory, and wait for nobody without end."""

from __future__ import annotations

import time

import pytest

from workbench.cluster.forkserver import turns
from workbench.cluster.processes import FORK, can_fork
from workbench.errors import ClusterError

PLACES = turns.places
"""As it is: the tests below have one place."""


@pytest.fixture(autouse=True)
def one_place(monkeypatch):
    monkeypatch.setattr(turns, "places", lambda: 1)


def test_who_comes_second_waits_for_the_first(tmp_path):
    with turns.turn(folder=tmp_path) as first:
        assert first
        with turns.turn(0.1, tmp_path) as second:
            assert not second
    with turns.turn(0, tmp_path) as third:
        assert third


def test_who_ends_in_the_midst_of_its_turn_leaves_no_file(tmp_path):
    with turns.turn(folder=tmp_path) as free:
        assert free
        assert list(tmp_path.iterdir())
        turns.leave()
        assert not list(tmp_path.iterdir())
    with turns.turn(wait_s=0, folder=tmp_path) as free:
        assert free


def test_nobody_waits_without_end(tmp_path):
    began = time.monotonic()
    with turns.turn(folder=tmp_path), turns.turn(0.2, tmp_path) as mine:
        assert not mine
    assert time.monotonic() - began < 5


def test_a_folder_that_cannot_be_written_hinders_nobody(tmp_path):
    (tmp_path / "file").touch()
    began = time.monotonic()
    with turns.turn(folder=tmp_path / "file") as mine:
        assert not mine
    assert time.monotonic() - began < turns.WAIT_S / 4  # there is nobody to wait for


def test_a_link_that_somebody_left_is_not_followed(tmp_path):
    aim = tmp_path / "aim"
    next(iter(turns._files(tmp_path))).symlink_to(aim)
    with turns.turn(0, tmp_path) as mine:
        assert not mine
    assert not aim.exists()


def test_nothing_is_imported_into_memory_that_is_scarce(monkeypatch):
    monkeypatch.setattr(turns, "memory", lambda: (400_000_000, 2_000_000_000))
    assert "400 MB" in turns.too_little("torch")
    monkeypatch.setattr(turns, "memory", lambda: (1_800_000_000, 2_000_000_000))
    assert turns.too_little("tensorflow") == ""


def test_a_control_groups_limit_counts(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300000\n")
    monkeypatch.setattr(turns, "_CGROUP", tmp_path)
    assert turns.memory() == (400_000, 1_000_000)


def test_engines_are_started_fresh_where_that_is_asked(monkeypatch):
    monkeypatch.setenv(FORK, "off")
    can, why = can_fork()
    assert not can
    assert f"{FORK}=off" in why
    monkeypatch.setenv(FORK, "perhaps")
    with pytest.raises(ClusterError, match=f"{FORK}.*WB-CLUSTER-016"):
        can_fork()


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_as_many_import_at_once_as_there_are_cores(monkeypatch, cores):
    monkeypatch.setattr(turns.os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert PLACES() == cores
