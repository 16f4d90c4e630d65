"""Run and the row: what is picked goes into the cluster's queue; engines are started for it."""

from types import SimpleNamespace

import pytest

from workbench.cluster.hosts.settings import LaunchSettings
from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError
from workbench.panels.cluster import ClusterPart, QueuePart
from workbench.panels.model import Panel
from workbench.session.queue import Queue
from workbench.shared.plan import make_plan


class Cluster:
    """One that is busy with a cell, so that its queue begins nothing."""

    framework, devices_asked, is_busy, busy = "torch", "auto", True, object()
    launch = LaunchSettings()

    def __init__(self, count):
        self.worker_ids, self.row = list(range(count)), Queue(self)
        self.vitals = SimpleNamespace(watch=lambda listener: lambda: None)
        self.keeping = SimpleNamespace(kept=False)

    def queue(self, plans=()):
        self.row.add(plans)
        return self.row


class Session:
    cluster, lost = None, ""

    def __init__(self):
        self.started = []

    def start(self, count, **_):
        self.started.append(count)
        self.cluster = Cluster(count)

    def need_cluster(self):
        return self.cluster


class Choice:
    """What is picked: as many runs as a test says, or a mistake."""

    engines = 2

    def __init__(self, *names, workers=None, mistake=None):
        self.names, self.workers, self.mistake = names, workers, mistake

    def framework_in(self, session):
        return "torch"

    def check(self, framework):
        if self.mistake:
            raise PlanError(self.mistake, code="WB-PLAN-000")

    def plans(self, session):
        return [make_plan(Recipe("wb.fit()"), "mirrored", workers=2, name=n) for n in self.names]


@pytest.fixture
def panel():
    panel = Panel(Session(), (ClusterPart, QueuePart))
    panel.choice = Choice(*"abc")
    yield panel
    if panel.session.cluster is not None:
        panel.session.cluster.row.stop_all()
        panel.session.cluster.row.wait(20)


def names(panel, state="waiting"):
    return [i["name"] for i in panel.wire()["queue"]["items"] if i["state"] == state]


def run(panel):
    panel.do("queue.run", {})
    assert panel.settled()


@pytest.mark.parametrize(("workers", "engines"), [(None, 2), (3, 3)])
def test_run_starts_the_engines_it_needs_and_puts_all_in_the_row(panel, workers, engines):
    panel.choice.workers = workers
    assert panel.wire()["queue"]["items"] == []
    run(panel)
    assert panel.session.started == [engines]
    items = panel.wire()["queue"]["items"]
    assert [i["name"] for i in items] == ["a", "b", "c"]


def test_run_starts_as_many_engines_as_the_field_says(panel):
    panel.do("cluster.asked", {"count": "4"})
    for nonsense in ("", "0", "1000000", "x"):
        panel.do("cluster.asked", {"count": nonsense})
    assert panel.wire()["cluster"]["asked"] == 4
    run(panel)
    assert panel.session.started == [4]


def test_run_starts_others_where_all_engines_died_and_none_where_some_live(panel):
    panel.session.cluster = Cluster(0)
    run(panel)
    assert panel.session.started == [2]
    panel.choice = Choice("d")
    run(panel)
    assert panel.session.started == [2]
    assert len(panel.wire()["queue"]["items"]) == 4


def test_a_mistake_starts_no_engine(panel):
    panel.choice = Choice("a", mistake="No strategy is selected.")
    run(panel)
    assert panel.session.started == []
    assert "No strategy" in panel.notices[0].text


def test_what_waits_is_moved_taken_out_and_given_up(panel):
    run(panel)
    a, b, c = (i["number"] for i in panel.wire()["queue"]["items"])
    if names(panel) == ["a", "b", "c"]:  # the queue's thread has not begun the first yet
        panel.session.cluster.row._line.begin()
    panel.do("queue.move", {"number": c, "to": 0})
    assert names(panel) == ["c", "b"]
    panel.do("queue.remove", {"number": b})
    assert names(panel) == ["c"]
    panel.do("queue.remove", {"number": a})
    assert "longer waiting" in panel.notices[-1].text
    panel.do("queue.keep_going", {"on": True})
    assert panel.wire()["queue"]["keep_going"] is True
    panel.do("queue.stop_all", {})
    assert names(panel) == []
