"""Checksums: what is read from a disk is what was written there, or is refused by name.

CRC-32 finds every flipped bit and every burst of up to 32; it costs about 0.3 ms per MB. It is no
proof against somebody who means it: read only folders that you trust (`docs/security.md`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Sums = dict[str, list[int]]
"""Bytes and CRC-32 of each file, by its path below a folder. Without the CRC: the bytes alone."""

_CHUNK_BYTES = 1 << 20
_SEAL = "checksum"


def of_file(path: Path) -> list[int]:
    """Return a file's bytes and CRC-32."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def of_folder(folder: Path, prefix: str = "") -> Sums:
    """Return those of all files below a folder, their names after `prefix`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {prefix + path.relative_to(folder).as_posix(): of_file(path) for path in files}


def fault(path: Path, written: Sequence[int]) -> str:
    """Return what is wrong with a file, as in `is missing`; empty where it is as it was written.

    Args:
        written: Its bytes and, where they are known, its CRC-32.
    """
    try:
        size = path.stat().st_size
        # Without a checksum it may have grown since: rows and events are appended.
        if size < written[0] or (len(written) > 1 and size != written[0]):
            return f"has {size} of {written[0]} bytes"
        if len(written) > 1 and of_file(path) != list(written):
            return "is not what was written (its checksum differs)"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or type(error).__name__})"
    return ""


def faults(folder: Path, written: Mapping[str, Sequence[int]]) -> list[str]:
    """Return what is wrong with a folder's files: `state/arrays.index is missing`."""
    found = ((name, fault(folder / name, sums)) for name, sums in written.items())
    return [f"{name} {what}" for name, what in found if what]


def sealed(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a JSON file says, with a checksum of it."""
    plain = {key: value for key, value in about.items() if key != _SEAL}
    return {**plain, _SEAL: _crc(plain)}


def is_as_sealed(about: Mapping[str, Any]) -> bool:
    """Whether a JSON file says what was written; of one without a checksum nobody knows."""
    plain = {key: value for key, value in about.items() if key != _SEAL}
    return _SEAL not in about or about[_SEAL] == _crc(plain)


def _crc(about: Mapping[str, Any]) -> int:
    # By way of JSON: keys become texts and tuples lists, as they are when it is read.
    plain = json.loads(json.dumps(about))
    return zlib.crc32(json.dumps(plain, sort_keys=True).encode())
