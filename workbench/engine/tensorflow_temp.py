"""TensorFlow's generated source files go into the cluster's folder, and with it.

AutoGraph writes each function that it traces to the temporary folder and removes it when the
process exits; an engine that is killed never does.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
from types import SimpleNamespace

from .. import scratch

LOADER = "tensorflow.python.autograph.pyct.loader"


def keep_to_cluster() -> None:
    """Have AutoGraph write into the cluster's folder from now on; may be called again."""
    folder = scratch.folder()
    if folder is None:
        return
    try:
        loader = importlib.import_module(LOADER)
    except ImportError:  # another version keeps it elsewhere: files are then left as before
        return
    if hasattr(loader, "tempfile"):
        named = functools.partial(tempfile.NamedTemporaryFile, dir=folder)
        vars(loader)["tempfile"] = SimpleNamespace(NamedTemporaryFile=named)
