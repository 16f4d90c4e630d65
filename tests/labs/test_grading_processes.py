"""Nothing that a notebook starts outlives it: processes, memory, folders, environment."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import time

import psutil
import pytest

from workbench.labs.grading import environment, processes
from workbench.labs.grading.limits import Limits
from workbench.labs.grading.watch import Watch

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's adoption")
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
ESCAPE = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    os.execve(sys.executable, [sys.executable, "-c", {SLEEP!r}], {{}})
"""


def start(code=SLEEP, **settings):
    made = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **settings)
    assert made.stdout.readline() == b"up\n"
    return made


def until(condition, timeout_s=20):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@LINUX
def test_a_process_that_left_its_family_and_its_environment_is_adopted_and_ended():
    before = {p.pid for p in processes.below(os.getpid())}
    assert processes.adopt()
    try:
        parent = start(ESCAPE)
        parent.wait()

        def found():
            return [p for p in processes.below(os.getpid()) if p.pid not in before]

        assert len(found()) == 1
        assert found()[0].environ() == {}
        assert processes.end(found) == []
        assert found() == []
    finally:
        processes.adopt(False)
        parent.stdout.close()


def test_processes_are_found_by_their_mark_wherever_they_are():
    made = start(env={**os.environ, processes.MARK: "this-test"}, start_new_session=True)
    other = start()
    try:
        assert [p.pid for p in processes.marked("this-test")] == [made.pid]
        processes.end(lambda: processes.marked("this-test"))
        assert processes.marked("this-test") == []
        assert other.poll() is None
    finally:
        for one in (made, other):
            one.kill()
            one.wait()
            one.stdout.close()


def test_memory_that_processes_share_is_counted_once():
    block = 200_000_000
    code = f"import os, time\nbig = bytearray(b'x') * {block}\nfor _ in range(2):\n" \
        "    if os.fork() == 0: break\nprint('up', flush=True)\ntime.sleep(600)"  # fmt: skip
    made = start(code)
    try:
        family = psutil.Process(made.pid).children(recursive=True)
        until(lambda: len(processes.below(made.pid)) >= 2)
        family = [psutil.Process(made.pid), *processes.below(made.pid)]
        all_pages = processes.memory_bytes(family, 10 * block)
        once = processes.memory_bytes(family, block)
        assert all_pages > 3 * block * 0.9
        if sys.platform.startswith("linux"):
            assert block * 0.9 < once < all_pages * 0.6
    finally:
        processes.end(lambda: [psutil.Process(made.pid), *processes.below(made.pid)]
                      if made.poll() is None else [])  # fmt: skip
        made.stdout.close()


class Held:
    """A family whose size is told."""

    def __init__(self, count, held_bytes):
        self.family = [self] * count
        self._held = held_bytes

    def memory_info(self):
        return self

    def memory_full_info(self):
        return self

    @property
    def rss(self):
        return self._held

    pss = rss


@pytest.mark.parametrize(
    ("count", "held", "words"), [(3, 10**9, "3.0 GB of memory"), (200, 1, "200 processes")]
)
def test_what_is_too_much_is_named_and_ended_once(count, held, words):
    ended = []
    family = Held(count, held).family
    watch = Watch(Limits(memory_gb=2), lambda: family, lambda: ended.append(1))
    until(lambda: ended)
    watch.stop()
    assert words in watch.broken
    assert ended == [1]


def test_what_is_within_the_limits_is_left_alone():
    looks = []

    def family():
        looks.append(1)
        return Held(10, 10**8).family

    watch = Watch(Limits(memory_gb=2), family, lambda: looks.clear())
    until(lambda: len(looks) >= 3)
    watch.stop()
    assert watch.broken == ""


def test_a_notebook_sees_its_own_folders_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["some", "/where"]))
    made = environment.environment(tmp_path, "mark")
    assert "secret" not in made.values()
    assert made[processes.MARK] == "mark"
    for name in ("HOME", "TMPDIR", "WORKBENCH_HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        assert made[name].startswith(str(tmp_path))
        assert os.path.isdir(made[name])
    paths = made["PYTHONPATH"].split(os.pathsep)
    assert paths[:2] == [os.path.abspath("some"), "/where"]
    assert all(map(os.path.isabs, paths))
    if site.ENABLE_USER_SITE:
        assert made["PYTHONUSERBASE"] == site.getuserbase()


def test_a_folder_is_removed_with_links_and_what_may_not_be_written(tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    outside.write_text("stays")
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_text("x")
    (folder / "link").symlink_to(outside)
    (folder / "a").chmod(0)
    environment.remove(folder)
    assert not folder.exists()
    assert outside.read_text() == "stays"
    environment.remove(folder)
