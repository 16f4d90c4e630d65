"""Requests that go out together."""

import threading

import pytest

from workbench.cluster.calls import Gathering


class Loop:
    def __init__(self):
        self.asked, self.running = [], True

    def add_callback(self, callback, *args, **kwargs):
        self.asked.append(lambda: callback(*args, **kwargs))


def test_a_loop_is_woken_once_for_what_is_sent_together_and_keeps_its_order():
    loop, done = Loop(), []
    gathering = Gathering(loop, lambda: done.append("flushed"))
    with gathering.together():
        for number in range(3):
            gathering.add_callback(done.append, number)
        with gathering.together():
            gathering.add_callback(done.append, 3)
        other = threading.Thread(target=lambda: gathering.add_callback(done.append, "other"))
        other.start()
        other.join()
        assert len(loop.asked) == 1  # another thread's does not wait for this one
    assert len(loop.asked) == 2
    for callback in loop.asked:
        callback()
    assert done == ["other", 0, 1, 2, 3, "flushed"]
    gathering.add_callback(done.append, 4)
    assert len(loop.asked) == 3
    assert gathering.running


def test_one_that_cannot_be_sent_keeps_no_other_back_and_an_interrupt_loses_none(caplog):
    loop, done = Loop(), []
    gathering = Gathering(loop)

    def interrupted():
        with gathering.together():
            gathering.add_callback(lambda: 1 / 0)
            gathering.add_callback(done.append, 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    loop.asked[0]()
    assert done == [1]
    assert "be sent" in caplog.text
