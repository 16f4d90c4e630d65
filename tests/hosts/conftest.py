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


@pytest.fixture(scope="module")
def reached(standing_hosts: SimulatedHosts) -> Iterator[SimulatedHosts]:
    """Hand out two whole hosts that this process's `ssh` knows, for the clusters of a file."""
    if not standing_hosts.is_plain():
        standing_hosts.again()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", standing_hosts.environment["PATH"])
        yield standing_hosts


@pytest.fixture(scope="module")
def queues(reached: SimulatedHosts) -> Iterator[LocalSlurm]:
    """Hand out a Slurm that this process's `sbatch` knows, for the clusters of a file."""
    if why := missing(SLURM_NEEDS):
        pytest.skip(why)
    slurm = LocalSlurm(reached)
    slurm.down()
    slurm.up()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
        yield slurm
    slurm.cancel_all()


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
