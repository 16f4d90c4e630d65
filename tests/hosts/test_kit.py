"""What the other tests of this folder stand on: the hosts are two, and Slurm spans them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from hosts.local_slurm import LocalSlurm
from hosts.simulated_hosts import (
    ADDRESSES,
    KERNEL,
    ROOT,
    HostSettings,
    SimulatedHosts,
)

CLOCK = "python3 -c 'import time; print(time.monotonic())'"

OTHER = "201"
"""The network of a second set of hosts beside the first."""


def said(hosts: SimulatedHosts, host: str, command: str) -> str:
    done = hosts.run(host, command)
    assert done.returncode == 0, done
    return done.stdout.strip()


def test_each_host_has_a_name_a_folder_and_a_network_of_its_own(hosts: SimulatedHosts) -> None:
    for host in ADDRESSES:
        assert said(hosts, host, "hostname") == host
        assert said(hosts, host, "touch /tmp/of-$(hostname) /dev/shm/of-$(hostname) ~/mine") == ""
    assert said(hosts, "xh2", "ls /tmp /dev/shm | grep of-").split() == ["of-xh2"] * 2
    assert hosts.path("xh1", "/tmp/of-xh1").exists()
    assert said(hosts, "xh1", "echo there > ~/only-here; cat ~/only-here") == "there"
    assert hosts.run("xh2", "cat ~/only-here").returncode != 0
    assert said(hosts, "xh2", f"echo seen > {hosts.shared}/all") == ""
    assert said(hosts, "xh1", f"cat {hosts.shared}/all") == "seen"


def test_hosts_reach_each_other_and_this_machine_alone(hosts: SimulatedHosts) -> None:
    with socket.create_server((KERNEL, 0)) as here:
        port = here.getsockname()[1]
        assert said(hosts, "xh1", f"exec 3<>/dev/tcp/{KERNEL}/{port}") == ""
    assert "SSH" in said(hosts, "xh1", "head -c 4 < /dev/tcp/xh2/2222")
    assert said(hosts, "xh1", "ip -4 -o addr show | grep -c inet") == "2"  # loopback and eth0
    assert hosts.run("xh1", "ip route get 192.0.2.1").returncode != 0


def test_the_python_of_the_tests_and_their_checkout_are_there_and_read_only(
    hosts: SimulatedHosts,
) -> None:
    found = said(hosts, "xh2", f"{sys.executable} -c 'import workbench; print(workbench.__file__)'")
    assert found == f"{ROOT}/workbench/__init__.py"
    for folder in (sys.prefix, str(ROOT)):
        if folder.startswith("/tmp/"):
            assert hosts.run("xh2", f"touch {folder}/written").returncode != 0


def test_a_killed_host_is_gone_and_comes_back(hosts: SimulatedHosts) -> None:
    assert hosts.processes("xh1")
    hosts.kill("xh1")
    assert not hosts.processes("xh1")
    assert not hosts.is_up("xh1")
    assert hosts.is_up("xh2")
    hosts.again()
    assert hosts.is_up("xh1")


def test_a_link_falls_silent_and_comes_back(hosts: SimulatedHosts) -> None:
    hosts.link("xh2", up=False)
    assert not hosts.is_up("xh2")
    assert hosts.processes("xh2")
    hosts.link("xh2", up=True)
    assert hosts.is_up("xh2")


def test_a_slow_link_delays_both_ways(hosts: SimulatedHosts) -> None:
    def connect_s() -> float:
        began = time.monotonic()
        socket.create_connection((ADDRESSES["xh2"], 2222), timeout=5).close()
        return time.monotonic() - began

    with hosts.delayed("xh2", delay_ms=40):
        connect_s()  # the first asks for the address first
        assert connect_s() >= 0.08
    assert hosts.is_up("xh2")
    assert min(connect_s() for _ in range(5)) < 0.04


@pytest.mark.parametrize("names", ["debian", "none"])
def test_hosts_know_no_names_or_debians(hosts: SimulatedHosts, names: str) -> None:
    hosts.again(HostSettings(names=names))
    assert said(hosts, "xh1", "hostname") == "xh1"
    other = hosts.run("xh1", "getent hosts xh2").stdout.split()
    own = hosts.run("xh1", "getent ahostsv4 xh1").stdout.split()
    if names == "debian":
        assert (own[0], other[0]) == ("127.0.1.1", ADDRESSES["xh2"])
    else:
        assert (own, other) == ([], [])


def test_hosts_may_have_one_name_and_clocks_apart(hosts: SimulatedHosts) -> None:
    hosts.again(HostSettings(same_name=True, skewed=True))
    here = time.monotonic()
    assert {said(hosts, host, "hostname") for host in ADDRESSES} == {socket.gethostname()}
    one, other = (float(said(hosts, host, CLOCK)) for host in ADDRESSES)
    assert one - here < 600
    assert other - one == pytest.approx(86400, abs=60)


def test_slurm_spans_both_hosts(slurm: LocalSlurm) -> None:
    assert sorted(slurm.call("srun", "-N2", "-n2", "hostname").split()) == ["xh1", "xh2"]
    seen = slurm.call("srun", "-N2", "-n2", "--gres=gpu:2", "sh", "-c", "echo $SLURM_STEP_GPUS")
    assert seen.split() == ["0,1", "0,1"]
    assert set(slurm.call("sinfo", "-h", "-o", "%G").split()) == {"gpu:2"}
    assert slurm.call("sinfo", "-h", "-o", "%P %l").splitlines() == ["small* 1:00:00", "tiny 1:00"]


def test_a_job_of_slurm_waits_while_the_nodes_are_full_and_is_cancelled(slurm: LocalSlurm) -> None:
    script = "#!/bin/sh\nsleep 600\n"
    jobs = [slurm.submit(script, "-N2", "--exclusive") for _ in range(2)]
    end = time.monotonic() + 20
    while slurm.state(jobs[0]) != "RUNNING" and time.monotonic() < end:
        time.sleep(0.1)
    assert [slurm.state(job) for job in jobs] == ["RUNNING", "PENDING"]
    slurm.cancel_all()
    assert slurm.state(jobs[0]) == "CANCELLED"


@pytest.mark.parametrize("end", ["down", "SIGINT", "SIGTERM", "SIGKILL"])
def test_no_process_namespace_interface_or_folder_is_left(end: str) -> None:
    code = f"""
        import sys, time
        sys.path.insert(0, {str(ROOT / "tests")!r})
        from hosts.simulated_hosts import SimulatedHosts
        from hosts.local_slurm import LocalSlurm
        hosts = SimulatedHosts()
        hosts.up()
        LocalSlurm(hosts).up()
        hosts.enter("xh1", ["sleep", "600"])
        print("up", flush=True)
        sys.stdin.readline()
        hosts.down()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # an interrupt's traceback
        env={**os.environ, "WORKBENCH_TEST_NETWORK": OTHER},
    ) as tests:
        assert tests.stdout is not None
        assert tests.stdout.readline() == b"up\n"
        assert found(OTHER)
        if end == "down":
            tests.communicate(b"\n")
        else:
            tests.send_signal(getattr(signal, end))
    latest = time.monotonic() + (0 if end == "down" else 20)
    while found(OTHER) and time.monotonic() < latest:
        time.sleep(0.1)
    assert found(OTHER) == ""


def found(network: str) -> str:
    """Return what another set of hosts has left, as its own module sees it."""
    code = "from hosts.simulated_hosts import leftovers; print(*leftovers())"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"WORKBENCH_TEST_NETWORK": network, "PYTHONPATH": str(ROOT / "tests"), "PATH": "/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
