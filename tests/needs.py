"""Skips tests whose libraries are not installed, without importing these.

`pytest.importorskip` loads what it asks for, which costs seconds for a framework. Tests that only
the engines, or processes they start, need it for ask here instead.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def need(*modules: str) -> None:
    """Skip the calling test, or the module at whose head this stands, unless all are installed."""
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed", allow_module_level=True)
