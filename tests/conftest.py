"""What holds for all tests: nothing is read from or left in the user's folders."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep runs, IPython's history and its settings in folders of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WORKBENCH_HOME", "IPYTHONDIR"):
            if name not in os.environ:
                patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where tests run side by side, one worker alone loads TensorFlow, which takes seconds."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("tensorflow"):
                item.add_marker(pytest.mark.xdist_group("tensorflow"))
