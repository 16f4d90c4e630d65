"""Which device, how many threads and which rank the engines of several hosts get."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import nvml

from workbench.cluster import folders
from workbench.cluster.engines import EngineInfo
from workbench.cluster.hosts.agents import Host, HostReading, readings
from workbench.cluster.hosts.gpus import HostDevices
from workbench.cluster.hosts.places import HostedEngines
from workbench.cluster.hosts.settings import HERE
from workbench.cluster.hosts.wire import Answer, HostFacts
from workbench.cluster.vitals import GpuReading, Reading
from workbench.cookbook.recipe import Recipe
from workbench.devices import discovery, leases, reservations
from workbench.devices.discovery import Device
from workbench.engine.torch.group import environ
from workbench.errors import ClusterError, PlanError
from workbench.execution.allocator import EngineAllocator
from workbench.session.status import Vitals
from workbench.shared.plan import make_plan
from workbench.shared.protocol import RunSpec

NCCL = "cpu:gloo,cuda:nccl"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(reservations.VARIABLE, str(tmp_path / "gpus"))
    monkeypatch.setattr(leases, "_said", set())

    def never(framework: str) -> None:
        raise AssertionError("the devices of the notebook's machine do not matter")

    monkeypatch.setattr(discovery, "FINDERS", {"cuda": never})


def gpus(name: str, count: int, **more: Any) -> list[dict[str, Any]]:
    """As an agent tells of them: JSON."""
    found = [
        asdict(Device(i, "H100", 80 << 30, 0, f"GPU-{name}-{i}", i, **more)) for i in range(count)
    ]
    return list(json.loads(json.dumps(found)))


def host_of(
    place: int, devices: Sequence[dict[str, Any]] = (), slots: int = 4, **more: Any
) -> Host:
    name = f"node{place + 1}"
    about: dict[str, Any] = {"token": f"token-{name}", "cores": 16, "versions": {}, **more}
    facts = HostFacts(
        hostname=name, address=f"10.0.0.{place}", memory_bytes=1, pid=1, devices=devices, **about
    )
    return Host(place, name, slots, facts, b"", 0.0)


class Hosted(HostedEngines):
    """Hosts without agents: engines are where they would be forked."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        self._all = list(hosts)
        self.said, self._hosts, self._pids, self._came = [], {}, {}, False
        self._notes = {}
        self.files = SimpleNamespace(look=lambda host, path: None)  # type: ignore[assignment]
        self.agents = SimpleNamespace(  # type: ignore[assignment]
            hosts=self._all, living=[one for one in self._all if not one.gone]
        )

    def begun(self, ids: Sequence[int]) -> dict[int, EngineInfo]:
        chosen = self._choose(ids)
        self._pids |= {engine: 100 + engine for engine in ids}
        return {
            i: EngineInfo(i, "u", 100 + i, host=one.name, place=one.facts.token)
            for i, one in chosen.items()
        }


class Engines:
    def __init__(self, hosted: Hosted, count: int) -> None:
        self.hosted, self.launch = hosted, HERE
        self.engines = hosted.begun(range(count))

    @property
    def ids(self) -> list[int]:
        return sorted(i for i, one in self.engines.items() if one.state != "dead")

    def start(self, count: int, framework: str = "") -> list[int]:
        fresh = list(range(len(self.engines), len(self.engines) + count))
        self.engines |= self.hosted.begun(fresh)
        return fresh

    def store(self) -> tuple[str, int]:
        return "10.0.0.0", 1


def pool_on(*hosts: Host, engines: int, devices: str = "auto") -> EngineAllocator:
    pool = EngineAllocator(devices, "torch", hosted=True)
    pool.engines = Engines(Hosted(hosts), engines)  # type: ignore[assignment]
    return pool


def specs_of(pool: EngineAllocator, workers: int) -> list[RunSpec]:
    ids = pool.worker_ids[:workers]
    return list(pool.cell_specs(ids, ids, "torch", pool.hold(workers)[0]).values())


def test_each_worker_has_a_gpu_of_its_own_host_and_they_form_one_nccl_group() -> None:
    pool = pool_on(host_of(0, gpus("a", 4)), host_of(1, gpus("b", 4)), engines=8)
    specs = specs_of(pool, 8)
    assert [spec.device for spec in specs] == [f"cuda:{i}" for i in range(4)] * 2
    assert [spec.local_rank for spec in specs] == [0, 1, 2, 3] * 2
    assert {spec.backend for spec in specs} == {NCCL}
    assert specs[0].gpus == tuple(f"GPU-a-{i}" for i in range(4))
    assert specs[7].gpus == tuple(f"GPU-b-{i}" for i in range(4))
    assert [environ(one)["LOCAL_RANK"] for one in specs[3:5]] == ["3", "0"]
    assert not Path(pool.devices.reservations.files.get("GPU-a-0", "/nowhere")).exists()
    assert specs[0].reserved == ()


def test_no_gpu_counts_as_shared_because_another_host_has_one_of_its_number() -> None:
    pool = pool_on(host_of(0, gpus("a", 2)), host_of(1, gpus("b", 2)), engines=4)
    plan = make_plan(Recipe("wb.fit()"), "sharded", workers=4)
    plan.check_devices(pool.lease(4, plan).words)
    few = [host_of(place, gpus(name, 1), slots=2) for place, name in enumerate("ab")]
    shared = pool_on(*few, engines=4, devices="cuda")
    assert [spec.sharers for spec in specs_of(shared, 4)] == [2] * 4
    with pytest.raises(PlanError, match="WB-PLAN-162"):
        plan.check_devices(shared.lease(4, plan).words)


def test_few_workers_have_the_first_hosts_gpus_and_keep_them_when_more_come() -> None:
    pool = pool_on(host_of(0, gpus("a", 2), slots=2), host_of(1, gpus("b", 2), slots=2), engines=4)
    before = specs_of(pool, 2)
    assert [spec.gpus for spec in before] == [("GPU-a-0", "GPU-a-1")] * 2
    after = specs_of(pool, 4)
    assert [spec.gpus for spec in after[:2]] == [spec.gpus for spec in before]
    assert [spec.device for spec in after] == ["cuda:0", "cuda:1"] * 2


@pytest.mark.parametrize(
    ("second", "words"),
    [(2, "node2 has 2 GPUs for 4 workers"), (0, "node2 has no GPUs for 4 workers")],
)
def test_where_one_host_has_too_few_gpus_all_compute_on_the_cpu_and_it_is_named(
    second: int, words: str
) -> None:
    pool = pool_on(host_of(0, gpus("a", 4)), host_of(1, gpus("b", second)), engines=8)
    given, said = pool.hold(8)
    assert not given.on_gpus
    assert given.backend == "gloo"
    assert [text for text in said if words in text]
    assert "node1" not in said[0]
    assert words in pool.words()[0]
    assert [one.device for one in specs_of(pool, 4)] == [f"cuda:{i}" for i in range(4)]


def test_hosts_without_gpus_are_nothing_to_talk_about() -> None:
    pool = pool_on(host_of(0), host_of(1), engines=8)
    assert pool.hold(8)[1] == []
    assert pool.words() == []


def test_numbers_are_those_of_each_host_and_a_host_without_them_is_named() -> None:
    hosts = host_of(0, gpus("a", 4), slots=2), host_of(1, gpus("b", 4), slots=2)
    pool = pool_on(*hosts, engines=4, devices="2,3")
    specs = specs_of(pool, 4)
    assert [spec.gpus for spec in specs[1:3]] == [("GPU-a-2", "GPU-a-3"), ("GPU-b-2", "GPU-b-3")]
    assert [spec.device for spec in specs] == ["cuda:0", "cuda:1"] * 2
    few = pool_on(hosts[0], host_of(1, gpus("b", 2), slots=2), engines=4, devices="2,3")
    with pytest.raises(PlanError, match=r"node2.*WB-PLAN-187"):
        few.lease(4)
    with pytest.raises(PlanError, match="WB-PLAN-344"):
        pool_on(*hosts, engines=4, devices="2,2").lease(4)
    with pytest.raises(ClusterError, match=r"node2.*WB-CLUSTER-076"):
        pool_on(hosts[0], host_of(1, slots=2), engines=4, devices="cuda").lease(4)


def test_gpus_of_different_kinds_form_no_group() -> None:
    hosts = host_of(0, gpus("a", 1), slots=1), host_of(1, gpus("b", 1, kind="rocm"), slots=1)
    said = pool_on(*hosts, engines=2).hold(2)[1]
    assert "cuda and rocm" in said[0]
    with pytest.raises(PlanError) as refused:
        pool_on(*hosts, engines=2, devices="0").lease(2)
    assert refused.value.code == "WB-PLAN-186"


def test_mig_instances_of_several_hosts_form_no_group() -> None:
    hosts = [host_of(i, gpus(n, 2, part=0, parent="G"), slots=1) for i, n in enumerate("ab")]
    assert "MIG" in pool_on(*hosts, engines=2).hold(2)[1][0]
    specs = specs_of(pool_on(*hosts, engines=2, devices="cuda"), 2)
    assert [(one.device, one.gpus, one.backend) for one in specs] == [
        ("cuda:0", ("GPU-a-0",), "gloo"), ("cuda:0", ("GPU-b-0",), "gloo"),
    ]  # fmt: skip


def test_a_framework_that_cannot_use_the_gpus_there_does_not_get_them() -> None:
    why = {"torch": ["2 GPUs are not used: torch is built for the CPU."]}
    pool = pool_on(host_of(0, gpus("a", 2), unfit=why), engines=2)
    given, said = pool.hold(2)
    assert not given.on_gpus
    assert [one[:13] for one in said] == ["node1: 2 GPUs"]


def test_engines_whose_agents_see_other_gpus_of_the_same_host_open_those_alone() -> None:
    """As MPI's ranks, where the scheduler shows each task its own GPU."""
    hosts = [host_of(i, gpus(n, 1), slots=1, token="one") for i, n in enumerate("ab")]
    specs = specs_of(pool_on(*hosts, engines=2), 2)
    assert [(one.device, one.gpus) for one in specs] == [
        ("cuda:0", ("GPU-a-0",)), ("cuda:0", ("GPU-b-0",)),
    ]  # fmt: skip
    assert {one.backend for one in specs} == {NCCL}
    alike = [host_of(i, gpus("a", 2), slots=1, token="one") for i in range(2)]
    assert [one.device for one in specs_of(pool_on(*alike, engines=2), 2)] == ["cuda:0", "cuda:1"]


def test_all_replicas_of_one_engine_are_on_its_host() -> None:
    pool = pool_on(host_of(0, gpus("a", 4), slots=2), host_of(1, gpus("b", 4), slots=2), engines=4)
    plan = make_plan(Recipe("1"), "mirrored", framework="tensorflow", workers=4)
    given = pool.lease(4, plan)
    assert [one.gpu for one in given.leases] == [f"GPU-a-{i}" for i in range(4)]
    assert [one.host for one in pool.lease(4).leases] == ["node1"] * 2 + ["node2"] * 2


def test_an_engine_that_moved_to_another_host_gets_a_gpu_of_that_one() -> None:
    first, second = host_of(0, gpus("a", 2), slots=1), host_of(1, gpus("b", 2), slots=1)
    pool = pool_on(first, second, engines=2)
    plan = make_plan(Recipe("wb.fit()"), "mirrored", workers=2)
    given = pool.hold(2, plan)[0]
    assert pool.fitted(given, [0, 1], plan) is given
    second.gone = "lost"
    hosted: Any = pool.hosted
    hosted.agents.living = [first]
    pool.engines.engines |= hosted.begun([1])
    moved = pool.fitted(given, [0, 1], plan)
    assert [one.gpu for one in moved.leases] == ["GPU-a-0", "GPU-a-1"]
    assert [one.device for one in moved.leases] == ["cuda:0", "cuda:1"]


def test_threads_and_cores_are_those_of_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    hosts = host_of(0, cores=16), host_of(1, cores=4, slots=2)
    specs = specs_of(pool_on(*hosts, engines=6), 6)
    assert [(one.threads, one.cores) for one in specs] == [(4, 16)] * 4 + [(2, 4)] * 2
    assert [one.neighbours for one in specs[3:5]] == [[0, 1, 2, 3], [4, 5]]


def test_cores_that_mpi_has_bound_its_ranks_to_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    bound = [host_of(i, cores=4, cpus=range(4 * i, 4 * i + 4), token="t", slots=1) for i in (0, 1)]
    assert [one.threads for one in specs_of(pool_on(*bound, engines=2), 2)] == [4, 4]
    free = [host_of(i, cores=8, cpus=range(8), token="t", slots=1) for i in (0, 1)]
    assert [one.threads for one in specs_of(pool_on(*free, engines=2), 2)] == [4, 4]
    quota = [host_of(i, cores=2, cpus=range(8), token="t", slots=1) for i in (0, 1)]
    assert [one.threads for one in specs_of(pool_on(*quota, engines=2), 2)] == [1, 1]


def test_ranks_go_host_by_host_and_what_will_be_started_is_foreseen() -> None:
    pool = pool_on(host_of(0, gpus("a", 3), slots=2), host_of(1, gpus("b", 3), slots=2), engines=4)
    foreseen = pool.lease(6)
    pool.add(2)
    assert pool.worker_ids == [0, 1, 4, 2, 3, 5]
    assert pool.of_ranks([2, 5]) == [4, 5]
    assert pool.of_ranks() == pool.worker_ids
    assert [one.host for one in foreseen.leases] == ["node1"] * 3 + ["node2"] * 3
    assert [one.device for one in specs_of(pool, 6)] == ["cuda:0", "cuda:1", "cuda:2"] * 2


def test_a_host_that_came_and_is_gone_is_not_waited_for() -> None:
    gone = host_of(1)
    gone.gone = "its ssh has ended"
    hosted = Hosted([host_of(0), gone])

    def look() -> None:
        raise ClusterError("ssh node2 has ended.", code="WB-CLUSTER-063")

    hosted.launcher = SimpleNamespace(agents=2, look=look)
    hosted.await_hosts(lambda progress: None, float("inf"))
    assert {one.host for one in hosted.begun([0, 1]).values()} == {"node1"}


def test_hosts_of_which_the_same_is_said_share_a_line_and_who_went_is_named() -> None:
    hosts = [host_of(0), host_of(1)]
    hosted = Hosted(hosts)
    hosted.said = ["versions differ: torch"]
    hosted._notes = {one.name: ["the folder is not there"] for one in hosts}
    assert hosted.words == ["versions differ: torch", "node1, node2: the folder is not there"]
    hosts[1].gone = "ssh node2 has ended"
    hosted = Hosted(hosts)
    hosted._notes = {one.name: ["the folder is not there"] for one in hosts}
    assert hosted.words == ["node1: the folder is not there", "node2 is gone: ssh node2 has ended"]


def test_a_table_of_engines_can_be_shown_when_all_hosts_are_gone() -> None:
    pool = pool_on(host_of(0, gpus("a", 2)), engines=2)
    for info in pool.all:
        info.state = "dead"
    hosted: Any = pool.hosted
    hosted.agents.living = []
    assert pool.words() == []
    assert pool.lease(2).leases == ()


def test_a_limit_counts_engines_of_the_cluster_wherever_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORKBENCH_MAX_ENGINES", "5")
    monkeypatch.setattr(folders, "elsewhere", lambda own: 1000)
    pool = pool_on(host_of(0), host_of(1), engines=4)
    pool.add(1)
    with pytest.raises(PlanError):
        pool.add(1)


def test_runs_are_told_of_their_own_hosts_versions_and_devices() -> None:
    first = host_of(0, versions={"torch": "2.9", "numpy": "2.1", "tensorflow": "2.20"}, slots=1)
    second = host_of(
        1, versions={"torch": "2.6", "numpy": "2.1"}, slots=1, notes=("GPU 3 is lost.",)
    )
    pool = pool_on(first, second, engines=2)
    version, device = pool.differences([0, 1], "torch")
    assert "2.9 on node1, 2.6 on node2" in version
    assert device == "node2: GPU 3 is lost."
    assert pool.differences([0], "torch") == []


def test_numbers_count_within_what_the_scheduler_shows_a_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    with nvml.only_fakes(monkeypatch, tmp_path):
        nvml.FakeNvml([nvml.Gpu() for _ in range(4)]).install(monkeypatch)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")  # as Slurm does for an agent
        seen = discovery.survey().devices
        shown = host_of(0, [asdict(one) for one in seen], slots=2)
        specs = specs_of(pool_on(shown, engines=2, devices="0,1"), 2)
        assert specs[0].gpus == tuple(one.uuid for one in seen)
        assert [one.number for one in seen] == [2, 3]
        with pytest.raises(PlanError):
            pool_on(shown, engines=1, devices="2").lease(1)


def test_what_makes_no_sense_is_refused_before_any_host_is_known() -> None:
    with pytest.raises(PlanError):
        HostDevices("abc", "torch", list)


# -- figures ---------------------------------------------------------------------------------------


class Asked:
    """Agents of which some answer."""

    def __init__(self, hosts: list[Host]) -> None:
        self.living, self.silent = hosts, set[int]()

    def begin(self, host: Host, message: Any) -> Host:
        return host

    def answer(self, host: Host, future: Host, timeout_s: float) -> Answer:
        assert timeout_s <= 1.0
        if host.place in self.silent:
            raise ClusterError("silent", code="WB-CLUSTER-057")
        engine = asdict(Reading(50.0, 100 << 20, "PSS", (7, 8))) | {"uptime_s": 60.0}
        gpu = asdict(GpuReading(0, 40.0, 3, 8, {7: 5}, "GPU-a-0"))
        value = {"engines": {str(host.place): engine}, "gpus": [gpu]}
        return Answer(ask=1, value=json.loads(json.dumps(value)))


def test_readings_come_from_the_hosts_and_a_silent_one_shows_its_last(tmp_path: Path) -> None:
    hosts = [host_of(0, slots=1), host_of(1, slots=1)]
    hosted = Hosted(hosts)
    infos = list(hosted.begun([0, 1]).values())
    asked: Any = Asked(hosts)
    hosted.agents = asked
    assert readings(asked, hosts)[1] == HostReading(
        {1: Reading(50.0, 100 << 20, "PSS", (7, 8))},
        {1: 60.0},
        (GpuReading(0, 40.0, 3, 8, {7: 5}, "GPU-a-0"),),
    )
    gpu = leases.Lease("cuda:0", "cuda:0 H100", "GPU-a-0")
    cluster: Any = SimpleNamespace(
        engines=infos, ids=[0, 1], worker_ids=[0, 1], last_task=None, busy=None,
        lease=lambda count: leases.Leases((gpu,) * count),
        engine_set=SimpleNamespace(starting=(), log_path=lambda i: tmp_path / f"{i}.log"),
        pool=SimpleNamespace(given={}, hosted=hosted),
    )  # fmt: skip
    vitals = Vitals(cluster)  # would open this machine's GPUs, if it asked for them
    for silent in (set(), {1}):
        asked.silent = silent
        rows = vitals.now()
        assert [(row.host, row.uptime_s, row.gpu_memory_bytes) for row in rows] == [
            ("node1", 60.0, 5), ("node2", 60.0, 5),
        ]  # fmt: skip
        assert rows[1].memory_bytes == 100 << 20
