import asyncio
import os
import signal
import sys
import threading

import ipyparallel
import psutil
import pytest
from traitlets.config import Config
from warm_support import engines, gone

from workbench.cluster.forkserver.client import WarmParent
from workbench.cluster.hub import WarmEngineSetLauncher
from workbench.cluster.processes import can_fork

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


def look_around():
    import os
    import random

    import numpy

    return {
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        "path": sys.path,
        "env": dict(os.environ),
        "random": (random.random(), numpy.random.rand()),
        "torch": "torch" in sys.modules,
        "argv0": sys.argv[0],
    }


def test_plain_ipyparallel_starts_and_stops_engines_by_name(tmp_path):
    cluster = ipyparallel.Cluster(
        engines="workbench", n=2, profile_dir=str(tmp_path), config=Config(), log_level=50
    )
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with cluster as client:
        assert client.ids == [0, 1]
        pids = client[:].apply_sync(os.getpid)
        assert dict(enumerate(pids)) == cluster.engine_set.pids
        assert isinstance(cluster.engine_set, WarmEngineSetLauncher)
    mine = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not gone(mine | set(pids), WAIT_S)  # the warm parent it started is gone too


def test_engines_get_the_notebooks_folder_path_and_environment(warm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKBENCH_TEST_WORD", "héllo wörld=1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    with engines(2, warm) as (_, client, _):
        seen = client[:].apply_sync(look_around)
    for one in seen:
        assert one["cwd"] == str(tmp_path)
        assert str(tmp_path / "mine") in one["path"]
        assert one["env"]["WORKBENCH_TEST_WORD"] == "héllo wörld=1"
        assert "OMP_NUM_THREADS" not in one["env"]  # the warm parent's own is not passed on
        assert one["torch"]
        assert one["argv0"] == "ipengine"
    assert seen[0]["random"] != seen[1]["random"]


def test_ids_are_as_asked_and_count_on_between_sets(warm):
    with engines(2, warm, ids=[3, 5]) as (cluster, client, _):
        assert client.ids == [3, 5]
        cluster.start_engines_sync(1, engine_set_id="more", warm=warm)
        client.wait_for_engines(3, timeout=WAIT_S)
        assert client.ids == [3, 5, 6]
        assert sorted(cluster.engines["more"].pids) == [6]


def test_an_engines_death_is_noticed_by_id_and_the_others_go_on(warm):
    with engines(2, warm) as (cluster, client, _):
        died = threading.Event()
        warm.on_exit(lambda _: died.set())
        assert cluster.engine_set.signal_engine(0, signal.SIGKILL)
        assert died.wait(WAIT_S)
        assert cluster.engine_set.exits[0].text == "SIGKILL"
        assert list(cluster.engine_set.pids) == [1]
        assert not cluster.engine_set.signal_engine(0, signal.SIGKILL)
        assert client[1].apply_sync(lambda: "alive") == "alive"


def test_engines_that_swallow_sigterm_are_stopped_all_the_same(warm):
    def swallow():
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    with engines(2, warm) as (cluster, client, _):
        client[:].apply_sync(swallow)
        engine_set, pids = cluster.engine_set, list(cluster.engine_set.pids.values())
        engine_set.grace_s = 0.2
        cluster.stop_engines_sync()
        assert not gone(pids, WAIT_S)
        assert [end.text for end in engine_set.exits.values()] == ["SIGKILL"] * 2


def test_a_stopped_engine_runs_its_exit_handlers(warm, tmp_path):
    def register(path):
        import atexit

        atexit.register(lambda: open(path, "w").close())

    with engines(1, warm) as (cluster, client, _):
        client[:].apply_sync(register, str(tmp_path / "left"))
        engine_set = cluster.engine_set
        cluster.stop_engines_sync()
    assert (tmp_path / "left").exists()
    assert engine_set.exits[0].code == 0


def test_a_forked_engine_computes_with_several_threads(warm):
    def compute():
        import torch

        torch.set_num_threads(2)
        a = torch.ones(600, 600, requires_grad=True)
        (a @ a).relu().sum().backward()
        return torch.get_num_threads(), a.grad[0, 0].item()

    with engines(2, warm) as (_, client, _):
        results = [client[i].apply_async(compute) for i in (0, 1)]
        assert [result.get(timeout=WAIT_S) for result in results] == [(2, 1200.0)] * 2


def test_the_stacks_of_a_blocked_engine_can_be_had(warm):
    def blocked_on_purpose():
        import time

        while True:
            time.sleep(0.01)

    with engines(1, warm) as (cluster, client, _):
        client[0].apply_async(blocked_on_purpose)
        engine_set = cluster.engine_set
        ticker, found = threading.Event(), False
        for _ in range(WAIT_S * 10):
            engine_set.signal_engine(0, signal.SIGUSR2)
            found = "blocked_on_purpose" in engine_set.get_output()
            if found or ticker.wait(0.1):
                break
        assert found


@pytest.fixture
def kernels_loop():
    """An event loop of the main thread, as a kernel has one: a launcher notes whose it is."""
    policy = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.close()
    asyncio.set_event_loop_policy(policy)


@pytest.mark.usefixtures("kernels_loop")
def test_another_process_can_take_the_engines_up(warm):
    with engines(1, warm) as (cluster, _, _):
        data = cluster.engine_set.to_dict()
        again = WarmEngineSetLauncher.from_dict(
            data, engine_set_id="x", parent=cluster, identifier="x"
        )
        assert again.pids == cluster.engine_set.pids
        ended = threading.Event()
        again.on_stop(lambda _: ended.set())
        again.signal(signal.SIGKILL)
        assert not gone(data["pids"].values(), WAIT_S)
        assert again._all_gone.wait(WAIT_S)
