"""Settings of all tests: tests read and write no files in the user's folders."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Generator, Iterator
from typing import Any

import long_tests
import pytest
from leak_guard import LeakGuard
from spreading import Together, spread

_failed = pytest.StashKey[bool]()

# jsonschema, which nbformat imports, checks addresses with it if it is there. It takes 3 s to load
# in each process of pytest, and no test checks an address.
sys.modules.setdefault("rfc3987_syntax", None)


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep runs, IPython's history and its settings in folders of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WORKBENCH_HOME", "IPYTHONDIR"):
            if name not in os.environ:
                patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Guard against leaks; react to SIGINT as an engine does, because jobs of shells ignore it."""
    config.pluginmanager.register(LeakGuard(), "workbench-leaks")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Two small messages and an answer per test: without this, a test waits up to 40 ms (Nagle's
    # algorithm and delayed acknowledgements), which is more than 100 s for the whole suite.
    counts = getattr(getattr(config, "failures_db", None), "sock", None)
    if counts is not None:
        counts.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of `--long`; in the processes of `-n`, put the longest tests first."""
    long_tests.mark(items, whole=not any("::" in argument for argument in config.args))
    if getattr(config.option, "loadgroup", False):  # set in the processes of `--dist loadgroup`
        spread(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Say which tests stay together under `--dist loadgroup`."""
    return Together(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note that a test failed; it may have left its cluster without engines."""
    report = yield
    if report.failed:
        item.config.stash[_failed] = True
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a test that follows a failed one, or repeats it, find a whole cluster."""
    if item.config.stash.get(_failed, False) and "workbench.session.cluster" in sys.modules:
        import lending

        lending.mend()
    item.config.stash[_failed] = False
