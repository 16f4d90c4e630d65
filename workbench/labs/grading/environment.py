"""What of the grader's environment a notebook sees, and where it is told to keep its files."""

from __future__ import annotations

import contextlib
import os
import shutil
import site
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .processes import MARK

_KEPT = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX",
    "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME", "SYSTEMROOT", "WORKBENCH_MAX_ENGINES", "WORKBENCH_DEVICES", "WORKBENCH_HOSTS",
    "WORKBENCH_IDLE_TIMEOUT",
)  # fmt: skip
"""What of the grader's environment a notebook sees: no secret has one of these names."""

_SWEEPS = 20
_PACKAGES = str(Path(__file__).resolve().parents[3])


PLACES = {
    "HOME": "home", "TMPDIR": "t", "WORKBENCH_HOME": "runs", "IPYTHONDIR": "ipython",
    "JUPYTER_CONFIG_DIR": "jupyter", "JUPYTER_DATA_DIR": "jupyter", "MPLCONFIGDIR": "plots",
    "JUPYTER_RUNTIME_DIR": "jupyter", "XDG_CACHE_HOME": "home", "XDG_CONFIG_HOME": "home",
    "XDG_DATA_HOME": "home", "TORCHINDUCTOR_CACHE_DIR": "home", "KERAS_HOME": "home",
}  # fmt: skip
"""Where a notebook is told to keep what, in its own folder."""


def kept() -> dict[str, str]:
    """Return what is taken over from our own environment."""
    found = {name: os.environ[name] for name in _KEPT if name in os.environ}
    if site.ENABLE_USER_SITE:
        found["PYTHONUSERBASE"] = site.getuserbase()
    else:  # nor may packages be found in the `HOME` that we give it
        found["PYTHONNOUSERSITE"] = "1"
    paths = [os.path.abspath(p) for p in found.get("PYTHONPATH", "").split(os.pathsep) if p]
    found["PYTHONPATH"] = os.pathsep.join([*paths, *({_PACKAGES} - set(paths))])
    return found


def environment(folder: Path, mark: str) -> dict[str, str]:
    """Return the environment of a notebook that lives in `folder`."""
    for place in {*PLACES.values(), "work"}:
        (folder / place).mkdir(parents=True, exist_ok=True)
    ours = {name: str(folder / place) for name, place in PLACES.items()}
    fixed = {"PYTHONHASHSEED": "0", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    return {**kept(), **ours, **fixed, MARK: mark, "USER": "student"}


def remove(folder: Path) -> None:
    """Remove a folder, also parts that its owner may not write; what is above it stays as it is."""
    top = os.fspath(folder)

    def allow(_: Callable[..., Any], path: str, __: object) -> None:
        for one in (path, os.path.dirname(path)) if path != top else (path,):
            with contextlib.suppress(OSError):
                if not os.path.islink(one):
                    os.chmod(one, stat.S_IRWXU)

    for _ in range(_SWEEPS):  # what one opens, the next removes
        if os.path.islink(top) or os.path.isfile(top):
            with contextlib.suppress(OSError):
                os.unlink(top)
        if not os.path.lexists(top):
            return
        with contextlib.suppress(OSError, RecursionError):
            shutil.rmtree(top, onerror=allow)
    with contextlib.suppress(OSError):  # folders in folders, deeper than Python can follow
        subprocess.run(["rm", "-rf", "--", top], check=False, capture_output=True)
