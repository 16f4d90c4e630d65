"""`%cluster logs`: the last lines of the engines' logs, and what comes."""

import threading

import psutil
import pytest
from needs import need
from notebook_shell import interrupt_main_thread

from workbench.notebook.session import session
from workbench.session import logs

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")


def test_logs_of_several_ranks_with_so_many_lines(book):
    book.ok("%%distributed\nimport os\nfd = os.open(os.environ.get('NONE', '/dev/null'), 1)")
    for engine in (0, 1):
        path = session.cluster.engine_set.log_path(engine)
        with path.open("a") as file:
            file.write("".join(f"line {i} of {engine}\n" for i in range(60)))
    said = book.ok("%cluster logs 0,1 -n 3").stdout
    for engine in (0, 1):
        expected = "".join(f"line {i} of {engine}\n" for i in (57, 58, 59))
        assert f"--- engine {engine}\n{expected}" in said
    assert len(book.ok("%cluster logs -n 2 1").stdout.splitlines()) == 3
    assert len(book.ok("%cluster logs 1").stdout.splitlines()) == 1 + logs.LINES


def test_logs_are_followed_until_interrupted(book, monkeypatch):
    path = session.cluster.engine_set.log_path(1)
    turns = []

    def turn(seconds):
        turns.append(seconds)
        with path.open("a") as file:
            file.write(f"turn {len(turns)}\nhalf")
        if len(turns) == 3:
            interrupt_main_thread()
            threading.Event().wait(10)

    monkeypatch.setattr(logs.follow, "__defaults__", (turn,))
    cell = book.ok("%cluster logs 1 -f -n 0")
    *_, turn, half, ended = cell.stdout.splitlines()
    assert (turn, half, ended[:4]) == ("turn 1", "halfturn 2", "--- ")


def test_logs_are_followed_until_the_engine_is_gone(book):
    killer = threading.Timer(0.5, psutil.Process(session.cluster.engines[1].pid).kill)
    killer.start()
    cell = book.ok("%cluster logs 1 --follow")
    assert cell.stdout.splitlines()[-1] == "--- engine 1 has ended"
    book.ok("%cluster restart 1")
