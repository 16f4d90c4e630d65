"""What holds for all tests: nothing is read from or left in the user's folders."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from spreading import Together, spread


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep runs, IPython's history and its settings in folders of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WORKBENCH_HOME", "IPYTHONDIR"):
            if name not in os.environ:
                patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield


def pytest_configure() -> None:
    """Heed SIGINT as an engine does: shells have jobs in the background ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put what takes longest first; where nobody asked for groups the order is the files'."""
    if getattr(config.option, "loadgroup", False):  # set in the processes of `--dist loadgroup`
        spread(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Say which tests stay together under `--dist loadgroup`."""
    return Together(config, log) if config.getvalue("dist") == "loadgroup" else None
