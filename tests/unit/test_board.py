"""What engines of a run hear from each other."""

import threading

import pytest

from workbench.engine.context import Rendezvous
from workbench.errors import ClusterError


def test_waits_until_all_have_spoken():
    board = Rendezvous()
    board.hear("address", 2, "a")
    later = threading.Timer(0.05, lambda: board.hear("address", 3, "b"))
    later.start()
    assert board.wait("address", [2, 3], timeout_s=10) == {2: "a", 3: "b"}
    later.join()


def test_names_who_is_missing():
    board = Rendezvous()
    board.hear("up", 2, True)
    board.hear("address", 3, "b")
    with pytest.raises(ClusterError, match=r"WB-CLUSTER-025[\s\S]*up[\s\S]*3"):
        board.wait("up", [2, 3], timeout_s=0.01)


def test_the_latest_word_counts():
    board = Rendezvous()
    board.hear("address", 0, "old")
    board.hear("address", 0, "new")
    assert board.wait("address", [0], timeout_s=0) == {0: "new"}
