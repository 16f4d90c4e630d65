"""Who asks for a wider binding is told what it exposes; nobody else is."""

from __future__ import annotations

import warnings

import pytest

from workbench.cluster.router import ControlRouter
from workbench.devices import limits
from workbench.errors import PlanError
from workbench.execution.requests import check_limits


@pytest.mark.parametrize("hosts", ["*", "0.0.0.0", "10.1.2.3", "::", "eth0", "fd00::1"])
def test_a_wider_binding_is_explained_each_time(hosts: str) -> None:
    for _ in range(2):
        with pytest.warns(limits.ExposureWarning) as caught:
            check_limits(1, hosts=hosts)
        said = str(caught[0].message)
        for word in (f"--hosts {hosts}", "gloo", "TCPStore", "gRPC", "no authentication"):
            assert word in said
        assert limits.PAGE in said


@pytest.mark.parametrize("hosts", ["", "127.0.0.1", "localhost", "::1"])
def test_loopback_needs_no_word(hosts: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_limits(1, hosts=hosts)


def test_a_forbidden_binding_is_refused_before_it_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORKBENCH_HOSTS", "no")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PlanError, match="WB-PLAN-056"):
            check_limits(1, hosts="*")


def test_the_control_socket_listens_where_it_was_told_and_says_how_to_reach_it() -> None:
    for host, expected in (("127.0.0.1", "127.0.0.1"), ("*", limits.reachable("*"))):
        router = ControlRouter(lambda engine, message: None, host)
        assert router.url.startswith(f"tcp://{expected}:")
        router.close()
    assert "*" not in limits.reachable("*")
    assert limits.reachable("10.1.2.3") == "10.1.2.3"
