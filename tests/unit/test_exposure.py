"""Who asks for a wider binding is told what it exposes; nobody else is."""

from __future__ import annotations

import socket
import warnings

import pytest

from workbench.cluster.hosts.settings import HostSlots, LaunchSettings
from workbench.cluster.router import ControlRouter
from workbench.devices import limits
from workbench.errors import PlanError
from workbench.execution.requests import check_limits
from workbench.magics import WorkbenchMagics


@pytest.mark.parametrize("listen", ["10.1.2.3", "192.168.0.7"])
def test_a_wider_binding_is_explained_each_time(listen: str) -> None:
    for _ in range(2):
        with pytest.warns(limits.ExposureWarning, match="WB-WARN-001") as caught:
            check_limits(1, launch=LaunchSettings(listen=listen))
        said = str(caught[0].message)
        for word in (f"--listen {listen}", limits.PAGE):
            assert word in said


@pytest.mark.parametrize(
    "launch",
    [
        LaunchSettings("ssh", on=(HostSlots("node1"),)),
        LaunchSettings("slurm", listen="10.1.2.3"),
        LaunchSettings("pbs"),
        LaunchSettings("mpi", options={"host": "node1,node2"}),
    ],
    ids=lambda launch: launch.launcher,
)
def test_engines_elsewhere_say_what_is_encrypted_and_what_is_not(launch: LaunchSettings) -> None:
    with pytest.warns(limits.ExposureWarning, match="WB-WARN-001") as caught:
        check_limits(1, launch=launch)
    said = str(caught[0].message)
    assert f"--launcher {launch.launcher}" in said
    assert caught[0].filename == __file__  # the user's own line
    assert limits.PAGE in said


@pytest.mark.parametrize(
    "launch",
    [
        LaunchSettings(),
        LaunchSettings(listen="127.0.0.1"),
        LaunchSettings("mpi"),
        LaunchSettings("slurm", listen="127.0.0.1"),
    ],
)
def test_loopback_needs_no_word(launch: LaunchSettings) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_limits(1, launch=launch)


@pytest.mark.parametrize(
    ("launch", "flag"),
    [
        (LaunchSettings(listen="10.1.2.3"), "--listen 10.1.2.3"),
        (LaunchSettings("ssh", on=(HostSlots("node1"),)), "--launcher ssh"),
        (LaunchSettings("pbs"), "--launcher pbs"),
    ],
)
def test_what_is_forbidden_is_refused_before_it_is_explained(
    monkeypatch: pytest.MonkeyPatch, launch: LaunchSettings, flag: str
) -> None:
    monkeypatch.setenv("WORKBENCH_HOSTS", "no")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PlanError, match="WB-PLAN-056") as caught:
            check_limits(1, launch=launch)
    assert caught.value.seen == flag
    check_limits(1, launch=LaunchSettings())
    check_limits(1, launch=LaunchSettings("mpi"))  # it stays on this machine


def test_a_notebook_is_told_by_a_line_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    notes = WorkbenchMagics(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("ssh", "ssh", "slurm"):
            with limits.telling(notes._note):
                check_limits(1, launch=LaunchSettings(name, on=(HostSlots("node1"),)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["--launcher ssh", "--launcher slurm"]
    assert all(len(line) < 100 for line in lines)


# -- where to listen -------------------------------------------------------------------------------

HERE = {"lo": ["127.0.0.1"], "eth0": ["10.1.2.3"], "ib0": ["172.16.0.9", "172.16.0.10"]}
NAMES = {"localhost": "127.0.0.1", "mine": "127.0.1.1", "other": "10.1.2.4", "fast": "172.16.0.10"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of three interfaces whose own name is 127.0.1.1, as Debian has it."""

    def resolve(name: str, *_: object) -> list[tuple[object, ...]]:
        if name not in NAMES:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, None, 0, "", (NAMES[name], 0))]

    monkeypatch.setattr(limits, "interfaces", lambda: HERE)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(limits, "_outward", lambda: "10.1.2.3")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("", ""),
        ("10.1.2.3", "10.1.2.3"),
        ("eth0", "10.1.2.3"),
        ("ib0", "172.16.0.9"),
        ("172.16.0.0/16", "172.16.0.9"),
        ("10.1.0.0/16", "10.1.2.3"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.5", "127.0.0.5"),
        ("localhost", "127.0.0.1"),
        ("mine", "10.1.2.3"),
        ("fast", "172.16.0.10"),
        (" eth0 ", "10.1.2.3"),
    ],
)
def test_what_to_listen_on_becomes_one_address(listen: str, address: str) -> None:
    assert limits.listening(listen) == address


@pytest.mark.usefixtures("machine")
def test_a_machines_own_name_is_no_loopback_without_a_route_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "_outward", lambda: "")
    assert limits.listening("mine") == "10.1.2.3"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("listen", ["*", "0.0.0.0", "::"])
def test_all_interfaces_at_once_are_refused(listen: str) -> None:
    with pytest.raises(PlanError, match="WB-PLAN-163") as caught:
        limits.listening(listen)
    assert "eth0 (10.1.2.3), ib0 (172.16.0.9, 172.16.0.10)" in str(caught.value.allowed)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    "listen",
    ["10.9.9.9", "eth7", "other", "10.1.2.3,10.1.2.4", "192.168.0.0/16", "fd00::1", "::1", "a b"],
)
def test_what_is_none_of_this_machines_is_refused_with_what_is(listen: str) -> None:
    with pytest.raises(PlanError, match="WB-PLAN-164") as caught:
        limits.listening(listen)
    assert "eth0 (10.1.2.3)" in str(caught.value.allowed)
    assert "--on" in str(caught.value.next_step)


def test_this_machines_real_interfaces_can_be_listened_on() -> None:
    found = limits.interfaces()
    assert "127.0.0.1" in [address for each in found.values() for address in each]
    for name, (first, *_) in found.items():
        assert limits.listening(name) == limits.listening(first) == first
    own = limits.listening(socket.gethostname())
    assert own in [address for each in found.values() for address in each]
    assert not limits.beyond_loopback("127.0.0.1")
    router = ControlRouter(lambda engine, message: None, "127.0.0.1")
    assert router.url.startswith("tcp://127.0.0.1:")
    router.close()
