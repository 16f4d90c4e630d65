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


_PICTURES = (
    "Widgets do not always load here, so runs are shown as pictures. The pictures are updated "
    "during a run."
)
_ONLY_INTERRUPT = (
    "To stop a running cell, press the notebook's interrupt button. Workbench's buttons react "
    "only after the cell has ended."
)


def _colab_output() -> ModuleType | None:
    """Return Colab's module for outputs where it can load widgets from outside ipywidgets."""
    with contextlib.suppress(ImportError):
        output = importlib.import_module("google.colab.output")
        if hasattr(output, "enable_custom_widget_manager"):
            return output
    return None


class WidgetBundle(dict[str, Any]):
    """A MIME bundle that shows a widget.

    Attributes:
        metadata: What goes with it; without it Colab does not draw the widget. Empty elsewhere.
    """

    def __init__(self, widget: Any, **fallback: Any) -> None:
        """Take what a front end without widgets shows, and anywidget's own bundle."""
        found = widget._repr_mimebundle_()
        data, metadata = found if isinstance(found, tuple) else (found, {})
        super().__init__({**fallback, **(data or {})})
        self.metadata: dict[str, Any] = metadata
