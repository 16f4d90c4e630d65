"""What an engine says around a request, with a kernel and streams that are made up."""

import logging
import os
import threading
import time
from types import SimpleNamespace

import pytest

from workbench.engine import entry

OURS = {"metadata": {entry.OURS: True}, "header": {"msg_id": "a"}}
THEIRS = {"metadata": {}, "header": {"msg_id": "b"}}


class Kernel:
    def __init__(self):
        self.said, self.handled, self.aborted = [], [], set()
        self.parent, self.log = OURS, logging.getLogger("test-answers")

    def get_parent(self, channel):
        return self.parent

    def _publish_status(self, status, channel, parent=None):
        self.said.append(status)

    def init_metadata(self, parent):
        return {"started": "2026-01-01", "engine": "x"}

    def should_handle(self, stream, message, idents):
        self.handled.append(message["header"]["msg_id"])
        return message["header"]["msg_id"] not in self.aborted


def test_our_requests_are_answered_briefly_and_others_as_ever():
    kernel = Kernel()
    entry.shorten(kernel)
    for parent in (OURS, THEIRS):
        kernel.parent = parent
        kernel._publish_status("busy", "shell")
        kernel._publish_status("idle", "shell")
    assert kernel.said == ["idle", "busy", "idle"]
    assert kernel.init_metadata(OURS) == {"engine": "x"}
    assert "started" in kernel.init_metadata(THEIRS)
    assert kernel.should_handle(None, OURS, [])
    assert kernel.should_handle(None, THEIRS, [])
    assert kernel.handled == ["b"]
    kernel.aborted.add("a")
    assert not kernel.should_handle(None, OURS, [])


class Stream:
    """As ipykernel's: a thread of its own reads what comes through the pipe."""

    name, flush_timeout = "stdout", 1.0

    def __init__(self, copy):
        self._fid, self._original_stdstream_fd = os.pipe()
        self._original_stdstream_copy = os.open(copy, os.O_WRONLY | os.O_CREAT)
        self._should_watch, self._flush_pending = True, False
        self.printed, self.sent, self.slow_s = [], [], 0.0
        self.watch_fd_thread = threading.Thread(target=self._watch_pipe_fd, daemon=True)
        self.watch_fd_thread.start()

    def _watch_pipe_fd(self):
        data = os.read(self._fid, 100)
        while data and self._should_watch:
            self.write(data.decode())
            data = os.read(self._fid, 100)

    def write(self, text):
        time.sleep(self.slow_s)
        self.printed.append(text)
        self._flush_pending = True

    def flush(self):
        self.sent.append("".join(self.printed))
        self._flush_pending = False

    def close(self):
        self._should_watch = False
        os.write(self._original_stdstream_fd, b"\0")
        self.watch_fd_thread.join()
        for number in (self._fid, self._original_stdstream_fd, self._original_stdstream_copy):
            os.close(number)


@pytest.fixture
def stream(tmp_path):
    stream = Stream(tmp_path / "log")
    entry.brief(stream)
    yield stream
    stream.close()


def test_a_stream_that_nobody_printed_to_is_not_flushed(stream):
    stream.flush()
    assert stream.sent == []
    stream.write("x")
    stream.flush()
    stream.flush()
    assert stream.sent == ["x"]


def test_what_c_code_printed_last_is_there_when_the_stream_is_flushed(stream, tmp_path):
    stream.slow_s = 0.01  # the stream's thread has read it and is at it
    for number in range(20):
        os.write(stream._original_stdstream_fd, f"{number} ".encode())
        if number % 2:
            time.sleep(0.001)
        stream.flush()
        assert "".join(stream.printed).split() == [str(n) for n in range(number + 1)]
    assert stream.sent[-1] == "".join(stream.printed)
    assert (tmp_path / "log").read_text() == "".join(stream.printed)


def test_a_letter_of_several_bytes_may_come_in_pieces(stream):
    packed = "é".encode()
    os.write(stream._original_stdstream_fd, packed[:1])
    stream.flush()
    os.write(stream._original_stdstream_fd, packed[1:])
    stream.flush()
    assert "".join(stream.printed) == "é"


def test_what_comes_while_nobody_flushes_is_read_too(stream):
    os.write(stream._original_stdstream_fd, b"from a child")
    end = time.monotonic() + 5
    while not stream.printed and time.monotonic() < end:
        time.sleep(0.01)
    assert stream.printed == ["from a child"]


class Hesitating(Stream):
    """Its reader, once it knows that it is to go on, waits to be told so."""

    hesitates, knows, goes_on = False, threading.Event(), threading.Event()

    @property
    def _should_watch(self):
        should = self._should
        if self.hesitates and threading.current_thread() is self.watch_fd_thread:
            self.knows.set()
            self.goes_on.wait(30)
        return should

    @_should_watch.setter
    def _should_watch(self, should):
        self._should = should


def test_a_stream_that_is_closed_while_its_reader_is_at_it_ends(tmp_path):
    stream = Hesitating(tmp_path / "log")
    entry.brief(stream)
    stream.hesitates = True
    os.write(stream._original_stdstream_fd, b"x")
    assert stream.knows.wait(30)
    stream.flush()  # has read what woke the reader
    stream._should_watch = False
    os.write(stream._original_stdstream_fd, b"\0")
    stream.goes_on.set()
    stream.watch_fd_thread.join(10)
    assert not stream.watch_fd_thread.is_alive()
    stream.close()


def test_streams_that_are_not_ipykernels_stay_as_they_are():
    plain = SimpleNamespace(flush=print)
    entry.brief(plain)
    assert plain.flush is print
