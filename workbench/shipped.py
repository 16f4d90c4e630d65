"""Where the notebooks are that come with the package."""

from __future__ import annotations

import sys
from pathlib import Path

from .errors import WorkbenchError

QUICKSTART = "00_quickstart.ipynb"
SHARED = Path("share/distributed-workbench/notebooks")


def notebooks_folder() -> Path:
    """Return the folder with the notebooks: of the checkout, or as installed.

    Raises:
        WorkbenchError: There is none.
    """
    for folder in (Path(__file__).parents[1] / "notebooks", Path(sys.prefix) / SHARED):
        if (folder / QUICKSTART).exists():
            return folder
    raise WorkbenchError(
        "The notebooks are not installed.", next_step="install from a checkout", code="WB-GEN-005"
    )
