"""`labs.namespaces`: a picture of what the notebook and the engines hold just now."""

from __future__ import annotations

from typing import Any

from ..errors import RunError
from ..session.interrupts import ending
from ..session.state import session
from ..views.namespaces import Namespaces

_FOUND = "_labs_names"
_SHOW = f"""
def _labs_shorten(value):
    import math
    kind = type(value).__name__
    try:
        if hasattr(value, "shape") and not isinstance(value, type):
            words = kind + " " + ("x".join(map(str, value.shape)) or "scalar")
            few = math.prod(value.shape) <= 4 and hasattr(value, "tolist")
            return words + (f" {{value.tolist()}}" if few else "")
        words = " ".join(repr(value).split())
    except Exception:  # whatever an object of the user's does when it is looked at
        return f"<{{kind}}>"
    return words if len(words) <= 60 else words[:57] + "..."
def _labs_held(names, ours):
    from types import ModuleType
    return {{
        name: _labs_shorten(value) for name, value in sorted(names.items())
        if not name.startswith("_") and name not in ours and not isinstance(value, ModuleType)
    }}
{_FOUND} = _labs_held
"""
_OURS = (
    *("rank", "local_rank", "world_size", "device", "wb", "dist", "strategy", "labs"),
    *("get_ipython", "In", "Out", "exit", "quit", "open"),
)


def namespaces() -> Namespaces:
    """Return a picture of the names in the notebook's process and in each engine's.

    Modules and the names that every engine is given (`rank`, `device`, ...) are left out.

    Raises:
        ClusterError: No cluster is running.
        RunError: Something else is going on on the engines.
    """
    from IPython.core.getipython import get_ipython

    cluster = session.need_cluster()
    last = f"{_FOUND} = {_FOUND}(dict(globals()), {_OURS!r})\n"
    with ending(cluster):
        task = cluster.execute(_SHOW + last + "del _labs_held, _labs_shorten")
        task.over.wait()
    failure = task.failure()
    if failure is not None:
        raise RunError(failure.what, next_step=failure.next_step, code="WB-RUN-049")
    found = cluster.pull([_FOUND], task.ids)
    shell: Any = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
    hidden = {} if shell is None else shell.user_ns_hidden
    mine: dict[str, Any] = {} if shell is None else dict(shell.user_ns)
    mine = {name: value for name, value in mine.items() if name not in hidden}
    here: dict[str, Any] = {}
    exec(_SHOW, here)  # the same rules on both sides
    return Namespaces(here[_FOUND](mine, _OURS), [found[i][_FOUND] for i in task.ids])
