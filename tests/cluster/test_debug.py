"""Debugging: post-mortem frames, breakpoints answered from the notebook, debugpy, logs."""

import builtins
import re
import socket
import threading
import time

import psutil
import pytest
from dap_client import DapClient
from notebook_shell import interrupt_main_thread, notebook, soon

from workbench.errors import RunError
from workbench.session import logs, prompt
from workbench.session.state import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
pytest.importorskip("torch")

FAILS = """%%distributed
import torch
def step(x, w):
    y = x @ w
    return y
x = torch.ones(3, 4)
if rank == 1:
    step(x, torch.ones(5, 2))
dist.barrier()
"""
TRAINS = """import torch
from torch import nn
def look(step, logs):
    if step == 3 and rank == 0:
        breakpoint()
        seen = step
wb.fit(nn.Linear(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=STEPS,
       callbacks=look)
"""


@pytest.fixture(scope="module")
def book():
    with notebook(2) as one:
        one.ok("%%distributed\nimport torch")
        yield one


@pytest.fixture(autouse=True)
def nothing_goes_on(book):
    """One test's failure is not the next one's."""
    yield
    if session.cluster.is_busy:
        session.cluster.last_task.interrupt()
        assert idle()


class Typist:
    """Somebody at the keyboard: each line answers one prompt; a function is called for its line."""

    def __init__(self, monkeypatch, *lines):
        self.lines, self.prompts = list(lines), []
        monkeypatch.setattr(prompt, "can_prompt", lambda: True)
        monkeypatch.setattr(builtins, "input", self.type)
        monkeypatch.setattr(prompt.getpass, "getpass", self.type)

    def type(self, text=""):
        self.prompts.append(text)
        assert self.lines, f"one prompt more than expected: {text}"
        line = self.lines.pop(0)
        return line() if callable(line) else line


def paused():
    return session.cluster.paused.stops


def idle():
    return soon(lambda: not session.cluster.is_busy)


def where(*engines):
    return session.cluster._engines.router.questions.ask("where", engines, 5)


# -- post-mortem ---------------------------------------------------------------------------------


def test_failed_rank_is_looked_at_with_commands(book):
    book.refused(FAILS, "Rank 1")
    said = book.ok("%cluster debug 1 -c 'p x.shape' -c 'p w.shape' -c u -c 'p rank' -c l").stdout
    lines = said.splitlines()
    assert lines[:2] == ["torch.Size([3, 4])", "torch.Size([5, 2])"]
    assert lines[2:5] == ["> cell line 8", "-> step(x, torch.ones(5, 2))", "1"]
    assert re.search(r"8 \s*->\s+step\(x, torch.ones\(5, 2\)\)", said)
    assert "w = Tensor (5, 2) float32" in book.ok("%cluster debug -c d -c locals").stdout
    assert "not continued" in book.ok("%cluster debug -c c").stdout
    assert "needs a terminal" in book.ok("%cluster debug -c interact").stdout
    assert "*** NameError" in book.ok("%cluster debug -c nothing_of_that_name").stdout


def test_default_is_the_rank_whose_mistake_it_was(book):
    book.refused(FAILS, "Rank 1")
    text = book.ok("%cluster debug").text
    assert text.strip().startswith("rank 1: RuntimeError: mat1 and mat2")
    assert "> 1  cell line 4 in step: y = x @ w" in text
    book.refused("%cluster debug 0", "Rank 0 keeps no failure")


def test_frames_as_data(book):
    book.refused(FAILS, "Rank 1")
    found = session.cluster.debug(1)
    assert found.error.startswith("RuntimeError: mat1")
    outer, inner = found.frames
    assert (outer.where, inner.where) == ("cell line 8", "cell line 4 in step")
    assert (inner.function, inner.line, inner.source, inner.yours) == ("step", 4, "y = x @ w", True)
    assert inner.variables["x"].startswith("Tensor (3, 4) float32: tensor([[1.")
    assert found.eval(inner, "tuple(w.shape)") == "(5, 2)"
    assert found.eval(0, "x.sum().item() + rank") == "13.0"
    with pytest.raises(RunError, match=r"AttributeError: .*shap"):
        found.eval(1, "x.shap")
    with pytest.raises(RunError, match="numbered 0 to 1"):
        found.eval(7, "x")


def test_error_inside_a_library_is_opened_at_the_users_line(book):
    cell = "%%distributed\nimport json\ntext = '{]'\njson.loads(text)"
    book.refused(cell, "JSONDecodeError")
    found = session.cluster.debug(0)
    assert found.frames[found.current].where == "cell line 4"
    assert not found.frames[-1].yours
    assert found.frames[-1].where.startswith("decoder.py:")
    said = book.ok("%cluster debug 0 -c 'p text' -c d -c 'p len(s)'").stdout
    assert said.splitlines()[0] == "'{]'"
    assert said.splitlines()[-1] == "2"


def test_prompt_of_a_post_mortem(book, monkeypatch, capsys):
    book.refused(FAILS, "Rank 1")
    typist = Typist(monkeypatch, "p x.shape[1]", "w.shape[0] * 100", "q")
    said = book.ok("%cluster debug").stdout
    assert typist.prompts == ["rank 1 post-mortem> "] * 3
    assert "\n4\n" in said
    assert "\n500\n" in said


def test_frames_are_freed_by_the_next_cell_and_by_free(book):
    fails = """%%distributed
import gc, weakref, torch
held = []
def step():
    big = torch.ones(10)
    held.append(weakref.ref(big))
    raise ValueError("no")
step()
"""
    book.refused(fails, "ValueError")
    assert session.cluster.debug(0).eval(1, "held[0]() is big") == "True"
    book.ok("%%distributed\ngc.collect()\nassert held[0]() is None")
    with pytest.raises(RunError, match="keeps no failure"):
        session.cluster.debug(0)
    book.refused(fails, "ValueError")
    book.ok("%cluster free")
    with pytest.raises(RunError, match="keeps no failure"):
        session.cluster.debug(0)


def test_interrupt_ends_an_expression_and_no_more(book):
    book.refused(FAILS, "Rank 1")
    threading.Timer(1.0, interrupt_main_thread).start()
    cell = book.ok("%cluster debug 1 -c '__import__(\"time\").sleep(60)' -c 'p rank'")
    assert cell.seconds < 15
    assert "KeyboardInterrupt" in cell.stdout
    assert cell.stdout.endswith("\n1\n"), "the frames are still there"


def test_nothing_to_debug_is_said(book):
    book.ok("%%distributed\n1 + 1")
    book.refused("%cluster debug", "Nothing to debug", "breakpoint()")
    book.refused("%cluster debug 7", "no such engine")
    book.ok("%%distributed --background\nbreakpoint() if rank == 0 else None")
    assert soon(paused)
    book.ok("%cluster debug 0 -c c")
    assert idle()


# -- breakpoints without anybody at the keyboard ---------------------------------------------------


@pytest.mark.parametrize(
    "stop",
    [
        "breakpoint()",
        "import pdb; pdb.set_trace()",
        "from IPython.core.debugger import set_trace; set_trace()",
    ],
)
def test_breakpoint_goes_on_where_nobody_can_answer(book, stop):
    cell = book.ok(f"%%distributed\nfor i in range(50):\n    {stop}\nprint('done', i)")
    assert cell.text.count("breakpoint() at cell line 3") == 2, "said once on each rank"
    assert "%cluster debug 0 opens the paused frame" in cell.text
    assert cell.text.count("done 49") == 2


def test_breakpoint_in_a_run_goes_on_too(book):
    cell = book.ok("%%distributed mirrored --plot off\n" + TRAINS.replace("STEPS", "6"))
    assert "breakpoint() at cell line 6 in look" in cell.text
    assert book["_run"].state == "finished"
    assert book["_run"].history.totals.steps == 6


@pytest.mark.parametrize("ask", ["input('name? ')", "__import__('getpass').getpass('key? ')"])
def test_questions_fail_where_nobody_can_answer(book, ask):
    cell = book.refused(f"%%distributed\n{ask}", "nobody can type", "%push")
    assert cell.seconds < 10
    book.ok("%%distributed\nassert rank in (0, 1)")


def test_reading_stdin_meets_its_end(book):
    said = book.ok("%%distributed\nimport sys, os\nprint(repr(sys.stdin.read()), os.read(0, 5))")
    assert "[ranks 0-1] '' b''" in said.text


def test_breakpoint_in_another_process_of_the_engine_is_passed_by(book):
    book.ok("""%%distributed
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        breakpoint()
        return i
assert list(torch.utils.data.DataLoader(Data(), num_workers=1, batch_size=2))[0].tolist() == [0, 1]
""")


def test_pythonbreakpoint_0_switches_them_off(book):
    cell = book.ok("""%%distributed
import os
os.environ["PYTHONBREAKPOINT"] = "0"
breakpoint()
del os.environ["PYTHONBREAKPOINT"]
""")
    assert "breakpoint" not in cell.text


# -- breakpoints answered --------------------------------------------------------------------------


def test_prompt_opens_in_the_cell_that_blocks(book, monkeypatch):
    typist = Typist(monkeypatch, "p rank", "rank 1", "p rank", "all z = rank + 5", "all n", "all c")
    cell = book.ok("""%%distributed
import torch; z = 0
breakpoint()
z = z + 1
y = torch.tensor([float(z)])
dist.all_reduce(y)
print("sum", y.item())
""")
    assert not typist.lines
    assert typist.prompts[0] == "rank 0> "
    assert typist.prompts[-1] == "rank 1> "
    assert "rank 0 is paused at cell line 3; paused too: 1" in cell.stdout
    assert "do so for 30 min" not in cell.stdout, "nobody waits for it: both are paused"
    assert "[ranks 0-1] sum 13.0" in cell.text, "(5 + 1) + (6 + 1)"


def test_step_over_a_collective_that_waits_for_a_paused_rank(book, monkeypatch):
    monkeypatch.setattr("workbench.session.paused.STEP_S", 0.5)
    typist = Typist(monkeypatch, "n", "n", "c", "c")
    cell = book.ok("""%%distributed
breakpoint()
dist.barrier()
done = True
""")
    assert not typist.lines
    assert "(rank 0 goes on and has not stopped again: it may be waiting" in cell.stdout
    assert typist.prompts == ["rank 0> ", "rank 0> ", "rank 1> ", "rank 0> "]


def test_questions_are_asked_in_the_cell_that_blocks(book, monkeypatch):
    typist = Typist(monkeypatch, "7", "secret")
    cell = book.ok("""%%distributed -r 1
import getpass
print(int(input("how many? ")) + 1, len(getpass.getpass("key? ")))
""")
    assert typist.prompts == ["rank 1: how many? ", "rank 1: key? "]
    assert "8 6" in cell.text
    assert "secret" not in cell.text


def test_breakpoint_in_a_run_is_answered(book, monkeypatch):
    typist = Typist(monkeypatch, "p step", "p logs['loss'] > 0", "c")
    cell = book.ok("%%distributed mirrored --plot off\n" + TRAINS.replace("STEPS", "6"))
    assert not typist.lines
    assert "\n3\nTrue\n" in re.sub(r"rank 0> .*\n", "", cell.stdout)
    assert "do so for 30 min" in cell.stdout
    assert book["_run"].history.totals.steps == 6


def test_breakpoints_and_commands_of_pdb(book, monkeypatch):
    typist = Typist(monkeypatch, "b 5", "c", "p i, total", "clear 1", "c")
    cell = book.ok("""%%distributed -r 0
total = 0
breakpoint()
for i in range(4):
    total += i
print("total", total)
""")
    assert not typist.lines
    assert "(0, 0)" in cell.stdout
    assert "total 6" in cell.text


def test_q_ends_the_cell(book, monkeypatch):
    Typist(monkeypatch, "q")
    book.refused(
        "%%distributed\nbreakpoint() if rank == 1 else None\ndist.barrier()", "quit (q)", "Rank 1"
    )
    monkeypatch.undo()
    book.ok("%%distributed\ndist.barrier()")


def test_interrupt_at_the_prompt_ends_the_cell(book, monkeypatch):
    def interrupted():
        interrupt_main_thread()
        threading.Event().wait(30)

    Typist(monkeypatch, interrupted)
    cell = book.refused(
        "%%distributed\nbreakpoint() if rank == 0 else None\ndist.barrier()", "Interrupted"
    )
    assert cell.seconds < 10
    monkeypatch.undo()
    book.ok(
        "%%distributed\nimport torch\nx = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == 2"
    )


def test_prompt_is_taken_away_when_another_rank_fails(book, monkeypatch):
    opened = threading.Event()

    def never_answers():
        opened.set()
        threading.Event().wait(60)

    Typist(monkeypatch, never_answers)
    cell = book.refused(
        """%%distributed
import time
if rank == 0:
    breakpoint()
    time.sleep(60)
else:
    time.sleep(1)
    raise ValueError("mine")
""",
        "Rank 1",
        "mine",
    )
    assert opened.is_set()
    assert cell.seconds < 15
    assert "no longer paused" in cell.stdout
    assert not paused()


# -- in the background ---------------------------------------------------------------------------


def test_paused_in_the_background_until_debug_opens_it(book):
    book.ok("""%%distributed --background
def look(secret):
    breakpoint()
    return secret + 1
if rank == 1:
    found = look(41)
dist.barrier()
""")
    assert soon(paused)
    assert paused()[1].where == "cell line 3 in look"
    answers = where(0, 1)
    assert answers[1]["state"] == "paused", "a rank paused by its user is not called a hang"
    book.refused("%cluster debug 0", "Another one is going on")
    assert "breakpoint()" in book.ok("%cluster debug 1 -c 'l'").stdout
    said = book.ok("%cluster debug -c 'p secret' -c 'secret = 99' -c c").stdout
    assert said.splitlines()[0] == "41"
    assert idle()
    assert session.cluster.pull(["found"], [1])[1]["found"] == 100
    assert where(1)[1]["state"] == "idle"


def test_other_notebooks_question_is_found(book):
    book.ok("%%distributed --background -r 0\nbreakpoint()\nx = 1")
    assert soon(paused)
    waiting = session.cluster.paused
    waiting._stops.clear()  # as in a notebook that has just attached
    assert waiting.inquire(0).where == "cell line 2"
    book.ok("%cluster debug 0 -c c")
    assert idle()


def test_stop_lets_a_paused_run_end(book):
    book.ok("%%distributed mirrored --plot off --background\n" + TRAINS.replace("STEPS", "100000"))
    run = book["_run"]
    assert soon(paused)
    began = time.perf_counter()
    run.stop()
    run.wait(20)
    assert time.perf_counter() - began < 3
    assert run.state == "stopped"
    assert run.history.totals.steps >= 3
    assert not paused()
    book.ok("%%distributed\ndist.barrier()")


def test_paused_rank_can_be_paused_as_a_run(book):
    book.ok("%%distributed mirrored --plot off --background\n" + TRAINS.replace("STEPS", "100000"))
    run = book["_run"]
    assert soon(paused)
    run.pause()
    book.ok("%cluster debug 0 -c c")
    assert soon(lambda: run.state == "paused")
    run.resume()
    run.stop()
    run.wait(20)
    assert run.state == "stopped"


def test_wait_in_python_meets_the_breakpoint_too(book):
    source = TRAINS.replace("STEPS", "6")
    run = session.cluster.run(source, strategy="mirrored").wait(30)
    assert run.history.totals.steps == 6


def test_killed_while_paused(book):
    book.ok("%%distributed --background\nbreakpoint() if rank == 1 else None\ndist.barrier()")
    assert soon(paused)
    psutil.Process(session.cluster.engines[1].pid).kill()
    assert idle()
    assert not paused()
    book.refused("%cluster debug 1", "gone", "%cluster logs 1")
    book.ok("%cluster restart 1")
    book.ok("%%distributed\ndist.barrier()")


# -- debugpy ---------------------------------------------------------------------------------------


def serve(book, rank):
    said = book.ok(f"%cluster debug {rank} --port 0").stdout
    return int(re.search(r"127\.0\.0\.1:(\d+)", said)[1]), said


def test_debugpy_listens_on_loopback_in_the_engine(book):
    port, said = serve(book, 1)
    assert f'"port": {port}' in said
    process = psutil.Process(session.cluster.engines[1].pid)
    listens = {c.laddr.ip for c in process.net_connections() if c.laddr and c.laddr.port == port}
    assert listens == {"127.0.0.1"}
    assert not process.children(recursive=True), "no adapter that could outlive the engine"
    assert "listens already" in serve(book, 1)[1]
    assert serve(book, 1)[0] == port
    book.refused(f"%cluster debug 0 --port {port}", "cannot listen", "Address already in use")


def test_vs_code_stops_at_a_breakpoint_and_looks_around(book):
    client = DapClient(serve(book, 1)[0])
    client.attach()
    cell = "x = 41 + rank\nif rank == 1:\n    breakpoint()\n    z = x\ny = x + 1"
    book.ok(f"%%distributed --background\n{cell}")
    stop = client.event("stopped")
    stack = client.ask("stackTrace", threadId=stop["threadId"])["stackFrames"]
    assert client.ask("evaluate", expression="x", frameId=stack[0]["id"])["result"] == "42"
    assert where(1)[1]["state"] == "paused"
    client.ask("continue", threadId=stop["threadId"])
    assert idle()
    client.close()
    assert session.cluster.pull(["y"])[1]["y"] == 43


def test_debugpy_can_be_served_while_the_cell_runs(book):
    book.ok(
        "%%distributed --background\nimport time\nwhile 'go' not in globals(): time.sleep(0.02)"
    )
    client = DapClient(serve(book, 0)[0])
    client.attach()
    main = next(t["id"] for t in client.ask("threads")["threads"] if "Main" in t["name"])
    client.ask("pause", threadId=main)
    client.event("stopped")
    frame = client.ask("stackTrace", threadId=main)["stackFrames"][0]
    assert frame["line"] == 3
    assert where(0)[0]["state"] == "paused"
    client.ask("continue", threadId=main)
    client.close()
    session.cluster.last_task.interrupt()
    assert idle()
    book.ok("%%distributed\n1")


def test_debugpy_ends_with_the_engine(book):
    port = serve(book, 1)[0]
    book.ok("%cluster restart 1")
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))


def test_debugpy_missing_is_said(book):
    book.ok("%cluster restart 0")
    book.ok("%%distributed -r 0\nimport sys\nkept = sys.modules.pop('debugpy', None)\n"
            "sys.modules['debugpy'] = None")  # fmt: skip
    book.refused("%cluster debug 0 --port 0", "debugpy is not installed", "[debug]")
    book.ok("%cluster restart 0")


# -- logs ------------------------------------------------------------------------------------------


def test_logs_of_several_ranks_with_so_many_lines(book):
    book.ok("%%distributed\nimport os\nfd = os.open(os.environ.get('NONE', '/dev/null'), 1)")
    for engine in (0, 1):
        path = session.cluster._engines.log_path(engine)
        with path.open("a") as file:
            file.write("".join(f"line {i} of {engine}\n" for i in range(60)))
    said = book.ok("%cluster logs 0,1 -n 3").stdout
    for engine in (0, 1):
        expected = "".join(f"line {i} of {engine}\n" for i in (57, 58, 59))
        assert f"--- engine {engine}\n{expected}" in said
    assert len(book.ok("%cluster logs -n 2 1").stdout.splitlines()) == 3
    assert len(book.ok("%cluster logs 1").stdout.splitlines()) == 1 + logs.LINES


def test_logs_are_followed_until_interrupted(book, monkeypatch):
    path = session.cluster._engines.log_path(1)
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
    assert cell.stdout.splitlines()[-3:] == ["turn 1", "halfturn 2", "--- no longer followed"]


def test_logs_are_followed_until_the_engine_is_gone(book):
    killer = threading.Timer(0.5, psutil.Process(session.cluster.engines[1].pid).kill)
    killer.start()
    cell = book.ok("%cluster logs 1 --follow")
    assert cell.stdout.splitlines()[-1] == "--- engine 1 is gone"
    book.ok("%cluster restart 1")
