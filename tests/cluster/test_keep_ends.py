"""Kept clusters end when they are forgotten or asked to, and trouble nobody."""

import json
import os
import time

import psutil
import pytest
from keeping import end, line, listed, shell, start
from notebook_shell import soon

from workbench.cluster.processes import can_fork

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.torch,
    pytest.mark.skipif(not can_fork()[0], reason=can_fork()[1]),
]


@pytest.mark.parametrize(("owned", "idle"), [(True, "3s"), (False, "12s")])
def test_a_cluster_that_was_forgotten_ends_itself(stage, owned, idle):
    kernel = start(
        stage,
        f"""
cluster = wb.Cluster(1, keep=True, idle_timeout="{idle}")
say(cluster.keeping.id)
""",
    )
    line(kernel)
    if not owned:
        end(kernel)
        assert len(listed(stage)) == 1  # to start the command may take seconds
    assert soon(lambda: listed(stage) == [], 60)
    if owned:
        end(kernel)
    seconds, left = stage.wait_empty()
    assert not left, f"after {seconds:.1f} s: {left}"


def test_what_runs_is_not_idle(stage):
    kernel = start(stage, 'kept(10**6, idle_timeout="2s")')
    line(kernel)
    end(kernel)
    time.sleep(5)
    assert [one["running"] for one in listed(stage)] == ["run kept"]
    assert shell(stage, "stop", "--all").returncode == 0


def test_a_kept_cluster_ends_when_asked_and_others_cannot_be_attached(stage):
    kernel = start(
        stage,
        """
plain = wb.Cluster(1)
say(plain.keeping.id)
for name in (plain.keeping.id, "no-such"):
    try:
        wb.attach(name)
    except wb.WorkbenchError as error:
        say(f"{error.code} {'--keep' in error.what}")
say("done")
""",
    )
    name = line(kernel)
    assert line(kernel) == "WB-CLUSTER-034 True"
    assert line(kernel) == "WB-CLUSTER-034 False"
    assert line(kernel) == "done"
    assert shell(stage, "stop", name).returncode == 0
    end(kernel)
    assert not stage.wait_empty()[1]


def test_rubbish_in_the_temporary_folder_troubles_nobody(stage):
    """What crashes left, half-written, and files of others by the same names."""

    def folder(name, **files):
        path = stage.temp / f"workbench-{name}"
        path.mkdir(mode=0o700)
        for stem, text in files.items():
            (path / f"{stem}.json").write_text(text)
        return path

    dead = json.dumps({"pid": 2**22 - 3, "create_time": 1.0})
    stale = [folder("stale", owner=dead, cluster="{"), folder("half", owner='{"pid": 1')]
    reused = json.dumps({"pid": os.getpid(), "create_time": psutil.Process().create_time() - 99})
    engines = {"0": {"pid": os.getpid(), "create_time": 5.0}}
    about = {"version": 1, "engines": engines, "parents": {}, "since": 0, "kept": True}
    stale.append(folder("reused", owner=reused, cluster=json.dumps(about)))
    foreign = folder("foreign", cluster="[]")
    (stage.temp / "workbench-file").write_text("not a folder")
    (stage.temp / "workbench-link").symlink_to(foreign)
    assert listed(stage) == []
    kernels = [
        start(stage, "cluster = wb.Cluster(1)\nsay(cluster.execute('1').over.wait(30))")
        for _ in range(2)
    ]
    for kernel in kernels:
        assert line(kernel) == "True"
    assert not any(path.exists() for path in stale)
    assert foreign.exists()
    assert len(listed(stage)) == 2
    for kernel in kernels:
        end(kernel)
    names = {"workbench-foreign", "workbench-file", "workbench-link"}
    assert soon(lambda: {path.name for path in stage.temp.iterdir()} == names)
