"""Live figures of engines: what they use, what they do, what they say; and what a sample costs."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from workbench.cluster.devices import Device
from workbench.cluster.engines import EngineInfo
from workbench.cluster.gpus import GpuReading, Gpus
from workbench.cluster.readings import Family, Processes
from workbench.cluster.vitals import TAIL_BYTES, EngineVitals, LastLine, gpu_use
from workbench.session import status
from workbench.session import vitals as live
from workbench.session.doing import Scene, doing
from workbench.session.vitals import Vitals
from workbench.views.tables import LOG_CHARACTERS, cluster_table

# -- processes -------------------------------------------------------------------------------------


class Process:
    """A process that does what a test says; `psutil.Process` as far as readings need it."""

    def __init__(self, pid: int, *, rss: int = 100, pss: int = 60, began: float = 5.0) -> None:
        self.pid, self.rss, self.pss, self.began, self.cpu_s = pid, rss, pss, began, 0.0
        self.read = self.full = 0

    def create_time(self) -> float:
        return self.began

    def oneshot(self) -> contextlib.AbstractContextManager[None]:
        self.read += 1
        return contextlib.nullcontext()

    def cpu_times(self) -> SimpleNamespace:
        return SimpleNamespace(user=self.cpu_s, system=0.0)

    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(rss=self.rss)

    def memory_full_info(self) -> SimpleNamespace:
        self.full += 1
        return SimpleNamespace(rss=self.rss, pss=self.pss)


class System:
    """Processes by pid, who their parents are, and a clock."""

    def __init__(self, parents: dict[int, int]) -> None:
        self.parents = parents
        self.processes = {pid: Process(pid) for pid in parents}
        self.asked: list[int] = []
        self.now_s = 0.0

    def parent_of(self, pid: int) -> int | None:
        self.asked.append(pid)
        return self.parents.get(pid)

    def open(self, pid: int) -> Process:
        if pid not in self.parents:
            raise psutil.NoSuchProcess(pid)
        return self.processes.setdefault(pid, Process(pid))

    def processes_read(self) -> Processes:
        family = Family(lambda: list(self.parents), self.parent_of)
        return Processes(family, self.open, lambda: self.now_s)


def test_a_family_is_an_engine_with_all_below_it_and_is_looked_up_once() -> None:
    system = System({1: 0, 10: 1, 11: 10, 12: 11, 20: 1, 21: 20, 30: 1})
    family = Family(lambda: list(system.parents), system.parent_of)
    found = family.of({10, 20})
    assert {root: sorted(children) for root, children in found.items()} == {10: [11, 12], 20: [21]}
    system.asked.clear()
    family.of({10, 20})
    assert system.asked == []
    system.parents[22] = 21
    assert sorted(family.of({10, 20})[20]) == [21, 22]
    assert system.asked == [22]
    del system.parents[21], system.parents[22]
    assert family.of({10, 20})[20] == []


def test_an_engine_below_another_is_its_own() -> None:
    system = System({10: 1, 20: 10, 21: 20})
    found = Family(lambda: list(system.parents), system.parent_of).of({10, 20})
    assert found == {10: [], 20: [21]}


def test_cpu_is_a_share_of_the_time_between_samples_with_the_children() -> None:
    system = System({10: 1, 11: 10})
    processes = system.processes_read()
    first = processes.read({10: 5.0})[10]
    assert first is not None
    assert first.cpu_percent is None  # nothing to compare with
    system.now_s = 2.0
    system.processes[10].cpu_s, system.processes[11].cpu_s = 1.0, 2.5
    second = processes.read({10: 5.0})[10]
    assert second is not None
    assert second.cpu_percent == pytest.approx(175.0)
    assert sorted(second.pids) == [10, 11]


def test_what_a_child_did_before_it_was_seen_counts_only_if_it_is_newborn() -> None:
    system = System({10: 1})
    processes = system.processes_read()
    processes.read({10: 5.0})
    system.parents |= {11: 10, 12: 10}
    system.processes[11], system.processes[12] = Process(11), Process(12, began=time.time())
    system.processes[11].cpu_s, system.processes[12].cpu_s = 1000.0, 0.5
    system.now_s = 1.0
    reading = processes.read({10: 5.0})[10]
    assert reading is not None
    assert reading.cpu_percent == pytest.approx(50.0)


def test_another_process_with_the_same_pid_is_not_the_engine() -> None:
    system = System({10: 1})
    assert system.processes_read().read({10: 4000.0, 99: 0.0}) == {10: None, 99: None}


def test_memory_is_read_in_turn_and_follows_the_resident_set_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workbench.cluster.readings.PSS_BUDGET_S", -1.0)  # one engine a sample
    system = System({10: 1, 20: 1})
    processes = system.processes_read()
    engines = {10: 5.0, 20: 5.0}
    first = processes.read(engines)
    assert [r and r.memory_bytes for r in first.values()] == [60, None]
    system.processes[10].rss += 7
    second = processes.read(engines)
    assert [r and r.memory_bytes for r in second.values()] == [67, 60]
    assert [p.full for p in system.processes.values()] == [1, 1]
    processes.read(engines)
    assert [p.full for p in system.processes.values()] == [2, 1]
    processes.read(engines, all_memory=True)
    assert [p.full for p in system.processes.values()] == [3, 2]


def test_a_system_without_pss_says_that_it_is_the_resident_set() -> None:
    system = System({10: 1})
    system.processes[10].pss = 0
    reading = system.processes_read().read({10: 5.0})[10]
    assert reading is not None
    assert (reading.memory_bytes, reading.memory_kind) == (100, "RSS")


def test_a_real_process_that_works_is_seen_to_work() -> None:
    code = "import sys\nprint(1, flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None
            busy.stdout.readline()
            processes, began = Processes(), psutil.Process(busy.pid).create_time()
            processes.read({busy.pid: began})
            threading.Event().wait(0.3)
            reading = processes.read({busy.pid: began})[busy.pid]
        finally:
            busy.kill()
    assert reading is not None
    assert reading.cpu_percent is not None
    assert 5 < reading.cpu_percent < 150
    assert reading.memory_bytes is not None
    assert reading.memory_bytes > 1 << 20


# -- GPUs ------------------------------------------------------------------------------------------


class NvmlError(Exception):
    pass


class Nvml:
    """NVML with two GPUs; the second one does not tell how busy it is, as under MIG."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self.opened = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid == "GPU-gone":
            raise NvmlError(uuid)
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        if handle == "GPU-b":
            raise NvmlError("not supported")
        return SimpleNamespace(gpu=40, memory=10)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=3 << 30, total=8 << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        known = SimpleNamespace(pid=10, usedGpuMemory=1 << 30)
        return [known] if handle == "GPU-a" else [SimpleNamespace(pid=20, usedGpuMemory=None)]


def gpu(index: int, uuid: str) -> Device:
    return Device(index, "NVIDIA H200", 8 << 30, 0, uuid)


def test_gpus_are_read_and_what_the_driver_does_not_say_stays_open() -> None:
    nvml = Nvml()
    gpus = Gpus(lambda: [gpu(1, "GPU-b"), gpu(0, "GPU-a"), gpu(2, "GPU-gone")], nvml)
    first, second = gpus.read()
    assert first == GpuReading(0, 40.0, 3 << 30, 8 << 30, {10: 1 << 30})
    assert (second.index, second.percent, second.memory_bytes) == (1, None, {20: None})
    gpus.read()
    assert nvml.opened == 1
    gpus.close()
    assert nvml.opened == 0


def test_without_a_gpu_nothing_is_opened() -> None:
    nvml = Nvml()
    assert Gpus(list, nvml).read() == []
    assert nvml.opened == 0


def test_an_engine_is_told_its_own_share_of_a_gpu() -> None:
    a = GpuReading(0, 40.0, 3, 8, {10: 5, 11: 2, 99: 1})
    b = GpuReading(1, 80.0, 3, 8, {})
    assert gpu_use([a, b], "cuda:0 NVIDIA H200", [10, 11]) == (40.0, 7)
    assert gpu_use([a, b], "cuda:1 NVIDIA H200", [10]) == (60.0, 5)  # it uses another one too
    assert gpu_use([a, b], "cuda:1 NVIDIA H200", [12]) == (80.0, None)  # pids of a container
    assert gpu_use([a, b], "cpu", [12]) == (None, None)
    assert gpu_use([GpuReading(0, None, None, None, {10: None})], "cuda:0", [10]) == (None, None)


# -- logs ------------------------------------------------------------------------------------------


def test_the_last_line_says_something_and_is_harmless(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    last = LastLine(log)
    assert last.read() is None
    log.write_text("first\n\x1b[31mloss is \x1b[0mNaN\x07\n\n")
    assert last.read() == "loss is NaN"
    with log.open("a") as file:
        file.write("2026-01-01 10:00:00.000 [IPEngine.3.3] Handling apply_request: 1234\n")
    assert last.read() == "loss is NaN"
    with log.open("a") as file:
        file.write("progress  1%\rprogress 50%")
    assert last.read() == "progress 50%"
    log.write_text("cut\n")
    assert last.read() == "cut"


def test_a_log_is_never_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"x" * 5_000_000 + b"\nend\n")
    read: list[int] = []
    real = Path.open

    def counting(self: Path, *args: str):
        file = real(self, *args)
        plain = file.read
        return contextlib.nullcontext(
            SimpleNamespace(
                seek=file.seek,
                read=lambda size: read.append(size) or plain(size),
            )
        )

    monkeypatch.setattr(Path, "open", counting)
    last = LastLine(log)
    assert last.read() == "end"
    assert last.read() == "end"
    assert read == [TAIL_BYTES]  # the second time nothing had changed


# -- what they do ----------------------------------------------------------------------------------

WAITS = {"state": "waits", "waits_in": "in all_reduce", "at": "", "inside": ""}
HELD = {"state": "held", "waits_in": "in a pause", "at": "", "inside": ""}
PAUSED = {"state": "paused", "waits_in": "", "at": "", "inside": ""}
NAMES = {0: "rank 0", 1: "rank 1", 2: "server s0"}


@pytest.mark.parametrize(
    ("run_state", "places", "words"),
    [
        ("", {}, ["in a cell", "in a cell", "in a cell", "idle"]),
        (
            "running",
            {},
            ["training as rank 0", "training as rank 1", "at work as server s0", "idle"],
        ),
        ("running", {0: WAITS}, ["waiting in all_reduce", "training as rank 1", None, "idle"]),
        ("running", {1: PAUSED}, ["training as rank 0", "paused at a debugger", None, "idle"]),
        ("paused", {0: WAITS}, ["paused", "paused", None, "idle"]),
        ("running", {0: HELD}, ["paused", "training as rank 1", None, "idle"]),
        ("starting", {}, ["about to train as rank 0", "about to train as rank 1", None, "idle"]),
    ],
)
def test_engines_say_what_they_do(
    run_state: str, places: dict[int, dict[str, str]], words: list[str | None]
) -> None:
    scene = Scene(NAMES, run_state, places)
    for engine, expected in enumerate(words):
        state = "busy" if engine in NAMES else "idle"
        if expected is not None:
            assert doing(engine, state, "", scene, starting=False)[1] == expected


def test_dead_and_starting_engines_say_so() -> None:
    nothing = Scene({}, "", {})
    assert doing(0, "dead", "SIGKILL", nothing, starting=False) == ("dead", "dead (SIGKILL)")
    assert doing(0, "dead", "SIGKILL", nothing, starting=True) == ("starting", "starting")
    assert doing(0, "busy", "", nothing, starting=False) == ("busy", "busy")


def test_the_table_shows_the_log_and_the_gpu_only_where_there_is_something(tmp_path: Path) -> None:
    (tmp_path / "0.log").write_text("x" * 100 + "\n")
    cluster = cluster_of([info_of(0, psutil.Process().pid)], tmp_path)
    cluster.vitals = Vitals(cluster, gpus=Gpus(list))
    (row,) = status.rows(cluster, now=True)
    assert row["log_line"] == "x" * 100
    assert "gpu_percent" not in row
    text = cluster_table([row]).text()
    assert "x" * (LOG_CHARACTERS - 1) + "…" in text
    assert "x" * LOG_CHARACTERS not in text
    (tmp_path / "0.log").write_text("")
    assert "log_line" not in status.rows(cluster, now=True)[0]


# -- the whole -------------------------------------------------------------------------------------


def cluster_of(infos: list[EngineInfo], folder: Path, starting: tuple[int, ...] = ()):
    living = [info.id for info in infos if info.state != "dead"]
    lease = SimpleNamespace(leases=[SimpleNamespace(label="cpu")] * max(1, len(infos)))
    engines = SimpleNamespace(starting=starting, log_path=lambda i: folder / f"{i}.log")
    return SimpleNamespace(
        engines=infos, ids=living, worker_ids=living, lease=lambda count: lease,
        last_task=None, busy=None, _engines=engines,
    )  # fmt: skip


def info_of(engine: int, pid: int, **more) -> EngineInfo:
    return EngineInfo(
        engine, "u", pid, socket.gethostname(), began=psutil.Process(pid).create_time(), **more
    )


def test_a_sample_has_a_row_per_engine_also_of_those_that_start_and_are_gone(
    tmp_path: Path,
) -> None:
    (tmp_path / "0.log").write_text("hello\n")
    me = psutil.Process().pid
    infos = [info_of(0, me), EngineInfo(1, "u", 2**22 + 7, "elsewhere", state="dead", exit="gone")]
    vitals = Vitals(cluster_of(infos, tmp_path, starting=(2,)), gpus=Gpus(list))
    rows = vitals.now()
    assert [(one.engine, one.state) for one in rows] == [(0, "idle"), (1, "dead"), (2, "starting")]
    assert rows[0].log_line == "hello"
    assert rows[0].cpu_percent is not None
    assert rows[0].memory_bytes is not None
    assert rows[0].uptime_s is not None
    assert rows[1].cpu_percent is rows[1].memory_bytes is rows[1].uptime_s is None
    wire = json.loads(json.dumps([one.to_wire() for one in rows]))
    assert wire[1]["cpu_percent"] is None
    assert wire[0]["doing"] == "idle"


def test_an_engine_of_another_host_shows_dashes(tmp_path: Path) -> None:
    info = info_of(0, psutil.Process().pid)
    info.host = "another-host"
    (row,) = Vitals(cluster_of([info], tmp_path), gpus=Gpus(list)).now()
    assert row.memory_bytes is row.cpu_percent is None


def test_a_number_that_is_none_travels_as_null() -> None:
    row = EngineVitals(0, 0, 1, "h", "cpu", "idle", "idle", cpu_percent=float("nan"))
    assert row.to_wire()["cpu_percent"] is None


def test_samples_are_at_most_one_a_second_however_many_look(tmp_path: Path) -> None:
    system = System({10: 1})
    infos = [EngineInfo(0, "u", 10, socket.gethostname(), began=5.0)]
    vitals = Vitals(cluster_of(infos, tmp_path), system.processes_read(), Gpus(list))
    for _ in range(50):
        vitals.sample()
    assert system.processes[10].read == 1
    assert vitals.latest == vitals.sample()


def test_watching_samples_on_a_thread_that_ends_with_the_last_watcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "EVERY_S", 0.01)
    vitals = Vitals(cluster_of([info_of(0, psutil.Process().pid)], tmp_path), gpus=Gpus(list))
    came, threads = threading.Event(), set()

    def fail(_: object) -> None:
        raise ValueError("a view was closed")

    def hear(sample: object) -> None:
        threads.add(threading.current_thread())
        came.set()

    undo_hear = vitals.watch(hear)
    assert came.wait(10)
    undo_fail = vitals.watch(fail)
    came.clear()
    assert came.wait(10)  # the other's mistake did not end it
    undo_hear()
    undo_fail()
    (thread,) = threads
    assert thread is not threading.main_thread()
    thread.join(10)
    assert not thread.is_alive()


def test_a_sample_costs_one_reading_a_process_and_a_budget_of_memory() -> None:
    system = System(dict.fromkeys(range(100, 164), 1))
    for process in system.processes.values():
        full = process.memory_full_info

        def slow(full=full):
            begins = time.thread_time()
            while time.thread_time() - begins < 0.002:
                pass
            return full()

        process.memory_full_info = slow  # type: ignore[method-assign]
    processes = system.processes_read()
    processes.read(dict.fromkeys(range(100, 164), 5.0))
    assert {process.read for process in system.processes.values()} == {1}
    assert 1 <= sum(process.full for process in system.processes.values()) <= 4
