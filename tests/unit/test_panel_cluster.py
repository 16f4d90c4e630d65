"""The cluster's row: what its buttons ask of the session, and what is told meanwhile."""

from types import SimpleNamespace

import pytest

from workbench.cluster.hosts.settings import HostSlots, LaunchSettings
from workbench.cluster.progress import Progress
from workbench.cluster.vitals import EngineVitals
from workbench.errors import ClusterError
from workbench.panels.cluster import LOG_LINES, ClusterPart
from workbench.panels.model import Panel


def engine(number, state="idle"):
    return EngineVitals(number, number, 40 + number, "here", "cpu", state, state)


class Vitals:
    """Tells who watches what a test says."""

    def __init__(self):
        self.listeners = []

    def watch(self, listener):
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)


class Cluster:
    framework, devices_asked = "torch", "auto"
    is_busy, busy, waiting = False, None, 0
    launch = LaunchSettings()

    def __init__(self, count):
        self.worker_ids, self.vitals = list(range(count)), Vitals()
        self.keeping, self.restarted = SimpleNamespace(kept=False), []

    def queue(self):
        waits = SimpleNamespace(state="waiting")
        return SimpleNamespace(items=[waits] * self.waiting)

    def restart(self, ids=None):
        self.restarted.append(ids)

    def logs(self, number):
        return "\n".join(f"line {n} of {number}" for n in range(LOG_LINES + 50))


class Session:
    """A session whose cluster starts at once, or fails."""

    def __init__(self):
        self.cluster, self.lost, self.asked, self.during = None, "", [], lambda: None

    def start(self, count, *, devices, progress, **where):
        self.asked.append((count, devices, *([where] if where else [])))
        progress(Progress("connect", 1, count, f"connecting engines: 1 of {count}"))
        self.during()
        progress(Progress("connect", 2, count, "connecting engines: 2"))
        if devices == "cuda":
            raise ClusterError(
                "There is no GPU.", seen="cuda", next_step="devices cpu", code="WB-CLUSTER-000"
            )
        self.cluster = Cluster(count)

    def need_cluster(self):
        if self.cluster is None:
            raise ClusterError("No cluster is running in this notebook.", code="WB-CLUSTER-000")
        return self.cluster

    def stop(self):
        self.cluster = None


@pytest.fixture
def panel(monkeypatch):
    monkeypatch.setattr("workbench.panels.cluster.installed", lambda: ["local", "ssh", "slurm"])
    return Panel(Session(), (ClusterPart,))


def test_a_start_tells_how_far_it_is_and_then_what_there_is(panel):
    told = []
    panel.session.during = lambda: told.append(panel.wire()["cluster"]["progress"])
    panel.do("cluster.start", {"count": 2, "devices": " "})
    assert panel.settled()
    assert panel.session.asked == [(2, "auto")]
    assert told[0]["text"] == "connecting engines: 1 of 2"
    wire = panel.wire()["cluster"]
    assert (wire["running"], wire["count"], wire["progress"]) == (True, 2, None)


def test_a_start_that_fails_leaves_a_message_and_no_progress(panel):
    panel.do("cluster.start", {"count": 2, "devices": "cuda"})
    assert panel.settled()
    (notice,) = panel.notices
    assert "GPU" in notice.text
    assert "devices cpu" in notice.text
    wire = panel.wire()["cluster"]
    assert (wire["running"], wire["progress"]) == (False, None)


def test_the_launchers_that_are_installed_are_offered_with_what_each_needs(panel):
    wire = panel.wire()["cluster"]
    assert wire["launchers"] == [
        {"name": "local", "fields": []},
        {"name": "ssh", "fields": ["on"]},
        {"name": "slurm", "fields": ["nodes", "partition", "time"]},
    ]
    assert wire["where"] == {"launcher": "local"}


def test_engines_start_where_it_was_said_and_a_field_of_another_launcher_is_left_out(panel):
    panel.do("cluster.where", {"launcher": "slurm", "on": "a", "nodes": " 2 ", "partition": "gpu"})
    assert panel.wire()["cluster"]["where"]["nodes"] == "2"
    panel.do("cluster.start", {"count": 4})
    assert panel.settled()
    where = {"launcher": "slurm", "nodes": "2", "partition": "gpu"}
    assert panel.session.asked == [(4, "auto", where)]
    panel.do("cluster.start", {"count": 6})  # a cluster that is up keeps its place
    assert panel.settled()
    assert panel.session.asked[1:] == [(6, "auto")]


def test_where_a_cluster_is_that_a_line_has_started_is_shown(panel):
    panel.session.cluster = cluster = Cluster(2)
    hosts = (HostSlots("a", 2), HostSlots("me@b"))
    cluster.launch = LaunchSettings("ssh", on=hosts)
    where = panel.wire()["cluster"]["where"]
    assert (where["launcher"], where["on"], where["nodes"]) == ("ssh", "a:2,me@b", "")


def test_a_start_that_waits_can_be_cancelled(panel):
    panel.session.during = lambda: panel.do("cluster.cancel", {})
    panel.do("cluster.start", {"count": 2})
    assert panel.settled()
    assert "WB-CLUSTER-075" in panel.notices[0].text
    wire = panel.wire()["cluster"]
    assert (wire["running"], wire["progress"]) == (False, None)
    panel.session.during = lambda: None
    panel.do("cluster.start", {"count": 2})  # the next one is not
    assert panel.settled()
    assert panel.wire()["cluster"]["running"]


def test_engines_are_watched_while_somebody_looks_and_those_of_the_present_cluster_only(panel):
    panel.session.cluster = first = Cluster(1)
    assert panel.wire()["cluster"]["engines"] == []  # not sampled yet
    panel.wire()
    (listener,) = first.vitals.listeners
    panel.changed.clear()
    listener([engine(0, "training")])
    assert panel.changed.is_set()
    assert panel.wire()["cluster"]["engines"][0]["state"] == "training"
    panel.session.cluster = second = Cluster(2)
    assert panel.wire()["cluster"]["engines"] == []
    assert (len(first.vitals.listeners), len(second.vitals.listeners)) == (0, 1)
    panel.parts["cluster"].close()
    assert second.vitals.listeners == []


def test_one_engine_or_all_are_restarted_and_a_log_shows_its_end(panel):
    panel.session.cluster = cluster = Cluster(2)
    logs = []
    panel.do("cluster.restart", {"engine": 1})
    panel.do("cluster.restart", {})
    panel.do("cluster.log", {"engine": 1}, lambda text: logs.append(text.splitlines()))
    assert panel.settled()
    assert cluster.restarted == [[1], None]
    assert len(logs[0]) == LOG_LINES
    assert logs[0][-1] == f"line {LOG_LINES + 49} of 1"


def test_a_cluster_that_was_lost_says_why(panel):
    panel.session.lost = "its controller died"
    assert panel.wire()["cluster"]["lost"] == "its controller died"
    panel.do("cluster.restart", {})
    assert panel.settled()
    assert "No cluster" in panel.notices[0].text


def test_what_would_be_lost_with_the_engines_is_said(panel):
    panel.session.cluster = cluster = Cluster(2)
    assert panel.wire()["cluster"]["at_work"] == ""
    cluster.is_busy, cluster.waiting = True, 2
    assert panel.wire()["cluster"]["at_work"].count("2 runs") == 1
