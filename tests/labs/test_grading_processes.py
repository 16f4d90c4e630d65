"""Nothing that a notebook starts outlives it: processes, memory, folders, environment."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import time

import psutil
import pytest
from handed_in import without_rights

from workbench.labs.grading import isolation, processes
from workbench.labs.grading.processes import Limits, Watch, on_disk

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
        "    if os.fork() == 0: break\nos.write(1, b'up\\n')\ntime.sleep(600)"  # fmt: skip
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
def test_what_is_too_much_is_named_and_ended_once(tmp_path, count, held, words):
    ended = []
    family = Held(count, held).family
    watch = Watch(Limits(memory_gb=2), lambda: family, lambda: ended.append(1), tmp_path)
    until(lambda: ended)
    watch.stop()
    assert words in watch.broken
    assert ended == [1]


def test_files_are_measured_together_whatever_folder_they_are_in(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.labs.grading.processes.DISK_EVERY_S", 0.1)
    ended = []
    limits = Limits(disk_gb=0.003)
    watch = Watch(limits, lambda: [], lambda: ended.append(1), tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for place in (".", "a", "a/b"):
        assert not ended
        (tmp_path / place / "file").write_bytes(os.urandom(1_200_000))
    until(lambda: ended)
    watch.stop()
    assert re.findall(r"[\d.]+ GB", watch.broken) == ["0.003 GB"]


def test_too_many_files_are_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.labs.grading.processes.DISK_EVERY_S", 0.1)
    monkeypatch.setattr("workbench.labs.grading.processes.MOST_FILES", 20)
    ended = []
    for i in range(30):
        (tmp_path / str(i)).touch()
    watch = Watch(Limits(), lambda: [], lambda: ended.append(1), tmp_path)
    until(lambda: ended)
    watch.stop()
    assert watch.broken.endswith("over 20")


def test_files_in_folders_too_deep_to_be_counted_are_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.labs.grading.processes.DISK_EVERY_S", 0.1)
    ended, top = [], os.open(tmp_path, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=top)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=top)
        os.close(top)
        top = below
    os.close(top)
    watch = Watch(Limits(), lambda: [], lambda: ended.append(1), tmp_path)
    until(lambda: ended)
    watch.stop()
    isolation.remove(tmp_path)
    assert "3500" in watch.broken


def test_answers_that_fill_the_graders_own_memory_are_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.labs.grading.processes.MOST_OWN_BYTES", 20_000_000)
    ended = []
    watch = Watch(Limits(), lambda: [], lambda: ended.append(1), tmp_path)
    answers = bytes(range(256)) * 1_500_000  # far more than this process gives back meanwhile
    until(lambda: ended)
    watch.stop()
    assert len(answers) > 0
    assert re.search(r" 0\.\d GB", watch.broken)


def test_files_are_measured_as_the_disk_holds_them_and_links_are_not_followed(tmp_path):
    (folder := tmp_path / "folder").mkdir()
    (tmp_path / "outside").write_bytes(os.urandom(3_000_000))
    (folder / "link").symlink_to(tmp_path)
    with (folder / "sparse").open("wb") as sparse:
        sparse.truncate(10**9)
    (folder / "full").write_bytes(os.urandom(1_000_000))
    size_bytes, files = on_disk(folder, 10**9, 10**6)
    assert 1_000_000 <= size_bytes < 1_500_000
    assert files == 3
    assert on_disk(folder / "none", 1, 1) == (0, 0)


def test_what_is_within_the_limits_is_left_alone(tmp_path):
    looks = []

    def family():
        looks.append(1)
        return Held(10, 10**8).family

    watch = Watch(Limits(memory_gb=2), family, lambda: looks.clear(), tmp_path)
    until(lambda: len(looks) >= 3)
    watch.stop()
    assert watch.broken == ""


def test_a_notebook_sees_its_own_folders_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["some", "/where"]))
    made = isolation.environment(tmp_path, "mark")
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
    isolation.remove(folder)
    assert not folder.exists()
    assert outside.read_text() == "stays"


def mode(path):
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("left", ["nothing", "folder", "file", "link"])
def test_whatever_stands_in_a_folders_place_what_is_above_keeps_its_mode(tmp_path, left):
    (above := tmp_path / "above").mkdir()
    above.chmod(0o755)
    folder = above / "folder"
    if left == "folder":
        (folder / "a").mkdir(parents=True)
        (folder / "a" / "file").touch()
        (folder / "a").chmod(0o500)
        folder.chmod(0o500)
    elif left == "file":
        folder.touch()
    elif left == "link":
        folder.symlink_to(tmp_path)
    isolation.remove(folder)
    assert not os.path.lexists(folder)
    assert mode(above) == 0o755
    assert tmp_path.is_dir()


def test_folders_that_may_not_be_read_are_removed_however_deep_they_are(tmp_path):
    above = tmp_path / "above"
    (folder := above / "a").joinpath("b/c/d").mkdir(parents=True)
    (folder / "b" / "c" / "d" / "file").touch()
    above.chmod(0o755)
    for path in (folder / "b/c/d", folder / "b/c", folder / "b", folder):
        path.chmod(0)
    subprocess.run(
        [sys.executable, "-c", "import sys; from pathlib import Path\n"
         "from workbench.labs.grading.isolation import remove\nremove(Path(sys.argv[1]))",
         str(folder)], check=True, preexec_fn=without_rights,
    )  # fmt: skip
    assert not folder.exists()
    assert mode(above) == 0o755


def test_folders_deeper_than_python_can_follow_are_removed(tmp_path):
    made = subprocess.run([sys.executable, "-c", """
import os
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
"""], cwd=tmp_path, check=True)  # fmt: skip
    assert made.returncode == 0
    isolation.remove(tmp_path / "d")
    assert not (tmp_path / "d").exists()


# -- what others of the same user may see

HIDE = "from workbench.labs.grading import processes\n"
SEE = """
import sys
try:
    print("token" in open(f"/proc/{sys.argv[1]}/environ").read())
except OSError:
    print("hidden")
"""


@LINUX
@pytest.mark.parametrize(
    ("code", "expected"),
    [("", "True"), ("processes.hide()\n", "hidden"),
     ("assert processes.hide()\nassert not processes.hide()\nprocesses.hide(False)\n", "True")],
)  # fmt: skip
def test_a_hidden_process_keeps_its_environment_from_others_of_its_user(code, expected):
    env = {**os.environ, "SECRET": "token"}
    made = start(HIDE + code + SLEEP, env=env, preexec_fn=without_rights)
    try:
        seen = subprocess.run(
            [sys.executable, "-c", SEE, str(made.pid)], capture_output=True, text=True,
            check=True, preexec_fn=without_rights,
        ).stdout.strip()  # fmt: skip
    finally:
        made.kill()
        made.wait()
        made.stdout.close()
    assert seen == expected
