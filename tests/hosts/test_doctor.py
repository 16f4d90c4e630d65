"""`workbench doctor --on` says of two hosts what a cluster over them would meet."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hosts.simulated_hosts import ADDRESSES, KERNEL, ROOT, HostSettings, SimulatedHosts

PORTS = "23500-23540"


def asked(hosts: SimulatedHosts, *more: str) -> dict[str, dict[str, object]]:
    """Return the doctor's lines about hosts, by id."""
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "doctor", "--json", "--on", "xh1,xh2", *more],
        env={**hosts.environment, "PYTHONPATH": str(ROOT), "WORKBENCH_SHARED": str(hosts.shared)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = json.loads(done.stdout)["lines"]
    return {one["id"]: one for one in lines if one["id"].startswith("host")}


@pytest.mark.parametrize("names", ["all", "none"])
def test_the_doctor_says_where_a_cluster_over_hosts_would_listen(
    hosts: SimulatedHosts, names: str
) -> None:
    if names != "all":
        hosts.again(HostSettings(names=names))
    found = asked(hosts, "--ports", PORTS)
    failed = {id: one for id, one in found.items() if one["status"] == "fail"}
    assert failed == {}
    assert f"on {KERNEL} (" in str(found["hosts.listen"]["found"])
    assert PORTS in str(found["hosts.listen"]["found"])
    for host, address in ADDRESSES.items():
        assert f"{address} (eth0) on {host}" in str(found["hosts.engines"]["found"])
        way = found[f"host.{host}.to.this_machine"]
        assert str(way["found"]).startswith(f"{KERNEL}:235")
        assert found[f"host.{host}.shared"]["status"] == "ok"
    assert found["host.xh1.to.xh2"]["status"] == found["host.xh2.to.xh1"]["status"] == "ok"
    assert found["hosts.open"]["status"] == "warn"


def test_an_address_that_hosts_do_not_reach_is_found(hosts: SimulatedHosts) -> None:
    found = asked(hosts, "--listen", "127.0.0.1")
    assert found["hosts.listen"]["status"] == "fail"
    assert "--listen" in str(found["hosts.listen"]["next_step"])
    assert found["host.xh1.to.this_machine"]["status"] == "fail"
