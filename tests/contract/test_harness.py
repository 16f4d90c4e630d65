"""The harness of this suite: cells run as in an engine, and what they leave behind is seen."""

from __future__ import annotations

from typing import Any

import pytest
from worker_reports import clean
from workers import Workers

from workbench.engine.testing import CollectingLink

pytestmark = pytest.mark.torch


def where_cells_run() -> list[str]:
    import inspect

    return [frame.function for frame in inspect.stack()]


def leaves(what: str) -> None:
    import os
    import socket
    import threading

    import torch

    global kept
    if what == "a thread":
        kept = threading.Event()
        threading.Thread(target=kept.wait, name="left over", daemon=True).start()
    elif what == "a socket":
        kept = socket.socketpair()
    elif what == "a variable":
        os.environ["LEFT_OVER"] = "yes"
    elif what == "a patch":
        torch.Tensor.backward = lambda self: None


def test_cells_run_below_the_engines_run_cell(workers: Workers) -> None:
    (report,) = clean(workers.run("one_device", where_cells_run))
    assert {"run_cell", "_train", "_execute"} <= set(report.value)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("a thread", "threads: {'left over'}"), ("a socket", "sockets: "),
        ("a variable", "environ changed"), ("a patch", "backward changed"),
    ],
)  # fmt: skip
def test_what_a_cell_leaves_behind_is_named(what: str, named: str) -> None:
    pool = Workers(1)
    try:
        (report,) = pool.run("one_device", leaves, what)
        assert report.error is None
        assert any(text.startswith(named) for text in report.left), report.left
    finally:
        pool.close()


def test_what_others_said_before_a_run_began_is_heard_by_it() -> None:
    heard: list[Any] = []

    class Board:
        def hear(self, *said: Any) -> None:
            heard.append(said)

    class Run:
        board = Board()

    link = CollectingLink()
    link.hear("address", 1, "here")
    assert heard == []
    link.attach(Run(), None)  # type: ignore[arg-type]
    link.hear("address", 2, "there")
    assert heard == [("address", 1, "here"), ("address", 2, "there")]
