"""A user's engines are counted over all notebooks, and nobody else's."""

from __future__ import annotations

import os
import re

import psutil
import pytest

from workbench.cluster import folders
from workbench.errors import PlanError
from workbench.execution.requests import check_limits

WARM = ["python", "-m", "workbench.cluster.forkserver.server", "--fd", "7"]
OWN = ["python", "-m", "ipyparallel.engine", "--profile-dir", "/tmp/workbench-abc"]
OTHERS = ["python", "-m", "ipyparallel.engine", "--profile-dir", "/home/u/.ipython/profile_x"]


class FakeProcess:
    def __init__(self, pid, name, words, uid=None, status=psutil.STATUS_SLEEPING):
        self.pid, self._name, self._words, self._status = pid, name, words, status
        self._uid = os.getuid() if uid is None else uid

    def uids(self):
        return type("uids", (), {"real": self._uid})

    def name(self):
        return self._name

    def cmdline(self):
        if self._words is None:
            raise psutil.AccessDenied(self.pid)
        return self._words

    def status(self):
        return self._status


@pytest.fixture(autouse=True)
def processes(monkeypatch):
    monkeypatch.setattr(
        psutil,
        "process_iter",
        lambda: [
            FakeProcess(1, "engine-0", WARM),
            FakeProcess(2, "engine-1", WARM),
            FakeProcess(3, "engine-0", WARM, uid=os.getuid() + 1),
            FakeProcess(4, "engine-1", ["engine-1"]),  # of another program
            FakeProcess(5, "python", OWN),
            FakeProcess(6, "python", OTHERS),
            FakeProcess(7, "python", WARM),  # the parent itself
            FakeProcess(8, "engine-9", WARM, status=psutil.STATUS_ZOMBIE),
            FakeProcess(9, "engine-9", None),
        ],
    )


def test_engines_of_this_user_are_counted() -> None:
    assert folders.engines() == {1, 2, 5}
    assert folders.engines(os.getuid() + 1) == {3}
    assert folders.elsewhere([1, 2]) == 1


def test_engines_of_other_notebooks_count_for_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_MAX_ENGINES", "4")
    check_limits(1)
    check_limits(1, own=[1, 5])
    with pytest.raises(PlanError, match=r"4.*have 3.*WB-PLAN-055"):
        check_limits(2)
    with pytest.raises(PlanError, match=r"have 1.*WB-PLAN-055"):
        check_limits(2, own=[1, 2])


def test_a_cluster_beyond_the_limit_is_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import workbench as wb
    from workbench.cluster import services

    def started(*args: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(services.ClusterServices, "prepare_in_background", started)
    monkeypatch.setenv("WORKBENCH_MAX_ENGINES", "4")
    with pytest.raises(PlanError, match=r"4.*WB-PLAN-055"):
        wb.Cluster(2)
    monkeypatch.setenv("WORKBENCH_HOSTS", "false")
    with pytest.raises(PlanError, match="WB-PLAN-056"):
        wb.Cluster(1, hosts="127.0.0.1")


def test_refused_messages_are_counted_below_the_table() -> None:
    from types import SimpleNamespace

    from workbench.session import status as session_status

    router = SimpleNamespace(rejected=2, refused={0: 3, 1: 0})
    pool = SimpleNamespace(words=list)
    agents = SimpleNamespace(refused=0, turned_away=[])
    engines = SimpleNamespace(router=router, hosted=SimpleNamespace(agents=agents))
    cluster = SimpleNamespace(engine_set=engines, pool=pool, worker_ids=[])
    assert session_status.rejected(cluster) == 5  # type: ignore[arg-type]
    (note,) = session_status.notes(cluster)  # type: ignore[arg-type]
    assert re.findall(r"\d+", note) == ["5"]
    agents.refused, agents.turned_away = 1, ["Refused an agent on xh9: place 0 is taken."]
    assert session_status.rejected(cluster) == 6  # type: ignore[arg-type]
    assert agents.turned_away[0] in session_status.notes(cluster)  # type: ignore[arg-type]
    router.rejected, router.refused, engines.hosted = 0, {}, None
    assert session_status.notes(cluster) == []  # type: ignore[arg-type]
