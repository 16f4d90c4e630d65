"""The labs' side of the notebook: `labs.begin`, `labs.check`, and what the labs show.

`from workbench import labs` in a notebook. `source` and `build` make the notebooks from the
solutions, `grading` runs what students hand in; neither is loaded here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "begin": "workbench.labs.asking",
    "beside": "workbench.labs.shows",
    "check": "workbench.labs.asking",
    "namespaces": "workbench.labs.shows",
    "progress": "workbench.labs.asking",
    "take_home": "workbench.labs.packing",
}

__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'workbench.labs' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from .asking import begin as begin
    from .asking import check as check
    from .asking import progress as progress
    from .packing import take_home as take_home
    from .shows import beside as beside
    from .shows import namespaces as namespaces
