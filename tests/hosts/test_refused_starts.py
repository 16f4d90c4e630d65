"""What keeps engines of other hosts from starting is said in time, with what to do."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
from collections.abc import Iterator

import pytest
from hosts.on_hosts import left
from hosts.simulated_hosts import KERNEL, SimulatedHosts
from notebook_shell import Notebook, notebook, soon

PORTS = range(23400, 23420)


@pytest.fixture(scope="module")
def book(reached: SimulatedHosts) -> Iterator[Notebook]:
    with notebook(fresh=True) as book:
        yield book


@pytest.fixture(autouse=True)
def nothing_there(reached: SimulatedHosts) -> Iterator[None]:
    """After each start that failed nothing is left on the hosts."""
    yield
    assert soon(lambda: not left(reached), 10), left(reached)


def refused(book: Notebook, line: str, *words: str, within_s: float) -> None:
    cell = book.refused(f"%cluster start 2 --launcher ssh {line}", *words)
    assert re.search(r"\[WB-[A-Z]+-\d+\]\n", str(cell.error))
    assert "next:" in str(cell.error)
    assert cell.seconds < within_s, cell.seconds
    assert "Traceback" not in cell.stderr


@pytest.mark.timing
def test_a_host_that_refuses_the_user_is_named(book: Notebook) -> None:
    refused(book, "--on nobody@xh1,xh2", "ssh nobody@xh1", "denied", within_s=8)


@pytest.mark.timing
def test_an_unknown_host_is_named(book: Notebook) -> None:
    refused(book, "--on nowhere.invalid", "nowhere.invalid", within_s=8)


@pytest.mark.timing
def test_an_unknown_host_that_is_not_the_first_is_named(book: Notebook) -> None:
    refused(book, "--on xh1,nowhere.invalid", "nowhere.invalid", within_s=10)


@pytest.mark.timing
def test_a_missing_interpreter_is_named(book: Notebook) -> None:
    refused(
        book,
        "--on xh1,xh2 --launcher-option python=/opt/none/python",
        "/opt/none/python",
        "ssh xh",
        within_s=8,
    )


@pytest.mark.timing
def test_an_interpreter_without_workbench_is_named(book: Notebook) -> None:
    refused(
        book,
        "--on xh1,xh2 --launcher-option python=/usr/bin/python3",
        "/usr/bin/python3",
        "pip install",
        "python=/path/to/python",
        within_s=8,
    )


@pytest.mark.timing
def test_an_address_that_hosts_cannot_reach_is_named(book: Notebook) -> None:
    refused(
        book,
        "--on xh1,xh2 --listen 127.0.0.1",
        "127.0.0.1",
        "--listen",
        within_s=20,
    )


@pytest.mark.timing
def test_ports_that_are_all_taken_are_named(book: Notebook) -> None:
    with contextlib.ExitStack() as held:
        for port in PORTS:
            held.enter_context(socket.create_server((KERNEL, port)))
        said = f"{PORTS[0]}-{PORTS[-1]}"
        refused(book, f"--on xh1,xh2 --ports {said}", str(PORTS[0]), "--ports", within_s=10)


@pytest.mark.timing
def test_another_python_is_named_with_both_versions(
    book: Notebook, reached: SimulatedHosts
) -> None:
    folder = reached.shared / "other"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        "import platform\nplatform.python_version = lambda: '3.9.1'\n"
    )
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH={folder}:$PYTHONPATH\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    refused(
        book,
        f"--on xh1,xh2 --launcher-option python={python}",
        "python 3.9.1 on xh1",
        "on the notebook",
        within_s=10,
    )


@pytest.mark.timing
def test_a_host_that_is_not_there_is_named(book: Notebook, reached: SimulatedHosts) -> None:
    reached.link("xh2", up=False)
    try:
        refused(book, "--on xh1,xh2", "ssh xh2", within_s=20)
    finally:
        reached.link("xh2", up=True)
        assert soon(lambda: reached.is_up("xh2"))


@pytest.mark.timing
def test_a_host_whose_agent_never_answers_is_given_up(
    book: Notebook, reached: SimulatedHosts
) -> None:
    python = reached.shared / "mute"
    python.write_text("#!/bin/sh\ncat > /dev/null\n")
    python.chmod(0o755)
    refused(
        book,
        f"--on xh1,xh2 --launcher-option python={python} --start-timeout 4s",
        "Only 0 of 2 hosts",
        within_s=12,
    )
