"""Files of runs on other machines: who writes them, what is sent, and what is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from history_rows import make_rows

from workbench.cluster.hosts import wire
from workbench.cluster.hosts.agents import KEPT_COPIES, HostFiles
from workbench.cluster.hosts.places import HostedEngines
from workbench.engine.checkpoints import files as engine_files
from workbench.errors import ClusterError, PlanError, RunError
from workbench.execution.outcome import left_behind
from workbench.execution.requests import FarFiles, check_folder
from workbench.history import disk
from workbench.history.disk import FarWriter
from workbench.shared import cluster_env
from workbench.shared.events import Noted, Topic
from workbench.shared.messages import BadMessageError, CellOutcome, Happened, Position, Records
from workbench.shared.record import RECORD

WAIT_S = 20


def rows(rank: int = 0, steps: int = 3) -> Records:
    return Records(run=1, dropped=0, rows=make_rows(steps, 2)[:, rank].tobytes())


def noted(rank: int = 0) -> Happened:
    return Happened(run=1, event=Noted(rank=rank, text="said"))


# -- rows and events, written by the kernel --------------------------------------------------------


def test_rows_and_events_of_other_machines_are_written_as_engines_write_them(tmp_path):
    writer = FarWriter(tmp_path, pytest.fail)
    writer.ranks = {7: 1}
    writer.take(7, rows(1))
    writer.take(7, noted(1))
    writer.take(7, Position(run=1, rank=1, step=3))
    writer.take(6, rows(0))  # it is on this machine, and writes itself
    writer.settle()
    writer.take(7, rows(1, 2))  # what comes after the end is written too
    writer.settle()
    assert sorted(os.listdir(tmp_path)) == ["events-rank1.jsonl", "records-rank1.bin"]
    assert (tmp_path / "records-rank1.bin").stat().st_size == 5 * RECORD.itemsize
    ((name, fields),) = disk.read_events(tmp_path)
    assert (name, fields["text"]) == ("note", "said")


def test_a_full_disk_costs_rows_of_other_machines_and_one_note(tmp_path):
    (tmp_path / "file").touch()
    told: list[Noted] = []
    writer = FarWriter(tmp_path / "file" / "run", told.append)
    writer.ranks = {0: 0, 1: 1}
    for engine in (0, 1, 0):
        writer.take(engine, rows(engine))
        writer.settle()
    (note,) = told
    assert note.topic == Topic.NOT_ON_DISK.value
    assert note.value == "Not a directory"


def test_a_disk_that_hangs_holds_nobody_up(tmp_path, monkeypatch):
    hangs, told = threading.Event(), threading.Event()
    monkeypatch.setattr(disk, "MOST_WAITING_BYTES", 10 * RECORD.itemsize)
    monkeypatch.setattr(disk, "RunWriter", lambda *_: hangs.wait(WAIT_S))
    writer = FarWriter(tmp_path, lambda note: told.set())
    writer.ranks = {0: 0}
    for _ in range(5):
        writer.take(0, rows())
    assert told.is_set()
    writer.settle(timeout_s=0.05)
    hangs.set()
    writer.settle()


def test_an_engine_writes_where_the_kernel_fetches(tmp_path, monkeypatch):
    assert cluster_env.run_folder("/run", "id") == Path("/run")
    monkeypatch.delenv(cluster_env.MARK, raising=False)
    assert cluster_env.run_folder("", "id") is None
    (tmp_path / cluster_env.TMP).mkdir()
    monkeypatch.setenv(cluster_env.MARK, str(tmp_path))
    assert cluster_env.run_folder("", "id") == tmp_path / "tmp" / "id"


# -- what is sent and fetched ----------------------------------------------------------------------


class Agents:
    """Agents of hosts that are folders of this machine; they see other folders where told so."""

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self.written: list[str] = []

    def ask(self, host: Any, message: Any, timeout_s: float = 0) -> wire.Answer:
        assert isinstance(message, wire.Look)
        if not self.shared and not message.path.startswith(host.facts.folder):
            return wire.Answer(ask=0)
        seen = wire.Seen.at(message.path, deep=message.deep)
        return wire.Answer(ask=0, value=None if seen is None else vars(seen))

    def write_file(self, host: Any, path: str, source: Path) -> str:
        target = Path(host.facts.folder) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        self.written.append(path)
        return str(target)

    def read_file(self, host: Any, path: str, into: Path) -> int:
        into.write_bytes(Path(path).read_bytes())
        return into.stat().st_size

    def begin(self, host: Any, message: Any) -> None:
        assert isinstance(message, wire.RemoveFile)
        for path in sorted((Path(host.facts.folder) / message.path).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


class Host(SimpleNamespace):
    __hash__ = object.__hash__


def host_in(folder: Path, place: int = 0) -> Host:
    folder.mkdir(exist_ok=True)
    return Host(
        place=place, name=folder.name, facts=SimpleNamespace(folder=str(folder)), has_cwd=False,
        gone="",
    )  # fmt: skip


def a_folder(path: Path) -> Path:
    path.mkdir()
    (path / "run.json").write_text("{}")
    (path / "weights.npz").write_bytes(b"w")
    (path / "records-rank0.bin").write_bytes(b"r")
    return path


def no_rows(name: str) -> bool:
    return not name.startswith("records")


def test_files_are_sent_once_and_again_when_they_have_changed(tmp_path):
    agents, source = Agents(), a_folder(tmp_path / "run")
    files, host = HostFiles(agents), host_in(tmp_path / "node1")
    first = files.send(host, source, no_rows)
    assert files.send(host, source, no_rows) == first
    assert [Path(one).name for one in agents.written] == ["run.json", "weights.npz"]
    assert (Path(first) / "weights.npz").read_bytes() == b"w"
    (source / "weights.npz").write_bytes(b"other")
    again = files.send(host, source, no_rows)
    assert again != first
    assert (Path(again) / "weights.npz").read_bytes() == b"other"


def test_nothing_is_sent_to_a_host_that_sees_the_very_files(tmp_path):
    agents, source = Agents(shared=True), a_folder(tmp_path / "run")
    assert HostFiles(agents).send(host_in(tmp_path / "node1"), source, no_rows) == str(source)
    assert not agents.written


def test_of_what_was_sent_the_newest_stay(tmp_path):
    agents, host = Agents(), host_in(tmp_path / "node1")
    files = HostFiles(agents)
    for number in range(KEPT_COPIES + 2):
        files.send(host, a_folder(tmp_path / f"run{number}"), no_rows)
    left = {path.parent.name for path in (tmp_path / "node1").rglob("weights.npz")}
    assert left == {f"run{number}" for number in range(2, KEPT_COPIES + 2)}


def test_a_file_that_does_not_arrive_whole_is_not_kept(tmp_path):
    agents, host = Agents(), host_in(tmp_path / "node1")
    (tmp_path / "node1" / "left").mkdir()
    (tmp_path / "node1" / "left" / "weights.npz").write_bytes(b"whole")
    agents.read_file = lambda host, path, into: into.write_bytes(b"who")
    with pytest.raises(OSError, match="3 of 5 bytes"):
        HostFiles(agents).fetch(host, str(tmp_path / "node1" / "left"), tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", "a/../../x"])
def test_a_host_that_names_files_elsewhere_is_not_believed(tmp_path, name):
    told = {"is_folder": True, "inode": 1, "changed_ns": 1, "files": [[name, 1, 1]]}
    with pytest.raises(BadMessageError):
        wire.Seen.told(told)
    agents = Agents()
    agents.ask = lambda *_, **__: wire.Answer(ask=0, value=told)
    with pytest.raises(RunError, match="WB-RUN-099"):
        HostFiles(agents).fetch(host_in(tmp_path / "node1"), "/left", tmp_path / "run")


class Engines:
    """Engine 0 is here, 1 on node1, 2 on node2; 3 where none of our agents is."""

    def __init__(self, tmp_path: Path, agents: Agents | None = None) -> None:
        self.hosts = {i: host_in(tmp_path / f"node{i}", i) for i in (1, 2)}
        self.host_files = HostFiles(agents or Agents())
        self.engines = {
            i: SimpleNamespace(id=i, is_here=not i, place=f"p{i}", host=f"node{i}", address="")
            for i in range(4)
        }
        self.why: Mapping[int, str] = {}
        self.asked: list[tuple[int, ...]] = []

    def host_of(self, engine: int) -> Any:
        return self.hosts.get(engine)

    def call(self, ids: list[int], name: str, args: tuple[str, str]) -> dict[int, str]:
        self.asked.append(tuple(sorted(ids)))
        assert engine_files.blind(*args) == ""
        return {i: self.why.get(i, "") for i in ids}


def a_run(tmp_path: Path, **about: Any) -> Any:
    folder = tmp_path / "20261124-run"
    folder.mkdir()
    far = FarWriter(folder, pytest.fail)
    return SimpleNamespace(
        folder=folder, members=(0, 1, 2), engines=(0, 1, 2), init_from="", resume_from="", far=far,
        **about,
    )  # fmt: skip


def test_engines_elsewhere_are_told_paths_of_their_own(tmp_path):
    run, engines = a_run(tmp_path), Engines(tmp_path)
    run.init_from = str(a_folder(tmp_path / "before"))
    resumed = tmp_path / "step-8"
    for name in ("state/a", "rank-0/a", "rank-1/a", "rank-2/a", "checkpoint.json"):
        (resumed / name).parent.mkdir(parents=True, exist_ok=True)
        (resumed / name).touch()
    run.resume_from = str(resumed)
    told = FarFiles(engines, run, servers=[3]).settings()
    assert 0 not in told
    assert told[3] == {"run_dir": ""}
    assert told[1]["run_dir"] == ""
    assert told[1]["init_from"].startswith(str(tmp_path / "node1"))
    assert told[2]["init_from"].startswith(str(tmp_path / "node2"))
    assert sorted(os.listdir(told[1]["init_from"])) == ["run.json", "weights.npz"]
    assert Path(told[1]["resume"]).name == "step-8"
    assert sorted(os.listdir(told[1]["resume"])) == ["checkpoint.json", "rank-1", "state"]
    assert told[1]["resume_name"] == str(resumed)
    assert run.far.ranks == {1: 1, 2: 2}


def test_what_cannot_be_sent_is_told_with_the_hosts_name(tmp_path):
    agents = Agents()
    run, engines = a_run(tmp_path), Engines(tmp_path, agents)
    run.init_from = str(a_folder(tmp_path / "before"))

    def full(*_: Any) -> str:
        raise ClusterError("No.", seen="OSError: No space left on device", code="WB-CLUSTER-000")

    agents.write_file = full
    with pytest.raises(RunError, match=r"node1.*WB-RUN-100") as caught:
        FarFiles(engines, run, []).settings()
    assert "No space left" in str(caught.value)


def test_only_whole_weights_and_profiles_are_brought(tmp_path):
    run, engines = a_run(tmp_path), Engines(tmp_path)
    left = tmp_path / "node1" / "tmp" / run.folder.name
    for name in ("weights.npz", "weights.pt", "weights-rank2.npz", "run.json", "profiles/r.json"):
        (left / name).parent.mkdir(parents=True, exist_ok=True)
        (left / name).write_text(name)
    whole = CellOutcome(status="ok", weights="weights.npz")
    FarFiles(engines, run, []).fetch({1: whole, 2: CellOutcome(status="died")})
    brought = sorted(str(one.relative_to(run.folder)) for one in run.folder.rglob("*.*"))
    assert brought == ["profiles/r.json", "weights.npz", "weights.pt"]
    assert not list(left.iterdir())


# -- folders that all share ------------------------------------------------------------------------


def test_a_folder_for_checkpoints_that_a_host_does_not_share_is_refused(tmp_path):
    engines, folder = Engines(tmp_path), tmp_path / "new" / "saved"
    engines.why = {2: "it is not there"}
    with pytest.raises(PlanError, match="WB-PLAN-188") as caught:
        check_folder(engines, [0, 1, 2], str(folder))
    assert str(folder) in str(caught.value)
    assert "node2" in str(caught.value)
    assert engines.asked == [(1, 2)]
    assert not (tmp_path / "new").exists()


def test_a_folder_that_all_share_is_taken_and_left_empty(tmp_path):
    engines, folder = Engines(tmp_path), tmp_path / "saved"
    check_folder(engines, [0, 1, 2], str(folder))
    assert not list(folder.iterdir())
    check_folder(engines, [0], str(tmp_path / "alone"))  # nobody is elsewhere
    check_folder(engines, [0, 1], "")
    assert engines.asked == [(1, 2)]
    assert not (tmp_path / "alone").exists()


def test_a_host_says_why_it_does_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_files, "SEE_S", 0.0)
    missing = engine_files.blind(str(tmp_path / "no" / "token"), "t")
    assert missing
    assert "another folder" not in missing
    assert "another folder" in engine_files.blind(str(tmp_path / "token"), "t")
    (tmp_path / "token").write_text("other")
    assert "another folder" in engine_files.blind(str(tmp_path / "token"), "t")
    (tmp_path / "token").write_text("t")
    assert engine_files.blind(str(tmp_path / "token"), "t") == ""
    assert os.listdir(tmp_path) == ["token"]


@pytest.mark.parametrize(
    ("there", "says"), [("same", ""), ("other", "another folder"), ("", "start in")]
)
def test_a_host_without_the_notebooks_folder_is_named(tmp_path, monkeypatch, there, says):
    monkeypatch.chdir(tmp_path)
    mine = wire.Seen.at(tmp_path)
    other = wire.Seen(is_folder=True, inode=mine.inode + 1, changed_ns=0)
    hosted = SimpleNamespace(
        files=SimpleNamespace(look=lambda *_: {"same": mine, "other": other}.get(there))
    )
    host = SimpleNamespace(name="node1", facts=SimpleNamespace(home="/root"), has_cwd=True)
    text = HostedEngines._look_for_folder(hosted, host)
    assert (says in text) if says else not text
    assert host.has_cwd == (there == "same")
    if not there:
        assert str(tmp_path) in text
        assert text.endswith("/root")


def test_a_module_beside_the_notebook_that_a_host_lacks_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()

    def advice(name: str, *, has_cwd: bool = False) -> str | None:
        host = SimpleNamespace(name="node1", has_cwd=has_cwd)
        evalue = f"No module named '{name}'"
        error = CellOutcome(status="error", ename="ModuleNotFoundError", evalue=evalue)
        return left_behind(error, host)

    assert "mine is in the notebook's folder" in advice("mine")
    assert "node1" in advice("mine.part")
    assert advice("theirs") is None
    assert advice("mine", has_cwd=True) is None
    assert left_behind(CellOutcome(status="error", evalue="No module named 'mine'"), None) is None
