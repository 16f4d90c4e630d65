import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest
from notebook_shell import soon
from warm_support import gone, kernel, stopped

from workbench.cluster import folders
from workbench.cluster.forkserver.client import WarmParent
from workbench.cluster.processes import can_fork, signal_child
from workbench.errors import ClusterError

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.torch,
    pytest.mark.skipif(not can_fork()[0], reason=can_fork()[1]),
]
WAIT_S = 30


@pytest.fixture(scope="module")
def warm():
    parent = WarmParent().start()
    parent.wait_ready()
    yield parent
    parent.stop()


@pytest.fixture
def exits(warm):
    seen = queue.Queue()
    undo = warm.on_exit(seen.put)
    yield seen
    undo()


def fork_engine(warm, tmp_path, *argv, **env):
    """Fork something that runs the engine's program with other arguments."""
    return warm.fork_engine(
        argv, {**os.environ, **env}, str(tmp_path), sys.path, str(tmp_path / "log")
    )


def test_what_would_make_forking_unsafe_is_absent_even_after_all_imports(warm):
    assert warm.warmed.wait(WAIT_S)
    status = warm.status()
    assert status["hazard"] is None
    assert status["waiting"] == []
    process = psutil.Process(warm.pid)
    assert process.num_threads() == 1
    assert process.net_connections() == []
    assert "torch" not in warm.report["missing"]


def test_a_child_writes_to_its_log_and_its_exit_code_is_told(warm, exits, tmp_path):
    pid = fork_engine(warm, tmp_path, "--version")
    end = exits.get(timeout=WAIT_S)
    assert (end.pid, end.code, end.signal) == (pid, 0, None)
    assert (tmp_path / "log").read_text().strip()
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    assert warm.exit_of(pid) == end


def test_a_child_that_fails_says_why_in_its_log(warm, exits, tmp_path):
    fork_engine(warm, tmp_path, "--IPEngine.id=many")
    assert exits.get(timeout=WAIT_S).code == 1
    assert "many" in (tmp_path / "log").read_text()


def test_a_killed_child_is_told_with_the_signals_name(warm, exits):
    pid, _, _ = warm.fork_keeper()
    assert warm.signal(pid, signal.SIGKILL)
    end = exits.get(timeout=WAIT_S)
    assert (end.pid, end.text) == (pid, "SIGKILL")
    assert not warm.signal(pid, signal.SIGKILL)


def test_only_its_own_children_are_signalled(warm):
    with subprocess.Popen(["sleep", "60"]) as other:
        assert not warm.signal(other.pid, signal.SIGKILL)
        warm.stop_pids([other.pid], grace_s=0)
        assert other.poll() is None
        other.kill()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system knows no pidfd")
def test_a_child_is_signalled_while_its_parent_is_busy(warm, exits):
    pid, _, _ = warm.fork_keeper()
    with stopped(warm.pid):
        assert warm.signal(pid, signal.SIGKILL)
        assert not gone([pid], WAIT_S)
        assert exits.empty()
    end = exits.get(timeout=WAIT_S)
    assert (end.pid, end.text) == (pid, "SIGKILL")


def test_without_pidfds_its_parent_is_asked_to_signal_a_child(warm, exits, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    pid, _, _ = warm.fork_keeper()
    assert warm.signal(pid, signal.SIGKILL)
    assert exits.get(timeout=WAIT_S).pid == pid


def test_who_is_no_child_of_the_parent_is_not_signalled_directly(warm):
    with subprocess.Popen(["sleep", "60"]) as other:
        assert not signal_child(warm.pid, other.pid, signal.SIGKILL)
        assert other.poll() is None
        other.kill()
    assert not signal_child(warm.pid, other.pid, signal.SIGKILL)  # it is gone


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(warm, exits):
    pid, _, _ = warm.fork_keeper()
    os.kill(pid, signal.SIGSTOP)  # a stopped process does not act on SIGTERM
    assert soon(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    warm.stop_pids([pid], grace_s=0.1)
    assert exits.get(timeout=WAIT_S).signal == signal.SIGKILL


def test_only_a_clusters_own_folder_can_be_guarded(warm, tmp_path):
    for path in (tmp_path, Path.home(), Path(tempfile.gettempdir())):
        warm.guard_dir(path)  # returns at once
        with pytest.raises(ClusterError, match="WB-CLUSTER-024"):
            warm.ask("guard_dir", path=str(path))
    assert tmp_path.exists()


def test_answers_go_to_the_thread_that_asked(warm):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        keepers = list(pool.map(lambda _: warm.fork_keeper(), range(8)))
    assert len({pid for pid, _, _ in keepers}) == 8
    assert len({port for _, _, port in keepers}) == 8
    for pid, _, port in keepers:
        listening = psutil.Process(pid).net_connections("tcp")
        assert port in {connection.laddr.port for connection in listening}
    warm.stop_pids([pid for pid, _, _ in keepers], grace_s=0)


def test_stop_ends_children_guarded_processes_and_folders():
    parent = WarmParent().start()
    parent.wait_ready()
    pid, _, _ = parent.fork_keeper()
    folder = folders.create()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as guarded:
        parent.guard(guarded.pid)
        parent.guard_dir(folder)
        warm_pid = parent.pid
        parent.stop()
        assert guarded.wait(WAIT_S) == -signal.SIGKILL
    assert not gone([pid, warm_pid], WAIT_S)
    assert not folder.exists()
    parent.stop()  # a second stop does nothing
    with pytest.raises(ClusterError, match="not running"):
        parent.fork_keeper()


def test_a_reused_pid_is_not_killed():
    parent = WarmParent().start()
    parent.wait_ready()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        began = psutil.Process(other.pid).create_time()
        parent.ask("guard", pid=other.pid, create_time=began - 3600)
        parent.stop()
        assert other.poll() is None
        other.kill()


def test_children_die_with_a_killed_warm_parent_and_are_told_so():
    parent = WarmParent().start()
    parent.wait_ready()
    seen = queue.Queue()
    parent.on_exit(seen.put)
    pids = {parent.fork_keeper()[0] for _ in range(2)}
    os.kill(parent.pid, signal.SIGKILL)
    assert not gone(pids, WAIT_S)
    assert {seen.get(timeout=WAIT_S).pid for _ in pids} == pids
    assert not parent.alive
    with pytest.raises(ClusterError, match="ended"):
        parent.fork_keeper()
    parent.stop()


def test_a_framework_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("workbench.cluster.processes.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ClusterError, match=r"(?s)WB-CLUSTER-020.*torch"):
        WarmParent().start()


def test_a_preload_that_fails_shows_up_as_an_error_with_the_log(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise RuntimeError('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parent = WarmParent().start()
    with pytest.raises(ClusterError, match=r"torch[\s\S]*WB-CLUSTER-0(20|24|26)") as caught:
        parent.wait_ready()
    assert "broken on purpose" in str(caught.value)
    parent.stop()


# -- the kernel dies -------------------------------------------------------------------------------

KERNEL = """
    import json, os, sys, time
    sys.path[:0] = {paths!r}
    from warm_support import quiet_cluster
    from workbench.cluster import folders
    from workbench.cluster.forkserver.client import WarmParent
    warm = WarmParent().start()
    def say(**what):
        print(json.dumps(what), flush=True)
    if {early}:
        say(pids=[warm.pid], folder="", log=warm._log_path)
        time.sleep(600)
    folder = folders.create()
    warm.guard_dir(folder)
    cluster = quiet_cluster(folder)
    cluster.start_controller_sync()
    warm.guard(cluster.controller.pid)
    cluster.start_engines_sync(2, warm=warm)
    client = cluster.connect_client_sync()
    client.wait_for_engines(2, timeout=60)
    keeper = warm.fork_keeper()[0]
    if {keep}:
        warm.keep(folder)
    def busy():
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    client[1].apply_async(busy)
    engines = list(cluster.engine_set.pids.values())
    import psutil
    controller = psutil.Process(cluster.controller.pid)
    family = [controller.pid, *(child.pid for child in controller.children(recursive=True))]
    say(pids=[warm.pid, keeper, *family, *engines], engines=engines, folder=str(folder),
        log=warm._log_path)
    time.sleep(600)
"""


def test_nothing_survives_a_killed_kernel():
    with kernel(KERNEL, early=False, keep=False) as (process, about):
        assert len(about["pids"]) > 6
        process.kill()
        process.wait()
        assert not gone(about["pids"], timeout_s=10)
    assert not Path(about["folder"]).exists()
    assert not Path(about["log"]).exists()


def test_a_kernel_killed_while_the_framework_loads_leaves_no_warm_parent():
    with kernel(KERNEL, early=True, keep=False) as (process, about):
        process.kill()
        process.wait()
        assert not gone(about["pids"], timeout_s=10)
    assert not Path(about["log"]).exists()


UNGUARDED = """
    import json, os, signal, sys
    sys.path[:0] = {paths!r}
    import ipyparallel.cluster.launcher as launcher
    from workbench.cluster.hosts.settings import LaunchSettings
    from workbench.cluster.services import ClusterServices
    from workbench.cluster.forkserver.client import WarmParent
    ground = ClusterServices("torch", LaunchSettings(), lambda *end: None)
    def die(pid):
        about = dict(pids=[ground.warm.pid, pid], folder=str(ground.folder))
        print(json.dumps(about), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if {place!r} == "guard":
        WarmParent.guard = lambda parent, pid: die(pid)
    else:
        start = launcher.Popen
        launcher.Popen = lambda *args, **rest: die(start(*args, **rest).pid)
    ground.ensure()
"""


@pytest.mark.parametrize("place", ["start", "guard"])
def test_a_kernel_killed_before_its_controller_is_guarded_leaves_nothing(place):
    """As it is started; and when it is up, with children of its own.

    A kernel that starts meanwhile may clear up too: it ends the processes, then the folder goes.
    """
    tests = str(Path(__file__).parents[1])
    code = textwrap.dedent(UNGUARDED).format(paths=[tests], place=place)
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    about = json.loads(ended.stdout)
    assert not gone(about["pids"], timeout_s=15)
    assert folders.controllers(about["folder"]) == []
    assert soon(lambda: not Path(about["folder"]).exists())


def test_only_controllers_of_the_folder_are_found(tmp_path):
    """Not what was merely started from one of its cells, or serves another cluster."""

    def start(word, folder):
        code = "import time; print(flush=True); time.sleep(60)"
        environ = {**os.environ, folders.FOLDER_VARIABLE: str(folder)}
        process = subprocess.Popen(
            [sys.executable, "-c", code, word], env=environ, stdout=subprocess.PIPE
        )
        process.stdout.readline()
        return process

    processes = [
        start("ipyparallel.controller", tmp_path),
        start("something else", tmp_path),
        start("ipyparallel.controller", "/elsewhere"),
    ]
    try:
        assert folders.controllers(tmp_path) == [processes[0].pid]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_kept_cluster_survives_its_kernel_until_its_last_engine_is_gone():
    with kernel(KERNEL, early=False, keep=True) as (process, about):
        process.kill()
        process.wait()
        others = set(about["pids"]) - set(about["engines"])
        # The parent looks for its kernel every second; after three it has made up its mind.
        assert gone(about["engines"], timeout_s=3) == set(about["engines"])
        assert Path(about["folder"]) not in folders.sweep()
        for pid in about["engines"]:
            os.kill(pid, signal.SIGKILL)
        assert not gone(others, timeout_s=10)
    assert not Path(about["folder"]).exists()


SCARCE = """
from workbench.cluster.forkserver import server, turns
turns.too_little = lambda framework: "hardly any memory is free"
server.main()
"""


def test_into_scarce_memory_nothing_is_imported_until_engines_are_wanted(monkeypatch):
    plain = WarmParent._command

    def scarce(self, fd):
        command = plain(self, fd)
        return [command[0], "-c", SCARCE, *command[3:]]

    monkeypatch.setattr(WarmParent, "_command", scarce)
    parent = WarmParent().start()
    try:
        assert soon(lambda: parent.put_off)
        assert parent.status()["waiting"]  # it answers meanwhile
        assert not parent.ready.is_set()
        parent.soon()
        parent.wait_ready(WAIT_S)
        assert "torch" not in parent.report["missing"]
        pid, _, _ = parent.fork_keeper()
        assert psutil.pid_exists(pid)
    finally:
        parent.stop()
