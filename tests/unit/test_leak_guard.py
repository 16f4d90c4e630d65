"""The guard itself: each kind of leak is found under its test's name, and nothing else is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import leaks
import pytest
from leaks import Kept

TESTS = Path(__file__).parents[1]
CONFTEST = """
    import leaks
    from leak_guard import LeakGuard
    leaks.SETTLE_S = 0.3
    def pytest_configure(config):
        config.pluginmanager.register(LeakGuard())
"""
HEAD = """
    import json, os, socket, subprocess, sys, tempfile, threading
    import pytest
    held = []
    end = threading.Event()
    @pytest.fixture(scope="session", autouse=True)
    def at_the_end():
        yield
        end.set()
        for one in held:
            one.kill()
            one.wait()
    def sleeping():
        return subprocess.Popen(["sleep", "60"])
"""
LEAKING = {
    "thread": ("threading.Thread(target=end.wait, name='long').start()", "thread 'long' (not"),
    "our_thread": (
        "threading.Thread(target=end.wait, name='workbench-x', daemon=True).start()",
        "thread 'workbench-x' (daemon)",
    ),
    "variable": ("os.environ['NEW_ONE'] = '1'", "variable NEW_ONE: unset before, '1' now"),
    "changed": ("os.environ['THERE'] = 'b'", "variable THERE: 'a' before, 'b' now"),
    "unset": ("del os.environ['GONE']", "variable GONE: 'a' before, unset now"),
    "folder_of_work": ("os.chdir('/')", "working directory: /"),
    "file": ("held_file = open('left.txt', 'w'); sys.held_file = held_file", "open file /"),
    "socket": ("sys.one = socket.socket()", "open socket:["),
    "pipe": ("os.pipe()", "open pipe:["),
    "process": ("held.append(sleeping())", ": sleep 60"),
    "zombie": (
        "one = sleeping(); held.append(one); one.kill(); "
        "os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)",
        "sleep, which has ended: nobody waits for it",
    ),
    "memory": ("open(f'/dev/shm/wbt-{os.getpid()}', 'w').close()", "shared memory /dev/shm/wbt-"),
    "cluster_folder": (
        "at = tempfile.mkdtemp(prefix='workbench-'); "
        "json.dump({'pid': os.getpid()}, open(at + '/owner.json', 'w'))",
        "in the temporary folder /",
    ),
}  # fmt: skip
"""What a test does, and what the guard says of it."""
CLEAN = """
    def test_what_is_closed():
        with socket.socket(), open("file", "w"), sleeping() as one:
            one.kill()
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()

    def test_what_ends_soon():
        threading.Thread(target=lambda: end.wait(0.05)).start()

    def test_what_is_put_back(monkeypatch, tmp_path):
        monkeypatch.setenv("NEW_ONE", "1")
        monkeypatch.delenv("GONE")
        monkeypatch.chdir(tmp_path)

    def test_a_thread_that_dies_with_the_process():
        threading.Thread(target=end.wait, name="a library's", daemon=True).start()

    def test_what_only_rubbish_holds():
        a = [open("file", "w")]
        a.append(a)

    @pytest.fixture(scope="module")
    def wide():
        os.environ["OF_THE_FILE"] = "1"
        process, pair = sleeping(), socket.socketpair()
        thread = threading.Thread(target=process.wait, name="wide")
        thread.start()
        yield process
        del os.environ["OF_THE_FILE"]
        process.kill()
        thread.join()
        for one in pair:
            one.close()

    def test_what_a_wider_fixture_makes(wide):
        assert wide.poll() is None

    def test_what_a_wider_fixture_still_holds(wide):
        assert wide.poll() is None

    @pytest.fixture(scope="module")
    def late():
        pair = socket.socketpair()
        yield
        for one in pair:
            one.close()

    def test_what_a_wider_fixture_makes_in_a_test(request):
        request.getfixturevalue("late")

    @pytest.fixture(scope="session")
    def widest():
        file = open("of the session", "w")
        yield
        file.close()

    def test_what_the_session_holds(widest): pass
"""
SLOPPY = """
    @pytest.fixture(scope="module")
    def sloppy():
        sys.kept = open("kept.txt", "w")

    def test_one(sloppy): pass
    def test_another(sloppy): pass
"""
ONCE = """
    def test_leaks_once():
        os.environ["NEW_ONE"] = "1"

    def test_mends():
        sys.tries = getattr(sys, "tries", 0) + 1
        if sys.tries == 1:
            sys.file = open("left.txt", "w")
        else:
            sys.file.close()

    def test_last(): pass
"""
SHARED = """
    pytestmark = pytest.mark.leaks("the tests share what the first one makes")

    @pytest.fixture(scope="module", autouse=True)
    def mends():
        yield
        sys.made.close()

    def test_makes():
        sys.made = socket.socket()

    def test_uses():
        assert sys.made.fileno() > 0
"""
NO_REASON = """
    @pytest.mark.leaks
    def test_says_nothing(): pass
"""
FAILING = """
    def test_that_fails():
        os.environ["NEW_ONE"] = "1"
        assert False

    def test_that_follows(): pass
"""


def run(folder: Path, files: dict[str, str], *arguments: str) -> SimpleNamespace:
    """Run files of tests under the guard; return how each test ended, and all that was said."""
    (folder / "conftest.py").write_text(textwrap.dedent(CONFTEST))
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(text))
    temp = folder / "temp"
    temp.mkdir()
    environment = {
        **os.environ, "PYTHONPATH": str(TESTS), "TMPDIR": str(temp), "GONE": "a", "THERE": "a",
        "PYTEST_ADDOPTS": "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:nbval",
         *arguments, f"--rootdir={folder}", str(folder)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    ended: dict[str, list[str]] = {}
    for name, how in re.findall(r"::test_(\w+) (PASSED|FAILED|ERROR|RERUN)", done.stdout):
        ended.setdefault(name, []).append(how)
    return SimpleNamespace(ended=ended, text=done.stdout, code=done.returncode)


def test_each_kind_of_leak_fails_the_test_that_left_it(tmp_path: Path) -> None:
    tests = "\n".join(
        f"    def test_{name}():\n        {what}\n" for name, (what, _) in LEAKING.items()
    )
    try:
        done = run(tmp_path, {"leaking": tests})
    finally:
        for path in Path("/dev/shm").glob("wbt-*"):
            path.unlink()
    assert {name: ended[-1] for name, ended in done.ended.items()} == dict.fromkeys(
        LEAKING, "ERROR"
    ), done.text
    for name, (_, words) in LEAKING.items():
        said = done.text.partition(f"::test_{name} left behind:")[2].partition("Close, stop")[0]
        assert words in said, f"{name}: {said or done.text}"
        assert len(said.strip().splitlines()) == 1, f"{name}: {said}"


def test_what_was_cleared_away_and_what_wider_fixtures_hold_is_no_leak(tmp_path: Path) -> None:
    done = run(tmp_path, {"clean": CLEAN, "other": "    def test_other(): pass\n"})
    assert done.code == 0, done.text
    assert len(done.ended) == CLEAN.count("def test_") + 1


def test_a_file_whose_fixture_leaves_something_fails_by_its_name_even_if_repeated(
    tmp_path: Path,
) -> None:
    files = {"a_sloppy": SLOPPY, "other": "    def test_other(): pass\n"}
    done = run(tmp_path, files, "--reruns", "1")
    assert done.ended["one"] == ["PASSED"]
    assert done.ended["another"][-1] == "ERROR", done.text
    assert "RERUN" in done.ended["another"]
    assert done.ended["other"] == ["PASSED"]
    assert "test_a_sloppy.py, all its tests together, left behind:" in done.text
    assert "kept.txt" in done.text


def test_a_leak_is_not_forgiven_when_its_test_is_repeated_and_told_once(tmp_path: Path) -> None:
    files = {"once": ONCE}
    done = run(tmp_path, files, "--reruns", "1")
    assert done.ended["leaks_once"][-1] == "ERROR", done.text
    assert "RERUN" in done.ended["leaks_once"]
    assert done.ended["mends"] == ["PASSED", "RERUN", "PASSED"]
    assert done.ended["last"] == ["PASSED"]
    assert done.code == 1


def test_tests_that_share_what_they_make_are_looked_at_as_a_file(tmp_path: Path) -> None:
    sloppy = SHARED.replace("sys.made.close()", "pass")
    done = run(tmp_path, {"shared": SHARED, "sloppy": sloppy.replace("_uses", "_leaves")})
    assert done.ended["uses"] == ["PASSED"]
    assert done.ended["leaves"] == ["PASSED", "ERROR"]
    assert "test_sloppy.py, all its tests together, left behind:" in done.text


def test_who_shares_must_say_why(tmp_path: Path) -> None:
    done = run(tmp_path, {"no_reason": NO_REASON})
    assert done.ended == {"says_nothing": ["ERROR"]}
    assert 'pytest.mark.leaks("why")' in done.text


def test_what_a_failed_test_leaves_is_not_its_second_failure(tmp_path: Path) -> None:
    done = run(tmp_path, {"failing": FAILING})
    assert done.ended == {"that_fails": ["FAILED"], "that_follows": ["PASSED"]}
    assert "left behind" not in done.text


# -- what is allowed -------------------------------------------------------------------------------


def test_what_lending_keeps_is_excused_and_nothing_else_of_its_kind() -> None:
    kept = Kept({7}, {"/tmp/workbench-a"})
    for thing in (
        ("child", 7),
        ("folder", "/tmp/workbench-a"),
        ("file", "/tmp/workbench-a/log/engine-0.log"),
    ):
        assert leaks.excuse(thing, kept, linked=True)
        assert not leaks.excuse(thing, Kept(), linked=True) or thing[0] == "folder"
    assert not leaks.excuse(("child", os.getpid()), kept, linked=True)


@pytest.mark.parametrize(
    ("name", "alone", "beside_a_cluster"),
    [("workbench-router", False, True), ("workbench-watch-12", False, True),
     ("workbench-queue", False, False), ("workbench-log", False, False)],
)  # fmt: skip
def test_threads_of_a_cluster_stay_as_long_as_it_does_and_a_runs_do_not(
    name: str, alone: bool, beside_a_cluster: bool
) -> None:
    thing = ("thread", SimpleNamespace(name=name))
    assert bool(leaks.excuse(thing, Kept(), linked=False)) is alone
    assert bool(leaks.excuse(thing, Kept(), linked=True)) is beside_a_cluster


def test_memory_and_folders_of_a_neighbour_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "owner.json").write_text('{"pid": 1}')
    assert "process 1" in leaks.excuse(("folder", str(tmp_path)), Kept(), linked=False)
    assert "process 1" in leaks.excuse(("shared", "torch_1_2_3"), Kept(), linked=False)
    assert not leaks.excuse(("shared", f"torch_{os.getpid()}_2_3"), Kept(), linked=False)


def test_the_processes_that_were_started_are_seen_from_every_thread() -> None:
    found: list[subprocess.Popen[bytes]] = []
    go = threading.Event()

    def starts() -> None:
        found.append(subprocess.Popen(["sleep", "60"]))
        started.set()
        go.wait(30)

    started = threading.Event()
    thread = threading.Thread(target=starts, daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        assert found[0].pid in leaks.children()
    finally:
        found[0].kill()
        found[0].wait()
        go.set()
        thread.join(30)
    assert found[0].pid not in leaks.children()
