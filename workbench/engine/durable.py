"""Files that survive the machine: written, flushed to disk, and only then given their name."""

from __future__ import annotations

import os
from pathlib import Path


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
    """Give a folder that is whole its final name, in one go."""
    sync_folder(old)
    os.rename(old, new)
    sync_folder(new.parent)
