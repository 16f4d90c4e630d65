"""What kept clusters are made of, without a cluster."""

import json
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from workbench.cluster import folders
from workbench.cluster.forkserver import owner
from workbench.devices.leases import DevicePool
from workbench.engine import kernel_watch
from workbench.engine.activity_log import SEGMENT_BYTES, Diary, tee
from workbench.errors import PlanError
from workbench.history.disk import Tail
from workbench.session.attach import _Outputs
from workbench.session.keeping import KEPT_IDLE_S, Keeping, _idle_s, idle_words
from workbench.shared.cluster_env import PAGE_BYTES, Page, last_page
from workbench.shared.magic_args import parse_cluster_line
from workbench.shared.messages import CellOutcome
from workbench.shared.record import RECORD


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "doing").mkdir()
    return tmp_path


# -- the engine's diary ----------------------------------------------------------------------------


def test_outputs_are_read_back_once_and_in_order(folder):
    diary, outputs = Diary(folder, 3, outputs=True), _Outputs(folder, 3)
    diary.output("stream", {"text": "before any call"})
    diary.begin("a", "run base")
    diary.output("stream", {"text": "one"})
    diary.output("status", {"execution_state": "busy"})
    assert [content["text"] for _, content in outputs.fresh()] == ["one"]
    diary.output("display_data", {"data": {}})
    assert [kind for kind, _ in outputs.fresh()] == ["display_data"]
    assert list(outputs.fresh()) == []
    diary.end(CellOutcome(status="ok"))
    page = last_page(folder / "doing" / "engine-3.jsonl")
    assert (page["busy"], page["call"], page["outcome"]) == (False, "a", {"status": "ok"})
    assert {path.stat().st_mode & 0o777 for path in (folder / "doing").iterdir()} == {0o600}


def test_of_endless_output_the_beginning_and_the_latest_are_kept(folder):
    diary = Diary(folder, 0, outputs=True)
    diary.begin("a", "a cell")
    for number in range(40):
        diary.output("stream", {"name": "stdout", "text": f"{number} {'x' * (SEGMENT_BYTES // 2)}"})
    size = sum(path.stat().st_size for path in (folder / "doing").iterdir())
    assert size < 10 * SEGMENT_BYTES
    texts = [content["text"] for _, content in _Outputs(folder, 0).fresh()]
    assert texts[0].startswith("0 ")
    assert texts[-1].startswith("39 ")
    assert sum("deleted" in text for text in texts) == 1
    diary.begin("b", "a cell")
    assert list(_Outputs(folder, 0).fresh()) == []


def test_a_half_written_line_is_read_when_it_is_whole(folder):
    path, outputs = folder / "doing" / "out-0-000000.jsonl", _Outputs(folder, 0)
    path.write_text('["stream", {"te')
    assert list(outputs.fresh()) == []
    path.write_text('["stream", {"text": "x"}]\n')
    assert list(outputs.fresh()) == [("stream", {"text": "x"})]


def test_what_is_sent_goes_on_and_is_written_down(folder):
    diary, sent = Diary(folder, 0, outputs=True), []
    send = tee(
        lambda stream, what, content=None, **rest: sent.append((what, content)), lambda: diary
    )
    diary.begin("a", "a cell")
    send(None, "stream", {"text": "1"}, parent={})
    send(None, {"msg_type": "display_data", "content": {"text": "2"}}, ident=b"x")
    assert len(sent) == 2
    assert [content["text"] for _, content in _Outputs(folder, 0).fresh()] == ["1", "2"]


# -- a run's folder --------------------------------------------------------------------------------


def rows(rank, *steps):
    made = np.zeros(len(steps), RECORD)
    made["rank"], made["step"] = rank, steps
    return made.tobytes()


def test_rows_are_read_once_whenever_they_come_and_never_by_halves(tmp_path):
    tail, first, second = Tail(tmp_path), *(tmp_path / f"records-rank{r}.bin" for r in (0, 1))
    first.write_bytes(rows(0, 0, 1, 2)[:-5])
    assert [one["step"].tolist() for one in tail.rows()] == [[0, 1]]
    with first.open("ab") as file:
        file.write(rows(0, 2)[-5:] + rows(0, 3))
    second.write_bytes(rows(1, 0))
    assert [(one["rank"][0], one["step"].tolist()) for one in tail.rows()] == [
        (0, [2, 3]),
        (1, [0]),
    ]
    assert list(tail.rows()) == []


def test_events_are_read_once_and_damaged_ones_left_out(tmp_path):
    tail, path = Tail(tmp_path), tmp_path / "events-rank0.jsonl"
    lines = [json.dumps({"name": name, "t_s": t_s}) for name, t_s in (("b", 2), ("a", 1))]
    (path.write_text("\n".join([lines[0], "{", lines[1], '{"name": "c'])),)
    assert [name for name, _ in tail.events()] == ["a", "b"]
    with path.open("a") as file:
        file.write('"}\n')
    assert [name for name, _ in tail.events()] == ["c"]


# -- the door --------------------------------------------------------------------------------------


def test_the_door_lets_this_user_in_and_waits_for_nobody(tmp_path):
    deep = tmp_path / ("long" * 30)
    deep.mkdir()
    entry = owner.Door(deep, "warm")
    assert entry.path.stat().st_mode & 0o777 == 0o600
    answers = []

    def serve():
        while (came := entry.answer()) is None:
            time.sleep(0.01)
        answers.append(came[1])
        came[0].sendall(b'{"children": {}}\n{"event": "next"}\n')
        came[0].close()

    server = threading.Thread(target=serve)
    server.start()
    sock, answer = owner.knock(entry.path, {"pid": 7})
    server.join(5)
    assert (answer, answers) == ({"children": {}}, [{"cmd": "own", "pid": 7}])
    assert sock.recv(100) == b'{"event": "next"}\n', "what follows is left to whoever reads next"
    sock.close()
    entry.close()
    with pytest.raises(OSError, match="No such file"):
        owner.knock(entry.path, {})


def test_who_says_nothing_is_shown_out(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "KNOCK_S", 0.05)
    entry = owner.Door(tmp_path, "warm")
    with owner.socket.socket(owner.socket.AF_UNIX) as mute:
        mute.connect(str(entry.path))
        assert entry.answer() is None
        assert mute.recv(1) == b""
    entry.close()


def test_who_does_not_come_to_an_end_is_shown_out(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "MAX_LINE_BYTES", 1000)
    entry = owner.Door(tmp_path, "warm")
    with owner.socket.socket(owner.socket.AF_UNIX) as endless:
        endless.connect(str(entry.path))
        endless.sendall(b'{"cmd": "own", "pid": "' + b"7" * 2000)
        assert entry.answer() is None
    entry.close()


def test_an_answer_that_is_cut_off_is_an_error_and_a_long_one_is_not(tmp_path):
    entry = owner.Door(tmp_path, "warm")
    exits = [{"event": "exit", "pid": pid} for pid in range(4000)]
    said = [json.dumps({"exits": exits}).encode() + b"\n", b'{"exits": [']

    def serve():
        for answer in said:
            while (came := entry.answer()) is None:
                time.sleep(0.01)
            with came[0]:
                came[0].sendall(answer)

    server = threading.Thread(target=serve)
    server.start()
    sock, answer = owner.knock(entry.path, {})
    sock.close()
    assert answer == {"exits": exits}
    with pytest.raises(OSError, match="incomplete"):
        owner.knock(entry.path, {})
    server.join(5)
    entry.close()


# -- where the notebook is -------------------------------------------------------------------------


def test_a_kept_engine_learns_the_next_notebooks_address(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_watch, "LOOK_S", 0.0)
    kept = kernel_watch.KeptHome(tmp_path)
    assert kept.moved() == ""
    (tmp_path / kernel_watch.CONTROL).write_text("{")
    assert kept.moved() == ""
    folders.write_json(tmp_path / kernel_watch.CONTROL, {"url": "tcp://127.0.0.1:5"})
    assert kept.moved() == "tcp://127.0.0.1:5"
    assert kept.moved() == ""


def test_an_engine_ends_when_its_last_notebook_has_gone_for_good(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(kernel_watch, "_end", ended.set)
    context = zmq.Context()
    notebook, engine = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = notebook.bind_to_random_port("tcp://127.0.0.1")
    last = kernel_watch.LastHome(0.3)
    last.watch(engine)
    engine.connect(f"tcp://127.0.0.1:{port}")
    engine.send(b"hello")
    assert notebook.poll(5000)
    assert last.moved() == ""
    assert not ended.is_set()
    notebook.close(linger=0)
    end = time.monotonic() + 10
    while not ended.is_set() and time.monotonic() < end:
        last.moved()
        time.sleep(0.02)
    assert ended.is_set()
    engine.disable_monitor()
    context.destroy(linger=0)


# -- words -----------------------------------------------------------------------------------------


def test_the_idle_timeout_that_holds(monkeypatch):
    monkeypatch.delenv("WORKBENCH_IDLE_TIMEOUT", raising=False)
    assert _idle_s(None, keep=True) == KEPT_IDLE_S
    assert _idle_s(None, keep=False) == float("inf")
    assert _idle_s("30m", keep=False) == 1800
    assert _idle_s("never", keep=True) == float("inf")
    monkeypatch.setenv("WORKBENCH_IDLE_TIMEOUT", "10m")
    assert {_idle_s(None, keep=True), _idle_s("never", keep=False)} == {600.0}
    with pytest.raises(PlanError, match="WB-PLAN-108"):
        _idle_s("soon", keep=True)


def test_the_lines_of_kept_clusters():
    asked = parse_cluster_line("start 8 --keep --idle-timeout 30m")
    assert (asked.count, asked.keep, asked.idle_timeout) == (8, True, "30m")
    asked = parse_cluster_line("attach ab12 --take")
    assert (asked.action, asked.cluster, asked.take, asked.ranks) == ("attach", "ab12", True, ())
    with pytest.raises(PlanError, match="WB-PLAN-026"):
        parse_cluster_line("attach")


def test_times_in_words():
    assert [idle_words(s) for s in (45, 720, 12600, 172800)] == ["45 s", "12 min", "3.5 h", "2 d"]


def test_a_folder_is_abandoned_only_when_it_is_old_and_holds_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    fresh, old, other = (folders.create() for _ in range(3))
    for one in (fresh, old, other):
        (one / folders.OWNER_FILE).unlink()
    (other / "thesis.txt").write_text("precious")
    for one in (old, other):
        os.utime(one, (1, 1))
    assert folders.sweep() == [old]
    assert other.exists()
    assert fresh.exists()


# -- pages -----------------------------------------------------------------------------------------


def test_a_page_says_what_was_written_last_and_half_a_line_counts_for_nothing(tmp_path):
    path = tmp_path / "page.jsonl"
    assert last_page(path) is None
    page = Page(path)
    page.write({"n": 1})
    page.write({"n": 2})
    assert last_page(path) == {"n": 2}
    with path.open("a") as file:
        file.write('{"n": 3')
    assert last_page(path) == {"n": 2}
    page.close()


def test_a_page_is_not_replaced_with_each_line_nor_does_it_grow_without_end(tmp_path):
    path, numbers = tmp_path / "page.jsonl", set()
    page = Page(path)
    for number in range(2000):
        page.write({"n": number, "text": "x" * 100})
        if number % 100 == 0:
            assert last_page(path)["n"] == number
        numbers.add(path.stat().st_ino)
    assert path.stat().st_size <= PAGE_BYTES
    assert len(numbers) < 2000 * 130 / PAGE_BYTES + 2
    assert path.stat().st_mode & 0o777 == 0o600
    page.write({"n": "long", "text": "x" * 2 * PAGE_BYTES})
    assert last_page(path)["n"] == "long"
    page.close()
    assert [one.name for one in tmp_path.iterdir()] == ["page.jsonl"]


def test_a_page_of_a_folder_that_is_gone_fails_nobody(tmp_path):
    page = Page(tmp_path / "gone" / "page.jsonl")
    page.write({"n": 1})
    page.close()


def test_a_cell_adds_a_line_and_the_cluster_is_described_anew_where_it_changed(folder):
    engines = SimpleNamespace(kept=False, folder=lambda: folder, about=lambda: {"engines": {}})
    pool = SimpleNamespace(servers=set(), devices=DevicePool("cpu"))
    cluster = SimpleNamespace(
        engine_set=engines, pool=pool, framework="torch", devices_asked="cpu",
        hearing=SimpleNamespace(folders={}),
    )  # fmt: skip
    keeping = Keeping(cluster, False, None)
    keeping.write()
    described = folder / folders.ABOUT
    before = described.stat().st_ino, described.stat().st_mtime_ns
    for call in ("a", "b"):
        keeping.begun({"calls": {"0": call}, "run": 0})
        assert last_page(folder / folders.TASK)["calls"] == {"0": call}
        keeping.begun(None)
        assert last_page(folder / folders.TASK) is None
    assert (described.stat().st_ino, described.stat().st_mtime_ns) == before
    cluster.hearing.folders[1] = folder / "run-1"
    keeping.begun({"calls": {}, "run": 1})
    assert folders.read_json(described)["runs"] == [[1, str(folder / "run-1")]]
    other = folder / "other"  # where all of it stands after the controller died
    other.mkdir()
    engines.folder = lambda: other
    page = keeping._page
    keeping.begun({"calls": {}, "run": 1})
    assert page._file is None
    assert last_page(other / folders.TASK)["run"] == 1
    assert (other / folders.ABOUT).exists()
    engines.folder, folder = lambda: other, other
    keeping.end()
    keeping.begun({"calls": {}, "run": 2})
    assert last_page(folder / folders.TASK)["run"] == 1
