"""Files that survive a crash of the machine, and states in a form that files can hold.

A file is written, flushed to disk, and then gets its name. A state (nested dicts, lists,
numbers, tensors) becomes JSON and a flat table of tensors, and can be rebuilt from them. Nothing is
pickled, so reading such a file runs no code from it. Every container stores its kind, so that
tuples, dicts with numbers as keys and counters are rebuilt with the same types:

    {"lr": 0.1, "betas": (0.9, 0.99), "exp_avg": <tensor>}
    -> {"dict": [["lr", 0.1], ["betas", {"tuple": [0.9, 0.99]}], ["exp_avg", {"tensor": "0"}]]}

The states of Python's and NumPy's random generators are stored in the same way.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import FitError

SEE_S, SEE_POLL_S = 3.0, 0.1
"""How long a shared disk may take until one host sees the files of another."""


def blind(path: str, token: str) -> str:
    """Return why this host does not share a folder, or cannot write to it; empty if it does.

    Args:
        path: A file in it that another host has just written.
        token: The content of that file.
    """
    end_s = time.monotonic() + SEE_S
    while True:
        try:
            if Path(path).read_text() == token:
                os.rmdir(tempfile.mkdtemp(prefix=".workbench-", dir=Path(path).parent))
                return ""
            why = "on this host, this path leads to another folder"
        except FileNotFoundError:
            there = Path(path).parent.is_dir()
            why = "on this host, this path leads to another folder"
            why = why if there else "the folder does not exist on this host"
        except OSError as error:
            why = error.strerror or type(error).__name__
        if time.monotonic() > end_s:
            return why
        time.sleep(SEE_POLL_S)


def write_text(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(path: Path) -> None:
    """Wait until every file below a folder, and every name, is on the disk."""
    for folder, _, files in os.walk(path):
        for name in files:
            with open(Path(folder) / name, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(folder))


def rename_folder(old: Path, new: Path) -> None:
    """Give a complete folder its final name, in one operation."""
    sync_folder(old)
    os.rename(old, new)
    sync_folder(new.parent)


def encode(
    state: Any, is_tensor: Callable[[Any], bool], where: str = "state"
) -> tuple[Any, dict[str, Any]]:
    """Return a state in a form for JSON, and its tensors and arrays by name.

    Args:
        is_tensor: Whether a value is one of the framework's tensors.
        where: The state's name in an error.

    Raises:
        FitError: A value is not a number, a text, a tensor or a container of these.
    """
    leaves: dict[str, Any] = {}

    def walk(value: Any, path: str) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray) or is_tensor(value):
            name = str(len(leaves))
            leaves[name] = value
            return {"array" if isinstance(value, np.ndarray) else "tensor": name}
        if isinstance(value, list):
            return [walk(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        kind = _kind(value)
        if kind is None:
            raise FitError(
                f"A checkpoint cannot store {path}: {type(value).__name__} is not an allowed type.",
                allowed="numbers, strings, tensors, arrays, and lists and dicts of these values",
                next_step="convert this value in state_dict(), or train without --checkpoint",
                code="WB-FIT-001",
            )
        if isinstance(value, Mapping):
            pairs = [[walk(k, path), walk(v, f"{path}[{k!r}]")] for k, v in value.items()]
            return {kind: pairs}
        return {kind: [walk(item, path) for item in value]}

    return walk(state, where), leaves


def decode(skeleton: Any, leaves: Mapping[str, Any]) -> Any:
    """Rebuild a state from the result of `encode`."""
    if isinstance(skeleton, list):
        return [decode(item, leaves) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, inside),) = skeleton.items()
    if kind in ("tensor", "array"):
        return leaves[inside]
    if kind == "bytes":
        return bytes.fromhex(inside)
    items = decode(inside, leaves)
    if kind in ("dict", "counter"):
        made = {_key(key): value for key, value in items}
        return made if kind == "dict" else Counter(made)
    return {"tuple": tuple, "set": set, "deque": deque}[kind](items)


def arrays_in(skeleton: Any) -> set[str]:
    """Return the names of the leaves that were NumPy arrays, not the framework's tensors."""
    if isinstance(skeleton, list):
        return set().union(*(arrays_in(item) for item in skeleton))
    if not isinstance(skeleton, dict):
        return set()
    ((kind, inside),) = skeleton.items()
    return {inside} if kind == "array" else arrays_in(inside)


def _kind(value: Any) -> str | None:
    for kind, cls in (
        ("counter", Counter), ("dict", Mapping), ("tuple", tuple), ("set", set), ("deque", deque),
    ):  # fmt: skip
        if isinstance(value, cls):
            return kind
    return None


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def random_state() -> dict[str, Any]:
    """Return the states of the generators."""
    version, numbers, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state()
    return {
        "python": (version, np.array(numbers, np.int64), gauss),
        "numpy": (name, np.asarray(keys, np.int64), place, has_gauss, cached),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set the generators to these states."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(int(n) for n in numbers), gauss))
    name, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.astype(np.uint32), place, has_gauss, cached))
