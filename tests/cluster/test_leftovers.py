"""Ten seconds after a kernel is gone, in whatever way, nothing of ours is there any more."""

import os
import signal
import time

import psutil
import pytest

from workbench.cluster.processes import can_fork

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.torch,
    pytest.mark.skipif(not can_fork()[0], reason=can_fork()[1]),
]
SAID = "ready"
CLUSTER = "cluster = wb.Cluster(2)\n"

BUSY = {
    "idle": f"{CLUSTER}say('{SAID}')",
    "a cell": f"{CLUSTER}cluster.execute('while True: pass')\ntime.sleep(0.5)\nsay('{SAID}')",
    "a run": f"{CLUSTER}train('mirrored')\nsay('{SAID}')",
    "a run over sockets of ours": (
        f"{CLUSTER}train('mirrored', options=dict(allreduce='ring'))\nsay('{SAID}')"
    ),
    "servers": (f"{CLUSTER}train('parameter_server', options=dict(servers=2))\nsay('{SAID}')"),
    "what cells started": f"""
{CLUSTER}
task = cluster.execute('''
import subprocess, multiprocessing, torch
alone = subprocess.Popen(["sleep", "600"], start_new_session=True)
loader = iter(torch.utils.data.DataLoader(range(10**6), num_workers=1))
next(loader)
from multiprocessing import shared_memory
shared = shared_memory.SharedMemory(create=True, size=1000)
lock = multiprocessing.Lock()
''')
assert task.over.wait(60) and task.failure() is None, task.failure()
say('{SAID}')
""",
    "a stop": f"""
{CLUSTER}
train('mirrored')
say('{SAID}')
cluster.stop()
""",
    "without a warm parent": f"""
import workbench.cluster.forkserver.parents as parents
parents.can_fork = lambda framework: (False, "a test")
{CLUSTER}
train('mirrored')
say('{SAID}')
""",
    "two clusters": f"{CLUSTER}other = wb.Cluster(1)\nsay('{SAID}')",
}


def ready(stage, code):
    kernel = stage.kernel(code)
    assert SAID in map(str.strip, kernel.stdout), "the kernel's stand-in did not come up"
    return kernel, stage.look()


def end(kernel):
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()


def named(processes, word):
    """Return our processes whose command line has the word, each with no other's."""
    return [p for p in processes if any(word in part for part in p.cmdline())]


def check(stage):
    seconds, left = stage.wait_empty()
    assert not left, f"after {seconds:.1f} s: {left}"


@pytest.mark.parametrize("what", BUSY)
def test_a_killed_kernel_leaves_nothing(stage, what):
    kernel, processes = ready(stage, BUSY[what])
    assert len(processes) > 3, "the stage saw what there is to leave behind"
    kinds = {kind for kind, _ in stage.seen}
    assert kinds == {"tcp", "unix", "file"} if what == "what cells started" else "tcp" in kinds
    end(kernel)
    check(stage)


@pytest.mark.parametrize("after_s", [0.3, 1.0, 2.0])
def test_a_kernel_killed_in_the_middle_of_starting_leaves_nothing(stage, after_s):
    kernel, _ = ready(stage, f"say('{SAID}')\n{CLUSTER}")
    time.sleep(after_s)
    stage.look()
    end(kernel)
    check(stage)


@pytest.mark.parametrize(
    "victims",
    [["workbench.cluster.forkserver.server"], ["ipyparallel.controller"]],
    ids=["warm", "controller"],
)
@pytest.mark.parametrize("between_s", [0.0, 1.5])
def test_neither_does_one_whose_helpers_were_killed_before(stage, victims, between_s):
    kernel, processes = ready(stage, BUSY["a run"])
    chosen = [p for word in victims for p in named(processes, word) if p.ppid() == kernel.pid]
    assert chosen
    for process in chosen:
        process.kill()
    time.sleep(between_s)
    end(kernel)
    check(stage)


def test_engines_that_nobody_forked_miss_their_kernel_themselves(stage):
    """With the controller gone too, nobody is left who could end them."""
    kernel, processes = ready(stage, BUSY["without a warm parent"])
    controllers = named(processes, "ipyparallel.controller")
    assert controllers
    assert len(named(processes, "ipyparallel.engine")) >= 2
    kernel.kill()
    for process in controllers:
        process.kill()
    end(kernel)
    seconds, _ = stage.wait_empty()
    # Nobody is left to remove the folder either: the next cluster does.
    folders = {path.split(os.sep)[3] for path in map(str, stage.temp.rglob("*"))}
    assert not stage.processes(), f"after {seconds:.1f} s"
    assert len(folders) == 1
    other = stage.kernel(BUSY["idle"])
    assert SAID in map(str.strip, other.stdout)
    assert not list(stage.temp.glob(f"{folders.pop()}"))
    end(other)
    check(stage)


def test_a_warm_parent_killed_in_its_kernels_life_leaves_nothing_that_cells_started(stage):
    kernel, processes = ready(stage, BUSY["what cells started"])
    (warm,) = [
        p for p in named(processes, "workbench.cluster.forkserver.server") if p.ppid() == kernel.pid
    ]
    warm.kill()
    end(kernel)
    check(stage)


@pytest.mark.parametrize("how", ["exit", "error", "sigint"])
def test_a_kernel_that_ends_by_itself_leaves_nothing(stage, how):
    tail = {"exit": "sys.exit()", "error": "1 / 0", "sigint": "time.sleep(600)"}[how]
    kernel = stage.kernel(BUSY["a run"], tail=tail)
    assert SAID in map(str.strip, kernel.stdout)
    stage.look()
    if how == "sigint":
        kernel.send_signal(signal.SIGINT)
    kernel.wait(30)
    kernel.stdout.close()
    check(stage)


NOTEBOOK = """
%load_ext workbench
%cluster start 2
print(1)
"""


@pytest.mark.parametrize("how", ["restart", "shutdown", "kill"])
def test_a_notebook_that_is_closed_or_restarted_leaves_nothing(stage, how):
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", env=stage.env)
    try:
        client.execute_interactive(NOTEBOOK, timeout=120, output_hook=lambda message: None)
        seen = stage.look()
        assert len(named(seen, "workbench.cluster.forkserver.server")) >= 3
        if how == "restart":
            manager.restart_kernel()
            seconds = time.monotonic() + 10
            mine = set(seen)
            while time.monotonic() < seconds and any(p.is_running() for p in mine):
                time.sleep(0.1)
            assert not [p for p in mine if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        manager.shutdown_kernel(now=how == "kill")
    finally:
        client.stop_channels()
        manager.cleanup_resources()
    check(stage)


def test_only_processes_of_the_cluster_are_ended(stage):
    """Not one that merely has the pid that one of ours had."""
    kernel, _ = ready(stage, BUSY["idle"])
    with stage.kernel(f"say('{SAID}')") as other:
        assert SAID in map(str.strip, other.stdout)
        end(kernel)
        time.sleep(4)
        assert other.poll() is None
        assert [p.pid for p in stage.processes()] == [other.pid]
        other.kill()
    check(stage)
