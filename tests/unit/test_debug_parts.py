"""The pure parts of debugging: lines, windows of steps, places, logs, the profiler's window."""

import contextlib
import threading

import pytest

from workbench.engine.debugging import marks, stdin_bridge
from workbench.engine.debugging.marks import describe
from workbench.engine.telemetry.profiler import ProfiledGate, Window
from workbench.errors import PlanError
from workbench.execution import paused
from workbench.execution.paused import Paused
from workbench.session.logs import Tail, follow
from workbench.shared.magic_args import check_window, parse_cluster_line, parse_window
from workbench.shared.messages import BadMessageError, GoOn, Hold, Typed
from workbench.shared.protocol import Packet, decode_down
from workbench.shared.run_request import parse_cell_line


def test_debug_line():
    line = parse_cluster_line("debug 1 -c 'p x.shape' -c c  # comment")
    assert (line.action, line.ranks, line.commands) == ("debug", (1,), ("p x.shape", "c"))
    assert parse_cluster_line("debug --port 5678 0-2").port == 5678
    assert parse_cluster_line("debug").port is None
    logs = parse_cluster_line("logs -f -n 5 0,2")
    assert (logs.ranks, logs.follow, logs.lines) == ((0, 2), True, 5)
    for bad in ("debug --port x", "debug --port 70000", "debug --port -1", "logs -n many"):
        with pytest.raises(PlanError):
            parse_cluster_line(bad)


def test_profile_line():
    assert parse_cell_line("mirrored --profile 10:15").profile == (10, 15)
    assert parse_cell_line("mirrored").profile is None


@pytest.mark.parametrize("text", ["15:10", "10:10", "10", ":", "a:b", "-1:3", "1:2:3", "٣:٤"])
def test_windows_that_make_no_sense(text):
    with pytest.raises(PlanError):
        parse_window(text)


def test_window_inside_the_run():
    check_window((10, 15), 15)
    check_window((10, 15), None)
    check_window(None, 3)
    with pytest.raises(PlanError, match=r"WB-PLAN-154[\s\S]*10:15[\s\S]*14"):
        check_window((10, 15), 14)


def test_places():
    cell = "/tmp/ipykernel_12/345.py"
    assert marks.where(cell, 7, "<module>") == "cell line 7"
    assert marks.where(cell, 7, "step") == "cell line 7 in step"
    assert marks.where("/home/me/train.py", 41, "load") == "train.py:41 in load"
    assert marks.is_yours(cell)
    assert marks.is_yours("/home/me/train.py")
    assert not marks.is_yours(contextlib.__file__)
    assert not marks.is_yours(marks.__file__)
    assert not marks.is_yours("<frozen importlib._bootstrap>")


def test_describe_never_raises():
    class Bad:
        def __repr__(self):
            raise ValueError

    assert "Bad" in describe(Bad())
    assert len(describe("x" * 10_000)) < 300


class FakeProfiler:
    def __init__(self):
        self.said = []

    def start(self):
        self.said.append("start")

    @contextlib.contextmanager
    def step(self, name):
        self.said.append(name)
        yield
        self.said.append(f"end of {name}")

    def stop(self, path):
        self.said.append("stop")
        return path


def window(tmp_path, profiler, start=2, stop=4):
    notes = []
    return Window(start, stop, lambda: profiler, tmp_path / "rank0.json", notes.append), notes


def test_window_opens_and_closes_between_steps(tmp_path):
    profiler = FakeProfiler()
    one, notes = window(tmp_path, profiler)
    gate = ProfiledGate(one)
    for step in range(7):
        assert gate.enter(step)
        one.recorded()
    one.end()
    steps = ["step 2", "end of step 2", "step 3", "end of step 3"]
    assert profiler.said == ["start", *steps, "stop"]
    assert len(notes) == 1
    assert "steps 2-3" in notes[0]
    assert gate.paused_s > 0


def test_window_is_written_by_a_run_that_ends_in_it(tmp_path):
    profiler = FakeProfiler()
    one, notes = window(tmp_path, profiler)
    for step in range(3):
        one.entered(step)
    one.end()  # in the middle of step 2
    assert profiler.said == ["start", "step 2", "end of step 2", "stop"]
    assert "step 2 " in notes[0]


def test_window_never_reached(tmp_path):
    profiler = FakeProfiler()
    one, notes = window(tmp_path, profiler)
    one.entered(0)
    one.end()
    assert profiler.said == []
    (note,) = notes
    assert "No profile" in note
    assert "step 2" in note


def test_window_that_several_steps_at_a_time_pass_over(tmp_path):
    profiler = FakeProfiler()
    one, notes = window(tmp_path, profiler)
    assert not one.entered(0)
    one.entered(10)
    one.end()
    assert profiler.said == []
    assert len(notes) == 1


def test_profile_that_cannot_be_written_is_a_note(tmp_path):
    class Full(FakeProfiler):
        def stop(self, path):
            self.said.append(f"stop {path is not None}")
            if path is not None:
                raise OSError("No space left on device")

    profiler = Full()
    one, notes = window(tmp_path, profiler)
    one.entered(2)
    one.entered(4)
    assert "No space left on device" in notes[0]
    assert profiler.said[-2:] == ["stop True", "stop False"]


def test_tail_reads_whole_lines_and_files_that_are_replaced(tmp_path):
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.last(5) == []
    path.write_text("a\nb\nc\nhal")
    assert tail.last(2) == ["b", "c"]
    with path.open("a") as file:
        file.write("f\n")
    assert tail.new() == ["half"]
    path.write_text("x\n")
    assert tail.new() == ["x"]


def test_followed_logs_end_with_their_engines(tmp_path):
    path = tmp_path / "log"
    path.write_text("one\n")
    states, said = [True, False], []
    follow(
        {3: Tail(path)},
        lambda engine: states.pop(0),
        said.append,
        lambda s: path.open("a").write("last"),
    )
    assert "".join(said) == "one\nlast\n--- engine 3 has ended\n"


def talk(paused_can_prompt=None):
    """An engine's side and the kernel's, joined without a network."""
    engine = stdin_bridge.StdinBridge(0, lambda said: kernel.hear(said))
    kernel = Paused(lambda number, message: engine.hear(message))
    if paused_can_prompt is not None:
        kernel.attended(can_prompt=paused_can_prompt)
    return engine, kernel


def test_a_rank_is_held_until_somebody_answers():
    engine, kernel = talk()
    assert engine.ask("debugger", "cell line 3", "") == ""
    assert kernel.stops[0].where == "cell line 3"
    lines = []

    def cell():
        lines.append(engine.next_line())
        engine.answer("41\n")
        lines.append(engine.next_line())
        engine.leave("bye\n")

    thread = threading.Thread(target=cell)
    thread.start()
    assert kernel.tell(0, "p x").text == "41\n"
    reply = kernel.tell(0, "c")
    thread.join(5)
    assert (reply.text, reply.paused, lines) == ("bye\n", False, ["p x", "c"])
    assert not kernel.stops


def test_a_rank_goes_on_where_nobody_can_answer():
    engine, kernel = talk(paused_can_prompt=False)
    assert "front end" in engine.ask("debugger", "cell line 3", "")
    assert not kernel.stops


def test_a_rank_that_pauses_before_its_cell_is_waited_for_is_told_the_same(monkeypatch):
    monkeypatch.setattr(paused, "can_prompt", lambda: False)
    engine, kernel = talk()
    with paused.attending(True):
        kernel.unattended()  # the end of another cell takes nothing from it
        assert "front end" in engine.ask("debugger", "cell line 3", "")
    for blocks in (True, False):
        with paused.attending(blocks):
            assert bool(engine.ask("debugger", "cell line 3", "")) is blocks
    assert engine.announce
    monkeypatch.setattr(paused, "can_prompt", lambda: True)
    with paused.attending(True):
        assert engine.ask("debugger", "cell line 4", "") == ""
        assert not engine.announce


def test_a_rank_goes_on_where_the_notebook_is_silent(monkeypatch):
    monkeypatch.setattr(stdin_bridge, "HEARD_S", 0.05)
    engine = stdin_bridge.StdinBridge(0, lambda said: None)
    assert "not answer" in engine.ask("input", "cell line 1", "")
    assert engine.where == ""


def test_stop_releases_a_rank_and_makes_it_deaf():
    engine, _ = talk()
    engine.ask("debugger", "cell line 3", "")
    engine.release("Stop was pressed")
    with pytest.raises(stdin_bridge.Released, match="Stop was pressed"):
        engine.next_line()
    engine.leave()
    assert "Stop" in engine.ask("debugger", "cell line 3", "")
    engine.cell_begins()
    assert engine.ask("debugger", "cell line 3", "") == ""


@pytest.mark.parametrize(
    "body", [{}, {"do": 3}, {"do": "line"}, {"do": "line", "number": "x"}, {"number": 1}]
)
def test_senseless_words_are_refused(body):
    with pytest.raises(BadMessageError):
        decode_down(Packet("debugger", body))


@pytest.mark.parametrize(
    "word", [Hold(number=1), Typed(number=7, text="p x"), GoOn(number=7, reason="")]
)
def test_words_that_answer_another_question_are_passed_over(word):
    engine, kernel = talk()
    engine.ask("debugger", "cell line 3", "")
    engine.hear(word)
    kernel._send(0, Typed(number=1, text="c"))
    assert engine.next_line() == "c"
