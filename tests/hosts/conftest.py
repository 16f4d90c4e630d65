"""Two simulated hosts and Slurm over them, made once for all tests that ask for them."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
from hosts.local_slurm import SLURM_NEEDS, LocalSlurm
from hosts.simulated_hosts import SimulatedHosts, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what stands in this folder."""
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.hosts)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that is skipped where it could have run: nobody reads of skips."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not missing(SLURM_NEEDS):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} may not be skipped here: {why}"
    return report


@pytest.fixture(scope="session")
def standing_hosts() -> Iterator[SimulatedHosts]:
    """Hold the hosts for all tests; they are taken down when the session ends or is interrupted."""
    if why := missing():
        pytest.skip(why)
    with SimulatedHosts() as hosts:
        yield hosts


@pytest.fixture
def hosts(standing_hosts: SimulatedHosts) -> SimulatedHosts:
    """Hand out two whole hosts, made anew where the test before broke or changed them."""
    if not standing_hosts.is_plain():
        standing_hosts.again()
    return standing_hosts


@pytest.fixture
def slurm(hosts: SimulatedHosts) -> LocalSlurm:
    """Hand out a Slurm without jobs; it ends with the hosts."""
    if why := missing(SLURM_NEEDS):
        pytest.skip(why)
    slurm = LocalSlurm(hosts)
    if not slurm.is_ready():
        slurm.down()
        slurm.up()
    slurm.cancel_all()
    return slurm
