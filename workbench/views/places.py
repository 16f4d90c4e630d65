"""Where this notebook runs: Colab and Kaggle differ from a Jupyter server in what they can show.

Sources: google.colab's `output.enable_custom_widget_manager`, without which Colab shows no widget
from outside ipywidgets (github.com/googlecolab/colabtools, issue 498); anywidget's
`get_repr_metadata` (github.com/manzt/anywidget, issue 63); the variables of Kaggle's image.
Simulated in tests, never run there.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True)
class Place:
    """A service for notebooks.

    Attributes:
        name: Its name, as users know it.
        plot: What `--plot auto` means there.
        note: What differs there, for the user; one sentence or two.
    """

    name: str
    plot: Literal["widget", "svg"]
    note: str


def here(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the service that this process runs in; None for any other Jupyter.

    Args:
        environment: The process's environment variables.
    """
    if "COLAB_RELEASE_TAG" in environment or "google.colab" in sys.modules:
        if _colab_output() is None:
            return Place("Colab", "svg", f"{_PICTURES} {_ONLY_INTERRUPT}")
        return Place("Colab", "widget", _ONLY_INTERRUPT)
    if "KAGGLE_KERNEL_RUN_TYPE" in environment:
        return Place("Kaggle", "svg", f"{_PICTURES} {_ONLY_INTERRUPT}")
    return None


_PICTURES = "Runs are shown as pictures that are updated, because widgets may not load here."
_ONLY_INTERRUPT = (
    "While a cell runs, stop it with the notebook's interrupt button: other buttons react when "
    "the cell has ended."
)


def _colab_output() -> ModuleType | None:
    """Return Colab's module for outputs where it can load widgets from outside ipywidgets."""
    with contextlib.suppress(ImportError):
        output = importlib.import_module("google.colab.output")
        if hasattr(output, "enable_custom_widget_manager"):
            return output
    return None


def widget_metadata() -> dict[str, Any]:
    """Return the metadata without which Colab does not draw a widget; elsewhere nothing."""
    output = sys.modules.get("google.colab.output")
    if output is None:
        return {}
    with contextlib.suppress(Exception):  # a part of Colab that it does not document
        output.enable_custom_widget_manager()
        url = output._widgets._installed_url
        if url is not None:
            return {WIDGET: {"colab": {"custom_widget_manager": {"url": url}}}}
    return {}
