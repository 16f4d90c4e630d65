"""TensorFlow's generated source files go into the cluster's folder, and with it.

AutoGraph writes each function that it traces to the temporary folder and removes it when the
process exits; an engine that is killed never does. Its maps from generated lines to the user's are
noted, so that errors show what the user wrote (`generated`).
"""

from __future__ import annotations

import functools
import importlib
import tempfile
from types import SimpleNamespace
from typing import Any

from .. import scratch
from . import generated

LOADER = "tensorflow.python.autograph.pyct.loader"


def keep_to_cluster() -> None:
    """Have AutoGraph write into the cluster's folder from now on; may be called again."""
    try:
        loader = importlib.import_module(LOADER)
    except ImportError:  # another version keeps it elsewhere: files are then left as before
        return
    _note_lines(loader)
    folder = scratch.folder()
    if folder is None:
        return
    if hasattr(loader, "tempfile"):
        named = functools.partial(tempfile.NamedTemporaryFile, dir=folder)
        vars(loader)["tempfile"] = SimpleNamespace(NamedTemporaryFile=named)


def _note_lines(loader: Any) -> None:
    """Have every map of lines noted from now on; once."""
    own = getattr(loader, "load_ast", None)
    if own is None or hasattr(own, "notes_lines"):
        return

    @functools.wraps(own)
    def load_ast(*args: Any, **settings: Any) -> Any:
        found = own(*args, **settings)
        module, origins = found[0], found[-1]
        if origins:
            generated.note(module.__file__, origins)
        return found

    vars(load_ast)["notes_lines"] = True
    loader.load_ast = load_ast
