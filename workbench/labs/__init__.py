"""The labs' side of the notebook: `labs.begin`, `labs.check`, and what the labs show.

`from workbench import labs` in a notebook. `build` makes the notebooks from the sources, and
`grading` runs the notebooks that students hand in; neither is loaded here.

    asking    what do `labs.begin` and `labs.check` do in a lab's cell
    answers   which exercises are there, what can a check ask for
    side      who answers: this process, or a kernel by messages
    plain     how is an answer sent: plain data, no pickle
    limit     how is an endless cell interrupted
    checks/   which answers are right, lab by lab
    blind     how is a blind case drawn, measured, sealed, scored
    shows     what do labs show and hand out: formulas, namespaces, runs to take home
    build     how are a lab's notebooks made from its source
    grading/  how are handed-in notebooks run and marked
    course/   how are labs handed out and collected, and grades kept
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "begin": "workbench.labs.asking",
    "beside": "workbench.labs.shows",
    "can_run": "workbench.labs.asking",
    "check": "workbench.labs.asking",
    "namespaces": "workbench.labs.shows",
    "progress": "workbench.labs.asking",
    "take_home": "workbench.labs.shows",
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
    from .asking import can_run as can_run
    from .asking import check as check
    from .asking import progress as progress
    from .shows import beside as beside
    from .shows import namespaces as namespaces
    from .shows import take_home as take_home
