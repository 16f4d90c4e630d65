"""What is asked of a launcher, by line, arguments and files; checked before anything starts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import workbench as wb
from workbench.cluster.hosts import configuration
from workbench.cluster.hosts.configuration import differences, installed, launch_settings
from workbench.cluster.hosts.settings import HostSlots, LaunchSettings
from workbench.errors import PlanError
from workbench.notebook import session as state
from workbench.notebook.session import Session
from workbench.shared.magic_args import parse_cluster_line


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No files of this machine are read, and all programs are installed."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("ssh", "sbatch", "srun", "mpiexec"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(configuration, "SITE_FILE", tmp_path / "site.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    for name in ("WORKBENCH_LAUNCHERS", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home" / "workbench").mkdir(parents=True)
    return tmp_path


def of_line(line: str, engines: int = 4) -> LaunchSettings:
    """Read a `%cluster start` line's flags."""
    launch: Any = parse_cluster_line(f"start {engines} {line}").launch
    return launch_settings(engines, **launch)


# -- what is understood ----------------------------------------------------------------------------


def test_a_line_and_arguments_say_the_same() -> None:
    line = (
        "--launcher slurm --nodes 2 --gpus-per-node 4 --time 1:00:00 --partition gpu --account ml "
        "--setup 'module load cuda' --setup '#SBATCH --exclusive' --launcher-option qos=high "
        "--launcher-option exclusive --listen lo --ports 20000-20100 --start-timeout 10m"
    )
    expected = LaunchSettings(
        "slurm",
        nodes=2,
        gpus_per_node=4,
        time="1:00:00",
        partition="gpu",
        account="ml",
        setup=("module load cuda", "#SBATCH --exclusive"),
        options={"qos": "high", "exclusive": ""},
        listen="127.0.0.1",
        ports=(20000, 20100),
        start_timeout_s=600.0,
    )
    assert of_line(line) == expected
    assert expected == launch_settings(
        4,
        launcher="slurm",
        nodes=2,
        gpus_per_node=4,
        time="1:00:00",
        partition="gpu",
        account="ml",
        setup="module load cuda\n#SBATCH --exclusive\n",
        launcher_options={"qos": "high", "exclusive": True},
        hosts="lo",
        ports=(20000, 20100),
        start_timeout=600,
    )


def test_hosts_are_read_with_and_without_slots() -> None:
    expected = (HostSlots("node1", 4), HostSlots("me@node-2.site", 0), HostSlots("10.0.0.3", 2))
    assert of_line("--launcher ssh --on node1:4,me@node-2.site,10.0.0.3:2").on == expected
    several = launch_settings(4, launcher="ssh", on=["node1:4", "me@node-2.site", "10.0.0.3:2"])
    assert several.on == expected


def test_nothing_said_is_this_machine_and_a_queue_may_take_its_time() -> None:
    assert launch_settings(2) == LaunchSettings()
    assert of_line("--launcher ssh --on a").start_timeout_s == 120.0
    assert of_line("--launcher slurm").start_timeout_s == 86400.0


@pytest.mark.parametrize("time", ["90", "90:30", "1:30:00", "2-12", "2-12:30", "2-12:30:00", "0"])
def test_every_time_that_slurm_knows_is_taken(time: str) -> None:
    assert of_line(f"--launcher slurm --time {time}").time == time


def test_so_many_ports_as_a_notebook_needs_are_enough() -> None:
    assert of_line("--ports 20000-20015").ports == (20000, 20015)
    assert launch_settings(2, ports=[1024, 65535]).ports == (1024, 65535)  # type: ignore[arg-type]


def test_ipyparallels_launchers_and_classes_are_known_by_name() -> None:
    found = configuration.known_launchers()
    assert {"local", "ssh", "slurm", "mpi", "pbs", "lsf", "htcondor"} <= set(found)
    assert "workbench" not in found
    assert of_line("--launcher pbs --launcher-option profile=mine").options == {"profile": "mine"}
    own = "ipyparallel.cluster.launcher.LocalEngineSetLauncher"
    assert of_line(f"--launcher {own}").launcher == own


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("--launcher slrum", "WB-PLAN-037", "slurm"),
        ("--launcher my.own.Launcher", "WB-PLAN-184", "No module named 'my'"),
        ("--launcher os.path.Launcher", "WB-PLAN-184", "os.path"),
        ("--launcher ssh --on a --partition gpu", "WB-PLAN-165", "--partition gpu"),
        ("--on a,b", "WB-PLAN-165", "--launcher ssh"),
        ("--launcher mpi --nodes 2", "WB-PLAN-165", "--launcher slurm"),
        ("--launcher pbs --time 60", "WB-PLAN-165", "--launcher-option"),
        ("--launcher ssh", "WB-PLAN-166", "--on node1,node2"),
        ("--launcher ssh --on a,,b", "WB-PLAN-167", "a,,b"),
        ("--launcher ssh --on 'a b'", "WB-PLAN-167", "--on node1:4,user@node2:4"),
        ("--launcher ssh --on=-oProxyCommand=x", "WB-PLAN-167", "-oProxyCommand=x"),
        ("--launcher ssh --on a:0", "WB-PLAN-167", "a:0"),
        ("--launcher ssh --on a:x", "WB-PLAN-167", "a:x"),
        ("--launcher ssh --on a:2,b,me@A:3", "WB-PLAN-168", "me@A"),
        ("--launcher ssh --on a:1,b:2", "WB-PLAN-169", "3 slots"),
        ("--launcher slurm --time 2h", "WB-PLAN-170", "--time 2:00:00"),
        ("--launcher slurm --time 1:99:00", "WB-PLAN-170", "days-hours:minutes:seconds"),
        ("--launcher slurm --partition 'g pu'", "WB-PLAN-181", "sinfo"),
        ("--launcher slurm --nodes 5", "WB-PLAN-177", "--nodes 5"),
        ("--ports 20000", "WB-PLAN-172", "--ports 20000-20100"),
        ("--ports 20100-20000", "WB-PLAN-172", "FIRST-LAST"),
        ("--ports 1-100", "WB-PLAN-172", "1024"),
        ("--ports 60000-70000", "WB-PLAN-172", "65535"),
        ("--ports 20000-20014", "WB-PLAN-173", "--ports 20000-20014"),
        ("--start-timeout soon", "WB-PLAN-174", "10m"),
        ("--start-timeout never", "WB-PLAN-174", "10m"),
        ("--listen '*'", "WB-PLAN-163", "*"),
        ("--listen nowhere.invalid", "WB-PLAN-164", "(127.0.0.1)"),
        ("--launcher slurm --launcher-option partition=x", "WB-PLAN-182", "--partition x"),
        ("--launcher slurm --launcher-option =x", "WB-PLAN-183", "qos=high"),
        ("--launcher ssh --on a --launcher-option Port", "WB-PLAN-182", "Port=value"),
    ],
)
def test_mistakes_of_a_line_are_named_with_the_way_out(line: str, code: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        of_line(line)
    assert caught.value.code == code
    assert words in str(caught.value)
    assert caught.value.next_step
    assert caught.value.allowed


@pytest.mark.parametrize(
    ("launcher", "program", "package"),
    [
        ("ssh", "ssh", "openssh-client"),
        ("slurm", "sbatch", "slurm-client"),
        ("slurm", "srun", "slurm-client"),
        ("mpi", "mpiexec", "openmpi-bin"),
    ],
)
def test_a_program_that_is_not_there_is_named_with_its_package(
    own_files: Path, launcher: str, program: str, package: str
) -> None:
    assert launcher in installed()
    (own_files / "bin" / program).unlink()
    assert launcher not in installed()
    on = "--on a" if launcher == "ssh" else ""
    with pytest.raises(PlanError, match="WB-PLAN-175") as caught:
        of_line(f"--launcher {launcher} {on}")
    assert program in str(caught.value)
    assert package in str(caught.value.next_step)


def test_inside_of_a_job_srun_is_enough(own_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_files / "bin" / "sbatch").unlink()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert of_line("--launcher slurm").launcher == "slurm"


def test_a_cluster_elsewhere_cannot_be_kept_and_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from workbench.session import cluster

    def started(*args: object, **rest: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(cluster, "Engines", started)
    with pytest.raises(PlanError, match="WB-PLAN-176"):
        wb.Cluster(2, launcher="ssh", on="a", keep=True)
    with pytest.raises(PlanError, match="WB-PLAN-169"):
        wb.Cluster(2, launcher="ssh", on="a:1")
    with pytest.raises(TypeError, match="'lancher'"):
        wb.Cluster(2, lancher="ssh")  # type: ignore[call-arg]
    monkeypatch.setenv("WORKBENCH_HOSTS", "no")
    with pytest.raises(PlanError, match="WB-PLAN-056"):
        wb.Cluster(2, launcher="slurm")


# -- files -----------------------------------------------------------------------------------------

SITE = """
[slurm]
partition = "batch"
account = "site"
time = 60
setup = "module load cuda"
python = "/site/python"
options = {qos = "low", constraint = "a100", exclusive = true}
[ssh]
on = ["node1:4", "node2:4"]
"""
USER = """
[slurm]
partition = "gpu"
gpus-per-node = 4
setup = ["conda activate ml", "#SBATCH --mail-type=END"]
options = {qos = "high", python = "/mine/python"}
"""


def test_the_line_wins_over_the_users_file_and_that_over_the_sites(own_files: Path) -> None:
    (own_files / "site.toml").write_text(SITE)
    (own_files / "home" / "workbench" / "launchers.toml").write_text(USER)
    assert of_line("--launcher slurm --account me --launcher-option constraint=h100") == (
        LaunchSettings(
            "slurm",
            gpus_per_node=4,
            time="60",
            partition="gpu",
            account="me",
            setup=("conda activate ml", "#SBATCH --mail-type=END"),
            options={
                "python": "/mine/python", "qos": "high", "constraint": "h100", "exclusive": ""
            },
            start_timeout_s=86400.0,
        )
    )  # fmt: skip
    assert of_line("--launcher ssh").on == (HostSlots("node1", 4), HostSlots("node2", 4))
    assert of_line("") == LaunchSettings()


def test_a_variable_names_another_file_in_place_of_the_users(
    own_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_files / "site.toml").write_text(SITE)
    (own_files / "home" / "workbench" / "launchers.toml").write_text("[slurm]\naccount = 'no'\n")
    (own_files / "class.toml").write_text("[slurm]\naccount = 'class'\n")
    monkeypatch.setenv("WORKBENCH_LAUNCHERS", str(own_files / "class.toml"))
    found = of_line("--launcher slurm")
    assert (found.account, found.partition) == ("class", "batch")
    monkeypatch.setenv("WORKBENCH_LAUNCHERS", str(own_files / "gone.toml"))
    with pytest.raises(PlanError, match="WB-PLAN-178") as caught:
        of_line("--launcher slurm")
    assert "WORKBENCH_LAUNCHERS" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        ("[slurm", "WB-PLAN-178", "site.toml"),
        ("[slrum]\ntime = 60", "WB-PLAN-179", "[slrum]"),
        ("partition = 'gpu'", "WB-PLAN-179", "partition = 'gpu'"),
        ("[slurm]\npartitoin = 'gpu'", "WB-PLAN-180", "partitoin"),
        ("[slurm]\non = 'a'", "WB-PLAN-180", "on"),
        ("[slurm]\ntime = 01:00:00", "WB-PLAN-185", "time"),
        ("[slurm]\ntime = '2h'", "WB-PLAN-170", "time = '2h'"),
        ("[slurm]\nnodes = 'x'", "WB-PLAN-171", "nodes = 'x'"),
        ("[slurm]\nnodes = true", "WB-PLAN-185", "nodes"),
        ("[slurm]\nsetup = [1.5]", "WB-PLAN-185", "setup"),
        ("[slurm]\nports = 7", "WB-PLAN-172", "ports"),
        ("[slurm]\noptions = {qos = 1.5}", "WB-PLAN-185", "options"),
        ("[slurm]\noptions = {time = '60'}", "WB-PLAN-182", "options"),
        ("[slurm]\nstart_timeout = 'x'", "WB-PLAN-174", "start_timeout"),
    ],
)
def test_a_mistake_in_a_file_names_file_and_key(
    own_files: Path, text: str, code: str, named: str
) -> None:
    (own_files / "site.toml").write_text(text)
    with pytest.raises(PlanError) as caught:
        of_line("--launcher slurm")
    assert caught.value.code == code
    assert named in str(caught.value)
    assert "site.toml" in str(caught.value)
    of_line("")  # engines of this machine need no file


def test_a_file_that_cannot_be_read_stops_the_start(own_files: Path) -> None:
    (own_files / "site.toml").mkdir()
    with pytest.raises(PlanError, match="WB-PLAN-178"):
        of_line("--launcher slurm")


# -- a cluster that is up --------------------------------------------------------------------------


def grow(launch: LaunchSettings, line: str) -> list[int]:
    """Type a `%cluster start` line where a cluster of two engines is up; return what was added."""
    added: list[int] = []
    cluster: Any = SimpleNamespace(
        launch=launch, devices_asked="auto", worker_ids=[0, 1], add=added.append
    )
    asked = parse_cluster_line(line)
    assert asked.count is not None
    Session(cluster=cluster).start(asked.count, **asked.launch)
    return added


SLURM = LaunchSettings("slurm", nodes=2, partition="gpu", options={"qos": "high", "mem": "4G"})


@pytest.mark.parametrize(
    ("launch", "line"),
    [
        (LaunchSettings("mpi"), "start 6"),
        (LaunchSettings("mpi"), "start 6 --launcher mpi"),
        (SLURM, "start 6"),
        (SLURM, "start 6 --partition gpu --launcher-option qos=high"),
        (LaunchSettings("ssh", on=(HostSlots("a", 2),)), "start 6 --launcher ssh"),
        (LaunchSettings("ssh", on=(HostSlots("a", 2),)), "start 6 --on a:2"),
    ],
)
def test_what_is_not_typed_stays_as_the_cluster_has_it(launch: LaunchSettings, line: str) -> None:
    assert grow(launch, line) == [4]


@pytest.mark.parametrize(
    ("launch", "line", "seen", "allowed"),
    [
        (LaunchSettings("mpi"), "start 6 --launcher local", "--launcher local", "mpi"),
        (SLURM, "start 6 --partition cpu", "--partition cpu", "gpu"),
        (SLURM, "start 6 --launcher-option qos=low", "--launcher-option qos=low", "qos=high"),
        (SLURM, "start 6 --time 60", "--time 60", "running"),
        (LaunchSettings("ssh", on=(HostSlots("a", 2),)), "start 6 --on b", "--on b", "a"),
    ],
)
def test_a_cluster_that_runs_otherwise_says_how(
    launch: LaunchSettings, line: str, seen: str, allowed: str
) -> None:
    with pytest.raises(PlanError, match="WB-PLAN-127") as caught:
        grow(launch, line)
    assert caught.value.seen == seen
    assert allowed in str(caught.value.allowed)


def test_a_flag_of_another_launcher_is_refused_by_a_cluster_as_well() -> None:
    with pytest.raises(PlanError, match="WB-PLAN-165"):
        differences(LaunchSettings(), partition="gpu")


def test_what_was_prepared_here_is_not_taken_for_engines_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[dict[str, Any]] = []

    def made_of(count: int, **settings: Any) -> Any:
        made.append(settings)
        return SimpleNamespace(keeping=SimpleNamespace(on_end=None))

    monkeypatch.setattr(state, "Cluster", made_of)

    def prepared() -> Any:
        return SimpleNamespace(launch=LaunchSettings(), framework="torch", stop=lambda: None)

    with pytest.raises(PlanError):
        Session(prepared=(kept := prepared())).start(2, launcher="slrum")
    assert made == []
    mistaken = Session(prepared=kept)
    mistaken.start(2, framework="torch")
    Session(prepared=prepared()).start(2, framework="torch", launcher="mpi")
    assert [one["engines"] is kept for one in made] == [True, False]
    assert [one["launch"].launcher for one in made] == ["local", "mpi"]
    assert all("launcher" not in one for one in made)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), PlanError("a mistake")])
def test_what_a_failed_start_has_stopped_is_not_started_on_again(
    monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    made = SimpleNamespace(launch=LaunchSettings(), framework="torch", reusable=True)
    made.stop = lambda: None
    session = Session(prepared=(prepared := cast("Any", made)))

    def fails(count: int, **settings: Any) -> None:
        raise failure

    monkeypatch.setattr(state, "Cluster", fails)
    with pytest.raises(type(failure)):
        session.start(2, framework="torch")
    assert session.prepared is prepared  # nothing had been touched
    made.reusable = False
    with pytest.raises(type(failure)):
        session.start(2, framework="torch")
    assert session.prepared is None


def test_the_file_on_the_documentations_page_is_one_that_is_understood(own_files: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "clusters-of-machines.md").read_text("utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (own_files / "site.toml").write_text(example)
    slurm = of_line("--launcher slurm")
    assert (slurm.partition, slurm.time, slurm.options["exclusive"]) == ("gpu", "4:00:00", "")
    ssh = of_line("--launcher ssh")
    assert (len(ssh.on), ssh.ports) == (2, (20000, 20100))
    assert ssh.options == {"python": "/opt/ml/bin/python"}
    assert of_line("--launcher mpi").options == {"oversubscribe": ""}


def test_the_site_file_is_the_documented_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert str(configuration.SITE_FILE) == "/etc/workbench/launchers.toml"
    assert os.environ.get("XDG_CONFIG_HOME") or configuration.files()[1] == (
        Path.home() / ".config" / "workbench" / "launchers.toml"
    )


@pytest.mark.parametrize(
    ("asked", "engines"),
    [
        ({}, 2),
        ({"launcher": "ssh", "on": "a:4,b:2"}, 6),
        ({"launcher": "ssh", "on": "a,b,c"}, 3),
        ({"launcher": "slurm", "nodes": 2, "gpus_per_node": 4}, 8),
        ({"launcher": "slurm", "nodes": 3}, 3),
    ],
    ids=str,
)
def test_without_a_number_there_are_as_many_engines_as_there_is_room_for(
    asked: dict[str, Any], engines: int
) -> None:
    assert configuration.engines_meant(**asked) == engines
