"""The instruments of the check: each of its limits must be able to fail."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import uuid

import psutil
import pytest
from drive import SPARE_CELLS, STARTS_ENGINES, Played, cells_of, judge, play, table
from memory import MARK, MB, Memory, marked, role_of
from server import CheckError, Kernel, Server

HELD_MB = 300
FAMILY = f"""
import os, sys, time
held = b"x" * {HELD_MB}_000_000
children = [os.fork() or time.sleep(600) for _ in range(3)]
print(*children, flush=True)
time.sleep(600)
"""


def played(**changes):
    values = {"name": "notebooks/lab_1.ipynb", "cells": 3, "seconds": 9.0, "engines_s": 4.0,
              "peak_bytes": 900_000_000, "parts": {"engines": 600_000_000}}  # fmt: skip
    return Played(**{**values, **changes})


def test_what_is_within_the_limits_is_said_to_be():
    assert judge(2.0, [played(), played(peak_bytes=1_100_000_000)], 60, 2000) == (
        "kept: engines 6.0 s after the server was launched (limit 60), at most 1100 MB (limit 2000)"
    )


@pytest.mark.parametrize(
    ("server_s", "changes", "words"),
    [
        (57.0, {}, "engines after 61 s; allowed: 60 s"),
        (2.0, {"engines_s": None}, "starts no engines"),
        (2.0, {"peak_bytes": 2_000_000_000}, "held 2000 MB; allowed: 2000 MB"),
        (2.0, {"peak_bytes": 0}, "held 0 MB"),  # nothing was seen: not a proof of thrift
    ],
)
def test_what_is_not_kept_fails(server_s, changes, words):
    with pytest.raises(CheckError, match=words):
        judge(server_s, [played(**changes)], 60, 2000)


def test_a_later_notebook_counts_too():
    with pytest.raises(CheckError, match="lab_7"):
        judge(2.0, [played(), played(name="lab_7", peak_bytes=3_000_000_000)], 60, 2000)


def test_the_table_says_who_holds_the_memory():
    text = table(1.5, [played(parts={"server": 80_000_000, "engines": 600_000_000})])
    assert "900 MB  (engines 600, server 80)" in text


def test_markdown_and_empty_cells_are_passed_over(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Lab"], "metadata": {}},
        {"cell_type": "code", "source": ["1 +\n", "1"], "metadata": {}},
        {"cell_type": "code", "source": [], "metadata": {}},
        {"cell_type": "code", "source": ["1 / 0"], "metadata": {"tags": ["raises-exception"]}},
    ]
    path = tmp_path / "one.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert cells_of(path) == [("1 +\n1", False), ("1 / 0", True)]


@pytest.mark.parametrize("source", ["%cluster start 3", "labs.begin(1, engines=3)", SPARE_CELLS])
def test_starting_engines_is_recognised(source):
    assert STARTS_ENGINES.search(source)


def test_memory_that_processes_share_counts_once():
    mark = uuid.uuid4().hex
    with Memory(mark) as memory:
        family = subprocess.Popen(
            [sys.executable, "-c", FAMILY], env={**os.environ, MARK: mark},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert family.stdout is not None
            children = {int(word) for word in family.stdout.readline().split()}
            found = marked(mark)
            assert {one.pid for one in found} == {family.pid, *children}
            assert {role_of(one) for one in found} == {"others"}
            memory.wait_for_sample()
        finally:
            for one in marked(mark):
                one.kill()
            family.wait()
            family.stdout.close()
    assert HELD_MB < memory.peak_bytes / MB < 2 * HELD_MB
    assert memory.parts == {"others": memory.peak_bytes}


@pytest.mark.cluster
def test_a_notebook_is_run_through_a_server_and_nothing_stays():
    async def go():
        with Server() as server:
            await server.wait(120)
            kernel = await Kernel.start(server, "notebooks/none.ipynb")
            roles = {role_of(one) for one in marked(server.mark)}
            errors = [await kernel.execute("x = 1"), await kernel.execute("assert x == 2, 'no'")]
            folder = await kernel.execute("import os; assert os.path.exists('00_quickstart.ipynb')")
            await kernel.close()
            with pytest.raises(CheckError, match=r"code cell 2: ZeroDivisionError"):
                await play(server, "notebooks/no.ipynb", [("1", False), ("1 / 0", False)])
            fine = await play(server, "notebooks/yes.ipynb", [("1 / 0", True), ("1", False)])
        return server, roles, errors, folder, fine

    server, roles, errors, folder, fine = asyncio.run(go())
    assert roles == {"server", "kernels"}
    assert errors == ["", "AssertionError: no"]
    assert folder == ""  # a notebook's kernel works in the notebook's folder
    assert (fine.cells, fine.engines_s) == (2, None)
    assert not marked(server.mark)
    assert not psutil.pid_exists(server.process.pid)
