"""`workbench doctor`: each check with what it is to find, the report, and the hosts' agents."""

from __future__ import annotations

import json
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workbench as wb
from workbench.doctor import children, command, gpus, hosts, machine, probes
from workbench.doctor.report import SCHEMA, STATUSES, Check, Line, Report, together

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


# -- the report ------------------------------------------------------------------------------------


def lines(*statuses: str) -> list[Line]:
    return [Line(f"a.{i}", s, f"thing {i}", f"found {i}") for i, s in enumerate(statuses)]  # type: ignore[arg-type]


def test_the_exit_status_is_1_only_where_something_failed() -> None:
    assert Report("doctor", lines("ok", "warn", "unknown")).exit_status == 0
    assert Report("doctor", lines("ok", "fail")).exit_status == 1


def test_the_json_document_has_the_documented_fields_and_reads_back() -> None:
    report = Report("doctor", [Line("gpu.drift", "warn", "w", "f", "n", 1.5, {"ppm": 12.0})])
    said = json.loads(report.json())
    assert set(said) == {
        "schema", "kind", "about", "seconds", "counts", "failed", "lines", "files"
    }  # fmt: skip
    assert said["schema"] == SCHEMA
    assert set(said["counts"]) == set(STATUSES)
    assert [Line.from_dict(one) for one in said["lines"]] == report.lines
    page = (ROOT / "docs/gpus.md").read_text()
    assert all(f"`{field}`" in page for field in (*said, *said["lines"][0]))


@pytest.mark.parametrize("said", [{}, {"id": "a", "status": "fine", "what": "", "found": ""}, []])
def test_what_is_no_line_is_refused(said: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Line.from_dict(said)


def test_what_cannot_be_checked_for_one_reason_is_one_line_for_readers() -> None:
    many = [Line(f"gpu.{i}", "unknown", f"thing {i}", "no GPU here") for i in range(3)]
    (shown,) = together(many)
    assert (shown.what, shown.id) == ("3 checks", "gpu.0")
    assert "thing 0, thing 1, thing 2" in shown.found
    assert together([many[0], *lines("ok")]) == [many[0], *lines("ok")]


def test_text_and_table_show_the_next_step() -> None:
    report = Report("doctor", [Line("a.b", "fail", "shm", "64 MB", "--shm-size=8g")])
    assert "next: --shm-size=8g" in report.text()
    assert "--shm-size=8g" in report.table().html()
    bundle = report._repr_mimebundle_()
    assert "<table" in bundle["text/html"]
    assert "FAIL" in bundle["text/plain"]


def test_a_check_that_breaks_is_one_that_could_not_be_made() -> None:
    def broken() -> tuple[Any, ...]:
        raise OSError("no such file")

    line = Check("a.b", "a thing", broken).run()
    assert (line.status, "no such file" in line.found) == ("unknown", True)


def test_every_id_stands_once_in_the_docs() -> None:
    ids = [check.id for check in machine.checks()] + list(gpus.JUDGED)
    ids += [id for probe in gpus.PROBED for id in probe.says]
    assert len(ids) == len(set(ids))
    page = (ROOT / "docs/gpus.md").read_text()
    assert [id for id in ids if f"`{id}`" not in page] == []
    assert [s.name for s in gpus.STAGES if f"`{s.name}`" not in page] == []


# -- this machine ----------------------------------------------------------------------------------


def test_every_check_of_a_machine_says_something_here() -> None:
    found = machine.look()
    assert {line.status for line in found} <= set(STATUSES)
    assert not [line for line in found if "Error: " in line.found]
    assert all(line.next_step for line in found if line.status in ("warn", "fail"))


def test_the_versions_asked_for_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *(one for extra in extras for one in extra)]
    for name, least in {**machine.LEAST, **machine.FRAMEWORKS}.items():
        assert any(one.split(",")[0] == f"{name}>={least}" for one in asked), name


@pytest.mark.parametrize(
    ("found", "least", "older"),
    [
        ("9.0.9", "9.1", True), ("9.1", "9.1", False), ("10.0", "9.1", False),
        ("2.13.0+cpu", "2.6", False),
    ],
)  # fmt: skip
def test_versions_are_compared_by_number(found: str, least: str, older: bool) -> None:
    assert machine.older(found, least) is older


def test_a_missing_package_comes_with_the_command_that_installs_it() -> None:
    have: dict[str, str | None] = dict.fromkeys(machine.LEAST, "99")
    status, found, step, *_ = machine.versions({**have, "ipyparallel": None, "pyzmq": "25.1"})
    assert status == "fail"
    assert "ipyparallel is missing" in found
    assert "pyzmq 25.1 < 26" in found
    assert "'ipyparallel>=8.8'" in step


def test_a_framework_is_needed_and_a_new_enough_one() -> None:
    assert machine.frameworks({"torch": None, "tensorflow": None})[0] == "fail"
    assert machine.frameworks({"torch": "2.5.1", "tensorflow": None})[0] == "fail"
    assert machine.frameworks({"torch": "2.13", "tensorflow": None})[0] == "ok"


def test_little_of_something_is_a_warning_with_a_next_step() -> None:
    for found in (
        machine.memory(4 << 30, 1 << 30), machine.open_files(256), machine.tasks(100),
        machine.clock("hpet"),
    ):  # fmt: skip
        assert found[0] == "warn", found
        assert found[2]


def test_no_limit_is_said_in_words() -> None:
    assert machine.tasks(-1)[1] == "any number at most"
    assert machine.open_files(resource.RLIM_INFINITY)[0] == "ok"


def test_a_containers_memory_is_its_limit(tmp_path: Path) -> None:
    assert machine._cgroup_memory(tmp_path) == (None, None)
    (tmp_path / "memory.max").write_text("max")
    assert machine._cgroup_memory(tmp_path) == (None, None)
    (tmp_path / "memory.max").write_text("1000")
    (tmp_path / "memory.current").write_text("300")
    assert machine._cgroup_memory(tmp_path) == (1000, 700)


def test_shared_memory_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    status, _, step, *_ = machine.shm(tmp_path / "none")
    assert (status, bool(step)) == ("fail", True)
    assert machine.shm(tmp_path)[0] in ("ok", "warn")


def test_a_temporary_folder_needs_room_for_the_names_of_sockets(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    status, found, step, *_ = machine.temporary(long)
    assert (status, "too long" in found) == ("fail", True)
    assert "TMPDIR" in step
    assert machine.temporary(tmp_path / "none")[0] == "fail"


def test_widgets_are_found_by_their_extensions(tmp_path: Path) -> None:
    assert machine.widgets([tmp_path])[0] in ("warn", "unknown")
    for name in machine.MANAGERS:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "package.json").write_text('{"version": "1.2.3"}')
    status, found, *_ = machine.widgets([tmp_path])
    assert (status, found.count("1.2.3")) == ("ok", 2)


# -- GPUs, made up ---------------------------------------------------------------------------------


class NvmlError(Exception):
    pass


class FakeNvml:
    """Two GPUs, of which the second is lost; what is not known of every GPU is not known here."""

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.95"

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return 13010

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index == 1:
            raise NvmlError("GPU is lost")
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA H100"

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return "GPU-aaaa"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=80 << 30, used=1 << 30)

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return 9, 0


class NoDriver:
    def nvmlInit(self) -> None:  # noqa: N802
        raise NvmlError("Driver/library version mismatch")


def facts(library: Any, tmp_path: Path) -> dict[str, Any]:
    said = tmp_path / "lines.jsonl"
    (tmp_path / "nvidia0").touch()
    probes.nvml(children.Child("nvml", said, {}), library, tmp_path)
    (line,), garbage = children.read(said)
    assert not garbage
    return dict(line.figures)


def judged(nvml: dict[str, Any], **more: Any) -> dict[str, Line]:
    return {line.id: line for line in gpus.judge({"nvml": nvml, **more}, {})}


def test_a_lost_gpu_does_not_hide_the_others(tmp_path: Path) -> None:
    nvml = facts(FakeNvml(), tmp_path)
    assert nvml["driver"] == "580.95"
    assert nvml["cuda_driver"] == [13, 1]
    first, second = nvml["gpus"]
    assert (first["uuid"], first["mode"], first["mig"], first["capability"]) == (
        "GPU-aaaa", 3, 0, [9, 0]
    )  # fmt: skip
    assert second["error"] == "GPU is lost"
    found = judged(nvml)
    assert found["gpu.health"].status == "fail"
    assert "GPU 1: GPU is lost" in found["gpu.health"].found
    assert (found["gpu.mode"].status, "EXCLUSIVE_PROCESS" in found["gpu.mode"].found) == (
        "warn",
        True,
    )


def test_a_driver_that_does_not_fit_its_library_is_a_failure(tmp_path: Path) -> None:
    found = judged(facts(NoDriver(), tmp_path))
    assert found["gpu.driver"].status == "fail"
    assert "version mismatch" in found["gpu.driver"].found
    assert found["gpu.order"].status == "unknown"


def test_without_a_gpu_each_gpu_check_says_that_it_cannot_be_made() -> None:
    found = judged({"error": "NVML Shared Library Not Found", "device_files": []})
    assert {line.status for id, line in found.items() if id != "gpu.auto"} == {"unknown"}
    assert found["gpu.auto"].found.startswith("1 worker: cpu (gloo)")


@pytest.mark.parametrize(
    ("driver", "build", "status", "word"),
    [
        ([13, 0], {"version": "2.13+cpu", "cuda": None}, "fail", "without CUDA"),
        ([12, 8], {"version": "2.13", "cuda": "13.0", "archs": ["sm_90"]}, "fail", "12.8"),
        ([13, 0], {"version": "2.13", "cuda": "13.0", "archs": ["sm_90"]}, "ok", "13.0"),
        ([12, 2], {"version": "2.13", "cuda": "12.6", "archs": ["sm_90"]}, "ok", "major"),
        ([13, 0], {"version": "2.13", "cuda": "13.0", "archs": ["sm_70"]}, "fail", "sm_90"),
    ],
)
def test_a_wheel_must_fit_the_driver_and_the_gpu(
    driver: list[int], build: dict[str, Any], status: str, word: str
) -> None:
    gpu = {"name": "H100", "capability": [9, 0]}
    got, found, step = gpus.runtime({"cuda_driver": driver}, build, [gpu])
    assert got == status
    assert word in found
    assert bool(step) == (status == "fail")


@pytest.mark.parametrize(
    ("capability", "archs", "fits"),
    [
        ([8, 6], ["sm_80"], True), ([8, 0], ["sm_86"], False), ([9, 0], ["sm_80"], False),
        ([9, 0], ["sm_80", "compute_80"], True), ([9, 0], ["sm_90a"], True),
        ([9, 1], ["sm_90a"], False), ([12, 0], ["sm_120"], True), ([10, 0], ["compute_120"], False),
    ],
)  # fmt: skip
def test_code_runs_on_its_own_and_newer_gpus_of_a_generation(
    capability: list[int], archs: list[str], fits: bool
) -> None:
    assert gpus.fits(capability, archs) is fits


def test_another_order_than_torchs_is_a_warning() -> None:
    two = [{"uuid": "GPU-AA"}, {"uuid": "GPU-BB"}]
    assert gpus.order(two, {"gpus": [{"uuid": "aa"}, {"uuid": "bb"}]}, {})[0] == "ok"
    status, found, step = gpus.order(two, {"gpus": [{"uuid": "bb"}, {"uuid": "aa"}]}, {})
    assert (status, "[1, 0]" in found, "CUDA_DEVICE_ORDER" in step) == ("warn", True, True)
    assert gpus.order(two, {"gpus": [{"uuid": "cc"}]}, {})[0] == "warn"


def test_errors_of_memory_and_xid_are_told() -> None:
    assert gpus.health([{"index": 0, "ecc": 3}], [])[0] == "fail"
    assert gpus.health([{"index": 0}], ["NVRM: Xid (PCI:0000): 79, GPU has fallen"])[0] == "warn"
    assert gpus.health([{"index": 0, "ecc": 0}], [])[0] == "ok"


def test_mig_modes_and_pids_are_told() -> None:
    assert gpus.mig([{"index": 0, "mig": 1}])[0] == "warn"
    assert gpus.mode([{"index": 0, "mode": 2}])[0] == "fail"
    assert gpus.pids({"sees_own_pid": False})[0] == "warn"
    assert gpus.pids({})[0] == "unknown"


def test_a_hidden_gpu_is_told() -> None:
    assert gpus.visible([{"index": 0}], {}, {"CUDA_VISIBLE_DEVICES": ""})[0] == "warn"


def ended(**about: Any) -> children.Ended:
    usual = {"status": 0, "seconds": 1.0, "late": False, "lines": [], "garbage": False, "tail": ""}
    return children.Ended(**{**usual, **about})


PROBE = gpus.Probe("cuda", 25, {"gpu.matmul": "products", "gpu.p2p": "copies"}, 1)


@pytest.mark.parametrize(
    ("how", "status", "word"),
    [
        (ended(late=True, status=-9), "fail", "hangs"),
        (ended(status=-11, tail="Segmentation fault"), "fail", "Segmentation"),
        (ended(), "unknown", "nothing"),
        (None, "unknown", "no GPU here"),
    ],
)
def test_a_child_that_does_not_say_a_line_gets_one(
    how: children.Ended | None, status: str, word: str
) -> None:
    found = gpus._said(PROBE, how, 0)
    assert {line.id for line in found} == {"gpu.matmul", "gpu.p2p"}
    assert {line.status for line in found} == {status}
    assert word in found[0].found


def test_what_was_said_before_a_hang_stays() -> None:
    said = Line("gpu.matmul", "ok", "products", "right")
    found = gpus._said(PROBE, ended(late=True, status=-9, lines=[said]), 1)
    assert found[0] is said
    assert (found[1].id, found[1].status) == ("gpu.p2p", "fail")


# -- other hosts -----------------------------------------------------------------------------------


def local(name: str) -> hosts.Host:
    pipe = subprocess.PIPE
    command = [sys.executable, "-u", "-c", hosts.BOOT]
    if name == "refuses":
        command = ["sh", "-c", "echo 'Permission denied (publickey).' >&2; exit 255"]
    if name == "sleeps":
        command = ["sleep", "60"]
    return hosts.Host(name, subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe))


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(hosts.SHARED_VARIABLE, str(tmp_path))
    return tmp_path


def test_a_host_is_asked_both_ways(shared: Path) -> None:
    found = {line.id: line for line in hosts.look(["localhost"], local)}
    for id in ("ssh", "versions", "user", "disk", "shared", "clock"):
        assert found[f"host.localhost.{id}"].status in ("ok", "warn"), found
    for id in ("host.this_machine.to.localhost", "host.localhost.to.this_machine"):
        assert found[id].status == "ok", found[id]
    assert abs(found["host.localhost.clock"].figures["offset_s"]) < 1
    assert found["hosts.listen"].status == "ok"
    assert "127.0.0.1 (lo)" in found["hosts.listen"].found
    assert "127.0.0.1 (lo) on localhost" in found["hosts.engines"].found
    for id in ("hosts.listen", "hosts.engines", "hosts.encrypted", "hosts.open"):
        assert "docs/security.md" in found[id].next_step
    assert "same machine" in found["host.this_machine.and.localhost"].found
    assert list(shared.iterdir()) == []  # the token is gone


def test_the_way_back_is_tried_on_a_port_that_the_notebook_may_take(shared: Path) -> None:
    found = {one.id: one for one in hosts.look(["localhost"], local, ports="23400-23420")}
    assert "23400-23420, " in found["hosts.listen"].found
    assert "within 23400-23420" in found["hosts.engines"].found
    assert found["host.localhost.to.this_machine"].found.startswith("127.0.0.1:234")
    assert not found["host.this_machine.to.localhost"].found.startswith("127.0.0.1:234")


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"ports": "20000-20003"}, "WB-PLAN-173"),
        ({"ports": "many"}, "WB-PLAN-172"),
        ({"listen": "0.0.0.0"}, "WB-PLAN-163"),
        ({"listen": "192.0.2.7"}, "WB-PLAN-164"),
    ],
)
def test_where_the_notebook_cannot_listen_is_told_with_the_next_step(
    shared: Path, asked: dict[str, str], code: str
) -> None:
    found = {one.id: one for one in hosts.look(["localhost"], local, **asked)}
    assert found["hosts.listen"].status == "fail"
    assert code in found["hosts.listen"].found
    assert found["hosts.listen"].next_step
    assert found["host.localhost.clock"].status == "ok"


def test_ports_that_are_taken_are_told(shared: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 23407))
    with taken:
        found = {one.id: one for one in hosts.look(["localhost"], local, ports="23400-23415")}
    assert found["hosts.listen"].status == "fail"
    assert found["hosts.listen"].figures["free_ports"] == 15
    assert "wider range" in found["hosts.listen"].next_step


def test_a_host_that_refuses_or_sleeps_costs_its_own_lines(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "CONNECT_S", 0.5)
    monkeypatch.setattr(hosts, "ANSWER_S", 0.5)
    found = {line.id: line for line in hosts.look(["refuses", "sleeps", "localhost"], local)}
    assert found["host.refuses.ssh"].status == "fail"
    assert "Permission denied" in found["host.refuses.ssh"].found
    assert "no answer" in found["host.sleeps.ssh"].found
    assert found["host.localhost.ssh"].status == "ok"


def facts_of(**about: Any) -> hosts.Host:
    usual = {"boot_id": "b", "net": "n", "hostname": "vm", "uid": 0, "python": "3.12.1",
             "versions": {"torch": "2.13"}, "executable": "/usr/bin/python3"}  # fmt: skip
    return hosts.Host("a", None, {**usual, **about})  # type: ignore[arg-type]


def test_other_versions_users_and_equal_names_are_told() -> None:
    here = facts_of()
    assert hosts._versions(here, facts_of(versions={"torch": "2.12"}))[0] == "fail"
    assert hosts._versions(here, facts_of(python="3.11.0"))[0] == "fail"
    assert hosts._versions(here, facts_of(python="3.12.9"))[0] == "ok"
    assert hosts._user(here, facts_of(uid=1000))[0] == "warn"
    (twins,) = hosts._twins([here, facts_of(boot_id="other", net="other")])
    assert (twins.status, "vm" in twins.found) == ("warn", True)
    (containers,) = hosts._twins([here, facts_of(net="other", hostname="two")])
    assert (containers.status, "containers" in containers.found) == ("ok", True)


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b"])
def test_a_name_that_would_be_an_option_of_ssh_is_refused(name: str) -> None:
    with pytest.raises(hosts.HostError, match="not the name of a host"):
        hosts.start(name)


def test_ssh_never_asks_for_a_password() -> None:
    words = hosts.command_for("user@node")
    assert "BatchMode=yes" in words
    assert words[words.index("--") + 1] == "user@node"


# -- the command and the notebook ------------------------------------------------------------------


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "look", lambda: lines("ok", "warn"))
    monkeypatch.setattr(machine, "look", lambda: lines("unknown"))


@pytest.mark.usefixtures("no_children")
def test_json_is_one_document_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run_alone(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "doctor"


@pytest.mark.usefixtures("no_children")
def test_a_notebook_has_the_report_as_a_table() -> None:
    report = wb.doctor()
    assert report.to_dict()["counts"]["warn"] == 1
    assert "<table" in report._repr_mimebundle_()["text/html"]


def test_a_stage_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run_alone(["--gpu-test", "--on-cpu", "--only", "nonsense"]) == 2
    assert "named nonsense" in capsys.readouterr().err


def bare(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a Python that has no packages at all."""
    return subprocess.run(
        [sys.executable, "-S", "-m", "workbench", *words], capture_output=True, text=True,
        timeout=60, check=False, env={"PYTHONPATH": str(ROOT)}, cwd=ROOT,
    )  # fmt: skip


def test_a_checkout_without_packages_is_told_which_are_missing() -> None:
    said = json.loads(bare("doctor", "--json").stdout)
    found = {line["id"]: line for line in said["lines"]}
    assert "ipyparallel is missing" in found["machine.versions"]["found"]
    assert "torch" in found["machine.cluster"]["found"]
    assert re.search("psutil .*`python -m workbench doctor`", bare("ps").stderr)
