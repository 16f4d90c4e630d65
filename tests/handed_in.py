"""Notebooks as students hand them in, for a lab of a few cells that runs in seconds."""

from __future__ import annotations

import contextlib
import ctypes
import json
import uuid
from pathlib import Path
from typing import Any

import psutil

BEGIN = "import workbench as wb\nfrom workbench import labs\n\nlabs.begin(1, engines=3)"
TORCH = "%%distributed\nimport torch"
STUBS = {
    "1.1": "%%distributed\n# YOUR CODE 1.1\nsquare = None",
    "1.2": "# YOUR CODE 1.2\ntotal = None",
    "1.3": "%%distributed\n# YOUR CODE 1.3\nmean = None",
    "1.5": "# YOUR CODE 1.5\ndef crossing_s(n, c_s):\n    ...",
}
GOOD = {
    "1.1": "%%distributed\n# YOUR CODE 1.1\nsquare = rank**2",
    "1.2": "# YOUR CODE 1.2\n%pull square\ntotal = sum(square)",
    "1.3": "%%distributed\n# YOUR CODE 1.3\npart = torch.arange(float(rank**2 + 1)) + rank\n"
    "both = torch.tensor([part.sum().item(), len(part)])\ndist.all_reduce(both)\n"
    "mean = (both[0] / both[1]).item()",
    "1.5": "# YOUR CODE 1.5\ndef crossing_s(n, c_s):\n    return c_s * n / (n - 1)",
}


def code(source: str, id: str = "", tags: tuple[str, ...] = (), **ours: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"tags": list(tags)}
    if ours:
        metadata["workbench"] = ours
    cell = {"cell_type": "code", "source": source, "metadata": metadata, "outputs": []}
    return {**cell, "id": id, "execution_count": None}


def text(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "source": source, "metadata": {}}


def cells(answers: dict[str, str] | None = None, numbers: Any = tuple(STUBS)) -> list[Any]:
    """The lab's cells with these answers; all other cells are empty."""
    made = [text("# A lab"), code(BEGIN, "a", ("step",)), code(TORCH, "b", ("step",))]
    for number in numbers:
        answer = (answers or {}).get(number, STUBS[number])
        made.append(text(f"## {number}"))
        made.append(code(answer, f"x{number[-1]}", exercise=number))
        made.append(code(f'labs.check("{number}")', f"c{number[-1]}", check=number))
    return [*made, code("labs.progress(1)", "z", ("step",))]


def book(made: list[Any], lab: int | None = 1) -> dict[str, Any]:
    metadata = {} if lab is None else {"workbench": {"lab": lab, "version": "student"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def write(path: Path, made: list[Any], lab: int | None = 1) -> Path:
    path.write_text(json.dumps(book(made, lab)), encoding="utf-8")
    return path


def hand_in(folder: Path, name: str, **answers: str) -> Path:
    """Write a notebook with correct answers, except these: `e1_2="..."`."""
    given = {key[1:].replace("_", "."): f"# YOUR CODE {key[1:].replace('_', '.')}\n{value}"
             for key, value in answers.items()}  # fmt: skip
    for number, source in given.items():
        if GOOD[number].startswith("%%"):
            given[number] = "%%distributed\n" + source
    return write(folder / f"{name}.ipynb", cells({**GOOD, **given}))


# -- processes that try to outlive their notebook

TAG = uuid.uuid4().hex
"""An argument of processes that try to outlive their notebook."""

SLEEP = f"[sys.executable, '-c', 'import time; time.sleep(600)', '{TAG}']"
ESCAPE = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        os.execve(sys.executable, {SLEEP}, {{}})
    os._exit(0)
"""


def tagged():
    """The living processes that were started to survive their notebook."""
    return _living(lambda process: TAG in process.cmdline())


def of_folder(folder):
    """The living processes that were told to keep their files there."""
    return _living(lambda process: process.environ().get("TMPDIR", "").startswith(str(folder)))


def _living(is_meant):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if is_meant(process) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


_CAPBSET_DROP = 24
_OVERRIDE = {"DAC_OVERRIDE": 1, "DAC_READ_SEARCH": 2}
_TRACE = {"SYS_PTRACE": 19, "SYS_ADMIN": 21, "PERFMON": 38}


def without_rights():
    """In a starting process: give up root's rights over files and processes (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        for right in {**_OVERRIDE, **_TRACE}.values():
            ctypes.CDLL(None).prctl(_CAPBSET_DROP, right, 0, 0, 0)
