"""Skips tests whose libraries are not installed, without importing these.

`pytest.importorskip` imports the library, which takes seconds for a framework. Tests use `need`
instead if only the engines, or processes that they start, need the library.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def need(*modules: str) -> None:
    """Skip the calling test, or the calling module, if one of these is not installed."""
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed", allow_module_level=True)
