"""This machine, Slurm and ssh, by stand-ins for their clients; and what all platforms share."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.clients import ONE, Clients, folder_with, handed_out, small_job

from workbench.errors import ClusterError, PlanError
from workbench.jobs.platforms import (
    PLATFORMS,
    JobState,
    Platform,
    Ticket,
    client,
    machines,
    platform,
)
from workbench.jobs.platforms.machines import pack

WAIT_S = 30.0


clients = pytest.fixture(handed_out)


def over(one: Platform, ticket: Ticket) -> JobState:
    """How a job ends."""
    end = time.monotonic() + WAIT_S
    while not (now := one.state(ticket)).is_over:
        assert time.monotonic() < end, now
        time.sleep(0.02)
    return now


def begun(path: Path) -> None:
    """Wait until a job has written a file."""
    end = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def steps_of(folder: Path, rows: bytes = b"row", number: int = 1) -> Path:
    """A run folder with records."""
    run = folder / "runs" / str(number)
    run.mkdir(parents=True)
    (run / "records-rank0.bin").write_bytes(rows)
    return run


# -- what all have in common -----------------------------------------------------------------------


def test_platforms_are_found_by_name_and_know_their_options() -> None:
    assert set(PLATFORMS) == {"local", "slurm", "ssh", "ray", "kubernetes", "skypilot"}
    assert platform("slurm", venv="/shared/venv").envelope == "slurm"
    assert platform("kubernetes").envelope == "trainjob"
    with pytest.raises(PlanError, match="WB-PLAN-037") as told:
        platform("slrum")
    assert "slurm" in str(told.value)
    with pytest.raises(PlanError) as told:
        platform("ray", adress="x")
    assert told.value.code == "WB-PLAN-243"


def test_a_ticket_goes_through_json() -> None:
    ticket = Ticket("slurm", "17", "/shared/job", 12.5, {"runs_before": "2"})
    assert Ticket.from_wire(json.loads(json.dumps(ticket.to_wire()))) == ticket


@pytest.mark.parametrize(
    "change",
    [
        {"id": "-rf"},
        {"id": ""},
        {"id": "a b"},
        {"extra": [1]},
        {"submitted_s": "soon"},
        {},
    ],
)
def test_what_is_no_ticket_is_refused(change: dict[str, Any]) -> None:
    wire = Ticket("slurm", "17", "/shared/job", 1.0).to_wire() | change
    if not change:
        del wire["folder"]
    with pytest.raises(ValueError, match=r"ticket|float"):
        Ticket.from_wire(wire)


@pytest.mark.parametrize(
    ("on", "file"),
    [("slurm", "job.sbatch"), ("ssh", "start.sh"), ("ray", "run_ray.py"),
     ("kubernetes", "trainjob.yaml"), ("skypilot", "sky.yaml")],
)  # fmt: skip
def test_a_client_that_is_not_installed_is_named_with_what_to_install(
    on: str, file: str, tmp_path: Path, clients: Clients
) -> None:
    clients.only()
    folder = folder_with(tmp_path, file, "ray-env.yaml")
    with pytest.raises(ClusterError) as told:
        platform(on).check(folder, replace(ONE, hosts=("node1",)))
    assert told.value.code == "WB-CLUSTER-082"
    assert told.value.next_step


@pytest.mark.parametrize("on", ["slurm", "ssh", "ray", "kubernetes", "skypilot"])
def test_a_folder_without_the_platforms_file_is_refused(
    on: str, tmp_path: Path, clients: Clients
) -> None:
    with pytest.raises(PlanError) as told:
        platform(on).check(folder_with(tmp_path), replace(ONE, hosts=("node1",)))
    assert told.value.code == "WB-PLAN-241"
    assert clients.calls == []


@pytest.mark.parametrize("on", sorted(PLATFORMS))
def test_what_is_no_job_folder_is_refused(on: str, tmp_path: Path, clients: Clients) -> None:
    with pytest.raises(PlanError):
        platform(on).check(tmp_path, ONE)
    assert clients.calls == []


def test_a_client_that_says_nothing_is_ended_with_what_it_started(
    tmp_path: Path, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ASK_S", 0.3)
    clients.does("squeue", "*", f"sleep 60 & echo $! > {tmp_path}/pid; wait")
    with pytest.raises(ClusterError) as told:
        platform("slurm").state(Ticket("slurm", "17", str(tmp_path), 0.0))
    assert told.value.code == "WB-CLUSTER-083"
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + WAIT_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end


def test_output_is_shown_without_records_and_without_what_a_terminal_obeys() -> None:
    text = 'a\x1b[31mred\x1b[0m\x07\r\n#wb1 {"f":"alive"}\n[0]: #wb1 {"f":"x"}\nlast\x00\n'
    assert client.last_lines(text, 10) == "ared\nlast"
    assert client.last_lines(text, 1) == "last"
    assert client.last_lines(text, 0) == ""


# -- this machine ----------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> Iterator[list[Ticket]]:
    """Hold tickets of jobs that are ended after the test."""
    tickets: list[Ticket] = []
    yield tickets
    for ticket in tickets:
        platform("local").cancel(ticket)


def test_a_job_of_this_machine_ends_with_its_exit_code_and_log(
    tmp_path: Path, here: list[Ticket]
) -> None:
    one, folder = platform("local"), small_job(tmp_path / "job", "print('hello')\n")
    one.check(folder, ONE)
    ticket = one.submit(folder, ONE)
    here.append(ticket)
    assert over(one, ticket).state == "finished"
    assert one.logs(ticket) == "hello"
    assert one.place(ticket) == str(folder)
    one.cancel(ticket)
    assert one.state(ticket).state == "finished"


def test_a_job_that_fails_says_how_and_whether_it_took_a_step(
    tmp_path: Path, here: list[Ticket]
) -> None:
    early = small_job(tmp_path / "early", "raise SystemExit('no data')\n")
    steps_of(early)  # of a run before
    late = small_job(
        tmp_path / "late",
        "import os, signal\nos.makedirs('runs/1')\nopen('runs/1/records-rank0.bin', 'w').write('x')"
        "\nos.kill(os.getpid(), signal.SIGKILL)\n",
    )
    one = platform("local")
    for folder, reason, stepped in ((early, "exit code 1", False), (late, "SIGKILL", True)):
        ticket = one.submit(folder, ONE)
        here.append(ticket)
        end = over(one, ticket)
        assert (end.state, end.reason, end.stepped) == ("failed", reason, stepped)
    assert one.logs(here[0]) == "no data"


STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(9)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                         start_new_session=True)
child.stdout.readline()
pathlib.Path("begun").write_text(str(child.pid))
time.sleep(99)
"""


def test_cancel_ends_all_that_a_job_started_also_what_heeds_no_signal(
    tmp_path: Path, here: list[Ticket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.jobs.platforms.machines.END_S", 0.3)
    one, folder = platform("local"), small_job(tmp_path / "job", STUBBORN)
    ticket = one.submit(folder, ONE)
    here.append(ticket)
    begun(folder / "begun")
    running = one.state(ticket)
    assert running.state == "running"
    assert running.began_s == pytest.approx(time.time(), abs=60)
    one.cancel(ticket)
    assert one.state(ticket).state == "cancelled"
    child = int((folder / "begun").read_text() or 0)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_process_that_was_killed_is_no_running_job_nor_is_anothers_of_its_pid(
    tmp_path: Path, here: list[Ticket]
) -> None:
    one = platform("local")
    folder = small_job(tmp_path / "job", "import time\nopen('begun', 'w')\ntime.sleep(99)\n")
    ticket = one.submit(folder, ONE)
    here.append(ticket)
    begun(folder / "begun")
    other = replace(ticket, extra={**ticket.extra, "began": repr(time.time() - 1e6)})
    assert one.state(other).state == "failed"
    one.cancel(other)
    assert one.state(ticket).state == "running"
    (child,) = psutil.Process(int(ticket.id)).children()
    os.kill(int(ticket.id), signal.SIGKILL)
    child.kill()
    assert over(one, ticket).state == "failed"
    elsewhere = replace(ticket, extra={**ticket.extra, "host": "another"})
    assert one.state(elsewhere).gone


def test_this_machine_is_one_node_with_the_gpus_that_it_has(tmp_path: Path) -> None:
    folder = small_job(tmp_path / "job")
    for resources, code in (
        (replace(ONE, nodes=2), "WB-CLUSTER-085"),
        (replace(ONE, gpus_per_node=1000), "WB-CLUSTER-095"),
    ):
        with pytest.raises(ClusterError) as told:
            platform("local").check(folder, resources)
        assert told.value.code == code


# -- Slurm -----------------------------------------------------------------------------------------

SINFO = (
    "small*|2|4|gpu:2(S:0-1)|1-00:00:00\n"
    "small*|1|64+|gpu:a100:8,nvme:1|1-00:00:00\n"
    "tiny|2|4|(null)|1:00\n"
    "long|1|8|(null)|infinite\n"
)


@pytest.fixture
def slurm(clients: Clients) -> Clients:
    """Hand out a Slurm with partitions."""
    clients.says("sinfo", "*", SINFO)
    clients.says("sbatch", "--test-only job.sbatch", err="sbatch: Job 5 to start at 2026-01-01\n")
    clients.says("sbatch", "--parsable job.sbatch*", "17;cluster1\n")
    clients.says("scontrol", "*", "")
    clients.says("sacct", "*", "", "Slurm accounting storage is disabled\n", 1)
    return clients


def in_slurm(folder: Path) -> Ticket:
    return Ticket("slurm", "17", str(folder), 0.0, {"runs_before": "0"})


@pytest.mark.parametrize(
    "asked",
    [
        {"nodes": 3, "gpus_per_node": 2},
        {"nodes": 1, "gpus_per_node": 8, "time_s": 86400.0},
        {"partition": "tiny", "time_s": 60.0},
        {"partition": "long", "time_s": 1e9, "cpus_per_worker": 8},
    ],
)
def test_what_a_partition_has_may_be_asked_for(
    asked: dict[str, Any], tmp_path: Path, slurm: Clients
) -> None:
    platform("slurm").check(folder_with(tmp_path, "job.sbatch"), replace(ONE, **asked))
    assert slurm.calls[-1] == "sbatch --test-only job.sbatch"


@pytest.mark.parametrize(
    "asked",
    [
        {"nodes": 4},
        {"nodes": 2, "gpus_per_node": 8},
        {"partition": "tiny", "time_s": 61.0},
        {"partition": "tiny", "gpus_per_node": 1},
        {"partition": "long", "cpus_per_worker": 9},
    ],
)
def test_what_a_partition_lacks_is_said_with_what_it_has(
    asked: dict[str, Any], tmp_path: Path, slurm: Clients
) -> None:
    with pytest.raises(ClusterError) as told:
        platform("slurm").check(folder_with(tmp_path, "job.sbatch"), replace(ONE, **asked))
    assert told.value.code == "WB-CLUSTER-087"
    assert any(number in str(told.value) for number in ("per node: 4", "per node: 8"))
    assert not [call for call in slurm.calls if call.startswith("sbatch")]


def test_an_unknown_partition_is_named_with_those_that_there_are(
    tmp_path: Path, slurm: Clients
) -> None:
    with pytest.raises(ClusterError) as told:
        platform("slurm").check(
            folder_with(tmp_path, "job.sbatch"), replace(ONE, partition="large")
        )
    assert told.value.code == "WB-CLUSTER-086"
    assert told.value.allowed == "long, small, tiny"


def test_slurms_own_refusal_is_said_in_its_words(tmp_path: Path, slurm: Clients) -> None:
    words = "sbatch: error: Batch job submission failed: Invalid account\n"
    slurm.says("sbatch", "--test-only*", err=words, code=1)
    slurm.says("sbatch", "--parsable*", err=words, code=1)
    one, folder = platform("slurm"), folder_with(tmp_path, "job.sbatch")
    for call in (one.check, one.submit):
        with pytest.raises(ClusterError) as told:
            call(folder, ONE)
        assert told.value.code == "WB-CLUSTER-084"
        assert "Invalid account" in str(told.value)


def test_a_job_is_submitted_in_its_folder_and_outside_of_the_kernels_allocation(
    tmp_path: Path, slurm: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "9")
    folder = folder_with(tmp_path, "job.sbatch")
    steps_of(folder, number=4)
    slurm.does("sbatch", "--parsable*", f'pwd > {tmp_path}/pwd; echo "17$SLURM_NTASKS;cluster1"')
    ticket = platform("slurm", venv="/shared/venv").submit(folder, ONE)
    assert (ticket.id, ticket.extra) == ("17", {"runs_before": "4"})
    assert (tmp_path / "pwd").read_text().strip() == str(folder)
    assert slurm.calls[-1] == "sbatch --parsable job.sbatch --venv /shared/venv"


def test_a_platform_that_gives_no_id_is_said_so(tmp_path: Path, slurm: Clients) -> None:
    slurm.says("sbatch", "--parsable*", "\n")
    with pytest.raises(ClusterError) as told:
        platform("slurm").submit(folder_with(tmp_path, "job.sbatch"), ONE)
    assert told.value.code == "WB-CLUSTER-090"


@pytest.mark.parametrize(
    ("line", "state", "reason"),
    [
        ("PENDING|Resources|N/A\n", "pending", "PENDING (Resources)"),
        ("PENDING|Priority|2026-01-01T10:00:00\n", "pending",
         "PENDING (Priority), expected to begin 2026-01-01T10:00:00"),
        ("CONFIGURING|None|2026-01-01T10:00:00\n", "pending",
         "CONFIGURING, expected to begin 2026-01-01T10:00:00"),
        ("RUNNING|None|2026-01-01T10:00:00\n", "running", "RUNNING"),
        ("COMPLETING|None|2026-01-01T10:00:00\n", "running", "COMPLETING"),
        ("COMPLETED|None|2026-01-01T10:00:00\n", "finished", "COMPLETED"),
        ("TIMEOUT|TimeLimit|2026-01-01T10:00:00\n", "failed", "TIMEOUT (TimeLimit)"),
        ("FAILED|NonZeroExitCode|2026-01-01T10:00:00\n", "failed",
         "FAILED (NonZeroExitCode), exit code 3:0"),
        ("CANCELLED|None|N/A\n", "cancelled", "CANCELLED"),
    ],
)  # fmt: skip
def test_slurms_queue_is_read(
    line: str, state: str, reason: str, tmp_path: Path, slurm: Clients
) -> None:
    slurm.says("squeue", "*--jobs=17*", line)
    code = "3:0" if "FAILED" in line else "0:0"
    slurm.says("scontrol", "show job 17*", f"JobId=17 JobState=X ExitCode={code} StdOut=/x\n")
    now = platform("slurm").state(in_slurm(tmp_path))
    assert (now.state, now.reason) == (state, reason)
    assert (now.began_s is not None) == ("2026" in line and state != "pending")
    assert now.stepped is (False if state == "failed" else None)


def test_a_job_that_left_the_queue_is_looked_for_in_the_accounts(
    tmp_path: Path, slurm: Clients
) -> None:
    slurm.says("squeue", "*", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    slurm.says("sacct", "*-j 17*", "CANCELLED by 1000|2026-01-01T10:00:00\n")
    assert platform("slurm").state(in_slurm(tmp_path)).state == "cancelled"


def test_a_job_that_slurm_forgot_is_as_its_run_says_else_gone(
    tmp_path: Path, slurm: Clients
) -> None:
    one, ticket = platform("slurm"), in_slurm(tmp_path)
    slurm.says("squeue", "*", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    now = one.state(ticket)
    assert (now.state, now.gone) == ("unknown", True)
    run = steps_of(tmp_path)
    for told, state in (("finished", "finished"), ("stopped", "finished"), ("failed", "failed")):
        (run / "run.json").write_text(json.dumps({"state": told}))
        now = one.state(ticket)
        assert (now.state, now.stepped) == (state, True if state == "failed" else None)
    assert one.place(ticket) == str(run)
    assert one.place(replace(ticket, extra={"runs_before": "1"})) == str(tmp_path)
    for told in ("{", "[]", '{"state": "running"}'):
        (run / "run.json").write_text(told)
        assert one.state(ticket).gone


def test_a_controller_that_is_down_is_no_end_of_a_job(tmp_path: Path, slurm: Clients) -> None:
    words = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    slurm.says("squeue", "*", err=words, code=1)
    with pytest.raises(ClusterError) as told:
        platform("slurm").state(in_slurm(tmp_path))
    assert told.value.code == "WB-CLUSTER-088"
    assert "Unable to contact" in str(told.value)


def test_slurms_log_is_the_jobs_file_wherever_it_is(tmp_path: Path, slurm: Clients) -> None:
    one, ticket = platform("slurm"), in_slurm(tmp_path)
    assert one.logs(ticket) == ""
    (tmp_path / "elsewhere").write_text("there\n")
    slurm.says("scontrol", "*", f"JobId=17 StdOut={tmp_path}/elsewhere Power=\n")
    assert one.logs(ticket) == "there"
    (tmp_path / "slurm-17.out").write_text("".join(f"line {k}\n" for k in range(300)))
    assert one.logs(ticket, 2) == "line 298\nline 299"
    assert len(one.logs(ticket).splitlines()) == 200


def test_scancel_of_a_job_that_is_gone_is_no_error_but_a_refusal_is(
    tmp_path: Path, slurm: Clients
) -> None:
    one, ticket = platform("slurm"), in_slurm(tmp_path)
    slurm.says("scancel", "17", err="scancel: error: Kill job error on job id 17: Invalid job id "
               "specified\n", code=1)  # fmt: skip
    one.cancel(ticket)
    slurm.says("scancel", "17", err="scancel: error: Access/permission denied\n", code=1)
    with pytest.raises(ClusterError) as told:
        one.cancel(ticket)
    assert told.value.code == "WB-CLUSTER-089"


# -- ssh -------------------------------------------------------------------------------------------

SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
host=${2#*@}; home=@HOMES/$host
[ -d "$home" ] || { echo "ssh: Could not resolve hostname $host" >&2; exit 255; }
shift 2
cd "$home" && HOME=$home exec sh -c "$*"
"""


@pytest.fixture
def homes(tmp_path: Path, clients: Clients) -> Path:
    """Hand out the home folders of two hosts, which are this machine."""
    folder = tmp_path / "homes with 'quotes'"
    for host in ("node1", "node2"):
        (folder / host).mkdir(parents=True)
    clients.script("ssh", SSH.replace("@HOMES", shlex.quote(str(folder))))
    return folder


def ssh_job(where: Path, start: str) -> Path:
    """A folder whose start.sh says this."""
    folder = folder_with(where)
    (folder / "start.sh").write_text(start)
    return folder


TWO = replace(ONE, nodes=2, hosts=("me@node1", "node2"))


def test_a_job_over_ssh_is_copied_without_runs_and_names_and_starts_on_each_host(
    tmp_path: Path, homes: Path
) -> None:
    one = platform("ssh", venv="/there/it's venv")
    folder = ssh_job(tmp_path, 'echo "$@" "$HOSTS"; echo "$WORKBENCH_JOB_KEY" > key\n')
    steps_of(folder)
    one.check(folder, TWO)
    ticket = one.submit(folder, TWO)
    assert over(one, ticket).state == "finished"
    assert one.logs(ticket) == "--node 0 --first node1 --venv /there/it's venv node1,node2"
    there = [homes / host / "workbench-jobs/digits" for host in ("node1", "node2")]
    begun(there[1] / ".job-1.exit")
    keys = {(one / "key").read_text() for one in there}
    assert len(keys) == 1
    assert len(keys.pop()) == 33
    assert not (there[0] / "runs").exists()
    assert (there[0] / "run.json").exists()
    assert one.place(ticket) == f"ssh://me@node1{there[0]}"


def test_a_tar_of_a_folder_names_no_user(tmp_path: Path) -> None:
    with (tmp_path / "x.tar").open("w+b") as file:
        pack(folder_with(tmp_path), file)
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            for one in archive:
                assert (one.uname, one.gname, one.uid, one.gid) == ("", "", 0, 0)


def test_a_job_over_ssh_that_fails_says_its_code_and_whether_it_took_a_step(
    tmp_path: Path, homes: Path
) -> None:
    one, alone = platform("ssh"), replace(ONE, hosts=("node1",))
    folder = ssh_job(tmp_path, "echo gone wrong >&2; exit 3\n")
    ticket = one.submit(folder, alone)
    end = over(one, ticket)
    assert (end.state, end.reason, end.stepped) == ("failed", "exit code 3 on node1", False)
    assert one.logs(ticket) == "gone wrong"
    (folder / "start.sh").write_text("mkdir -p runs/2; echo x > runs/2/records-rank0.bin; exit 3\n")
    assert over(one, one.submit(folder, alone)).stepped is True
    (folder / "start.sh").write_text("exit 3\n")
    assert over(one, one.submit(folder, alone)).stepped is False


@pytest.mark.parametrize("tells", ["/proc", "ps"])
def test_a_job_over_ssh_is_cancelled_with_what_it_started_and_stands_alone(
    tells: str, tmp_path: Path, homes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # ps cuts its lines there
    if tells == "ps":
        if shutil.which("ps") is None:
            pytest.skip("no ps here")
        for name in ("_COPY", "_LOOK", "_END"):
            text = getattr(machines, name).replace("/proc/self", "/no/proc")
            monkeypatch.setattr(machines, name, text)
    one, alone = platform("ssh"), replace(ONE, hosts=("node1",))
    folder = ssh_job(tmp_path, "setsid sleep 99 & echo $! > begun; wait\n")
    ticket = one.submit(folder, alone)
    there = homes / "node1/workbench-jobs/digits"
    begun(there / "begun")
    assert one.state(ticket).state == "running"
    with pytest.raises(ClusterError) as told:
        one.submit(folder, alone)
    assert told.value.code == "WB-CLUSTER-092"
    one.cancel(ticket)
    assert one.state(ticket).state == "cancelled"
    child = int((there / "begun").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    one.cancel(ticket)


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path, homes: Path) -> None:
    one, folder = platform("ssh"), ssh_job(tmp_path, "true\n")
    with pytest.raises(ClusterError) as told:
        one.check(folder, replace(ONE, hosts=("node7",)))
    assert told.value.code == "WB-CLUSTER-091"
    assert "Could not resolve" in str(told.value)
    with pytest.raises(PlanError) as missing:
        one.check(folder, ONE)
    assert missing.value.code == "WB-PLAN-242"


def test_a_folder_that_is_gone_over_there_is_said_so(tmp_path: Path, homes: Path) -> None:
    extra = {"hosts": "node1", "dir": "/not/there", "there": "x", "pids": "1", "runs_before": "0"}
    now = platform("ssh").state(Ticket("ssh", "wb-1", str(tmp_path), 0.0, extra))
    assert (now.state, now.gone) == ("unknown", True)
