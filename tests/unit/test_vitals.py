"""Live figures of engines: a row for each, the last line of its log, how often one is taken."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from fake_processes import System

from workbench.cluster.engines import EngineInfo
from workbench.cluster.processes import Ending
from workbench.cluster.vitals import TAIL_BYTES, EngineVitals, Gpus, LastLine
from workbench.devices import leases
from workbench.session import status
from workbench.session.status import Vitals
from workbench.views.tables import LOG_CHARACTERS, cluster_table

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


# -- the whole -------------------------------------------------------------------------------------


def cluster_of(infos: list[EngineInfo], folder: Path, starting: tuple[int, ...] = ()):
    living = [info.id for info in infos if info.state != "dead"]
    lease = leases.Leases((leases.Lease("cpu", "cpu"),) * max(1, len(infos)))
    pool = SimpleNamespace(given={}, hosted=None, words=list)
    engines = SimpleNamespace(starting=starting, log_path=lambda i: folder / f"{i}.log")
    return SimpleNamespace(
        engines=infos, ids=living, worker_ids=living, lease=lambda count: lease,
        last_task=None, busy=None, engine_set=engines, pool=pool,
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
    infos = [
        info_of(0, me),
        EngineInfo(
            1, "u", 2**22 + 7, "elsewhere", state="dead", exit=Ending("SIGKILL", hint="why")
        ),
    ]
    vitals = Vitals(cluster_of(infos, tmp_path, starting=(2,)), gpus=Gpus(list))
    rows = vitals.now()
    assert rows[1].doing == "dead (SIGKILL)"
    assert [(one.engine, one.state) for one in rows] == [(0, "idle"), (1, "dead"), (2, "starting")]
    assert rows[0].log_line == "hello"
    assert rows[0].cpu_percent is not None
    assert rows[0].memory_bytes is not None
    assert rows[0].uptime_s is not None
    assert rows[1].cpu_percent is rows[1].memory_bytes is rows[1].uptime_s is None
    wire = json.loads(json.dumps([one.to_wire() for one in rows]))
    assert wire[1]["cpu_percent"] is None
    assert wire[0]["doing"] == "idle"


def test_rows_show_what_engines_were_told_to_compute_on_and_no_other(tmp_path: Path) -> None:
    """As of TensorFlow's parameter_server: a coordinator, a worker that is a helper, a server."""
    me = psutil.Process().pid
    cluster = cluster_of([info_of(i, me) for i in range(3)], tmp_path)
    gpu = leases.Lease("cuda:0", "cuda:0 H100 (GPU 3)", "GPU-d")
    cluster.worker_ids = [0]
    cluster.lease = lambda count: leases.Leases((gpu,) * count)
    cpu = leases.Lease("cpu", "cpu")
    cluster.pool.given = {0: cpu, 1: gpu, 2: cpu}
    rows = Vitals(cluster, gpus=Gpus(list)).now()
    assert [row.device for row in rows] == ["cpu", "cuda:0 H100 (GPU 3)", "server"]
    cluster.pool.given = {}
    assert Vitals(cluster, gpus=Gpus(list)).now()[0].device == gpu.label  # nothing has run yet


def test_an_engine_of_another_host_shows_dashes(tmp_path: Path) -> None:
    info = info_of(0, psutil.Process().pid)
    info.place = "another host"  # of the same name
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
    monkeypatch.setattr(status, "EVERY_S", 0.01)
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
