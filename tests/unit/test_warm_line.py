"""The warm parent's side: what it hears of its owner, and what it imports meanwhile."""

import math
import socket

import pytest

from workbench.cluster.forkserver import preload
from workbench.cluster.forkserver.server import OwnerLine


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield OwnerLine(ours), theirs


def test_messages_come_whole_whatever_the_pieces(pair):
    line, owner = pair
    owner.sendall(b'{"id": 1}\n{"id"')
    assert line.receive() == [{"id": 1}]
    owner.sendall(b": 2}\n")
    assert line.receive() == [{"id": 2}]


def test_an_owner_that_is_gone_is_noticed_and_its_last_words_are_heard(pair):
    line, owner = pair
    owner.sendall(b'{"cmd": "guard"}\n{"cmd": "guard_dir"}\n{"cm')
    owner.close()
    assert line.rest() == [{"cmd": "guard"}, {"cmd": "guard_dir"}]
    assert line.receive() is None
    assert not line.send({})


def test_another_owner_inherits_no_half_message(pair):
    line, before = pair
    before.sendall(b'{"id"')
    assert line.receive() == []
    ours, owner = socket.socketpair()
    with owner:
        line.change(ours)
        assert before.recv(1) == b""
        assert line.send({"event": "ready"})
        assert owner.recv(100) == b'{"event": "ready"}\n'
        owner.sendall(b'{"id": 1}\n')
        assert line.receive() == [{"id": 1}]
        line.close()


def test_modules_are_imported_one_by_one_when_nobody_wants_anything(monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(preload, "import_if_safe", seen.append)
    monkeypatch.setitem(preload.SECOND_STAGE, "torch", ("a",))
    stage = preload.SecondStage("torch", ["b"])
    assert stage.due_s == 0
    assert not stage.go_on()
    stage.touch(3600)
    assert not stage.go_on()
    assert 3000 < stage.due_s <= 3600
    assert seen == ["a"]
    rest = preload.SecondStage("torch")
    assert rest.go_on()  # that was the last one
    assert rest.due_s == math.inf
    assert not rest.go_on()


def test_many_engines_wait_for_the_import_that_each_would_repeat(monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(preload, "import_if_safe", seen.append)
    monkeypatch.setattr(preload.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setitem(preload.SECOND_STAGE, "torch", (preload.FIRST_STEP, "b"))
    stage = preload.SecondStage("torch")
    few = 2 * preload.MANY_PER_CORE - 1
    stage.before(few)
    assert seen == []
    for _ in range(2):  # the second fork imports nothing more: the rest waits for a quiet time
        stage.before(few + 1)
        assert seen == [preload.FIRST_STEP]
    assert stage.waiting == ["b"]
    assert stage.go_on()


def test_many_engines_of_tensorflow_wait_for_nothing(monkeypatch):
    monkeypatch.setattr(preload, "import_if_safe", lambda name: pytest.fail(name))
    stage = preload.SecondStage("tensorflow")
    stage.before(1000)
    assert stage.waiting == [*preload.SECOND_STAGE["tensorflow"]]
