"""Shared memory in files: a full disk is an error when they are made, not SIGBUS when it is used.

In a child process that has mounts of its own, where the system lets it.
"""

import logging
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from workbench.devices.leases import DevicePool
from workbench.engine.transport import connection
from workbench.session.keeping import Keeping

CHILD = """
import os, subprocess, sys, tempfile
place = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], check=True)
tempfile.tempdir = place
with open(place + "/filler", "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
del os.memfd_create
"""
REGION = """
from workbench.engine.transport.connection import Region
try:
    Region.create(1 << 15).data[:] = 1
except OSError as error:
    print(error)
"""
SETS = """
from workbench.strategies.torch.parts import guard
class OneWorker:
    get_world_size = staticmethod(lambda: 1)
    broadcast_object_list = staticmethod(lambda what, src: None)
    @staticmethod
    def all_gather_object(every, one):
        every[0] = one
guard.dist = OneWorker
board = guard._shared(64, 0)
if board is not None:
    board[:8] = bytes(8)
print(board)
"""


def on_a_full_disk(folder, source):
    """Run something where temporary files have no room; skip where mounts are not allowed."""
    unshare = shutil.which("unshare")
    apart = [unshare, *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), "-m"]
    tried = [*apart, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    if not unshare or subprocess.run(tried, capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a small disk of their own (unshare -m)")
    done = subprocess.run(
        [*apart, sys.executable, "-c", CHILD + source, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def test_a_region_without_room_is_an_error_when_it_is_made(tmp_path):
    assert "No space left on device" in on_a_full_disk(tmp_path, REGION)


@pytest.mark.torch
def test_workers_without_room_for_a_board_do_without(tmp_path):
    assert on_a_full_disk(tmp_path, SETS).strip() == "None"


@pytest.mark.parametrize("allocates", [True, False])
def test_a_region_in_a_file_has_its_room_from_the_beginning(monkeypatch, allocates):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    if not allocates:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    region = connection.Region.create(3 << 20)
    try:
        assert os.fstat(region.fd).st_size == 3 << 20
        assert os.fstat(region.fd).st_blocks * 512 >= 3 << 20
        assert not region.data.any()
    finally:
        region.close()


def test_a_clusters_folder_without_room_is_said_once_in_plain_words(tmp_path, caplog):
    engines = SimpleNamespace(kept=False, folder=lambda: tmp_path / "gone", about=dict)
    pool = SimpleNamespace(servers=set(), devices=DevicePool("cpu"))
    cluster = SimpleNamespace(
        engine_set=engines, pool=pool, framework="torch", devices_asked="cpu",
        hearing=SimpleNamespace(folders={}),
    )  # fmt: skip
    keeping = Keeping(cluster, False, None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            keeping.write()
    (said,) = caplog.records
    assert "No such file or directory" in said.getMessage()
    assert said.exc_info is None
