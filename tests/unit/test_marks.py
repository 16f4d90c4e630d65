"""Functions of ours that wait for others say so: a hang is named, whatever they are called."""

import ast
import contextlib
import importlib
import inspect
import queue
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from needs import need

from workbench.engine.context import Rendezvous
from workbench.engine.debugging import marks, stacks
from workbench.engine.debugging.marks import (
    ALL_REDUCE,
    ANSWER,
    BOARD,
    GROUP,
    MESSAGE,
    PAUSE,
    RECEIVE,
    RULES,
    Rule,
    wait_of,
    waits_in,
)
from workbench.engine.debugging.stacks import waiting_in
from workbench.engine.telemetry.step_gate import Gate
from workbench.engine.transport import connection, peers, server, worker

DEADLINE_S = 20.0


@contextlib.contextmanager
def blocked(function, *args):
    """Call a function on a thread; yield what its stack is taken for once it blocks."""
    errors = []

    def main():
        try:
            function(*args)
        except Exception as error:  # its sockets are closed below
            errors.append(error)

    thread = threading.Thread(target=main, daemon=True)
    thread.start()

    def seen():
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            frame = sys._current_frames().get(thread.ident)
            found = waiting_in(stacks._places(frame), None)
            if found is not None:
                return found
            assert thread.is_alive(), errors
            time.sleep(0.01)
        return None

    yield seen
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _still(monkeypatch):
    """Whoever is looked at stands still; whether that is so is tested in `test_hangs`."""
    monkeypatch.setattr(stacks, "is_idle", lambda thread: True)


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def test_a_pause_of_the_run_is_the_users():
    gate = Gate()
    gate.halt_at("pause", 0)
    with blocked(gate.enter, 3) as seen:
        found = seen()
        gate.resume()
    assert found == stacks.Wait(marks.PAUSE.label, by_user=True)


def test_a_meeting_at_the_board_is_a_wait():
    board = Rendezvous()
    with blocked(board.wait, "address", [0]) as seen:
        found = seen()
        board.hear("address", 0, "here")
    assert found == stacks.Wait(marks.BOARD.label)


@pytest.mark.parametrize("what", ["receive", "exchange"])
def test_a_message_of_another_worker_is_waited_for(pair, what):
    own = peers.Peers({1: pair[0]})
    data, into = memoryview(bytearray(4)), memoryview(bytearray(4))
    call = (own.receive, 1, into) if what == "receive" else (own.exchange, 1, data, 1, into)
    with blocked(*call) as seen:
        found = seen()
        pair[1].close()
    assert found == stacks.Wait(marks.MESSAGE.label)


def test_a_message_that_nobody_reads_is_waited_for(pair):
    own = peers.Peers({1: pair[0]})
    with blocked(own.send, 1, memoryview(bytearray(1 << 24))) as seen:
        found = seen()
        pair[1].close()
    assert found == stacks.Wait(marks.MESSAGE.label)


def test_a_worker_that_does_not_come_to_the_doorway_is_waited_for(monkeypatch):
    monkeypatch.setattr(peers, "TIMEOUT_S", 1.0)
    doorway = peers.Doorway()
    try:
        with blocked(doorway.connect, [doorway.path, "nowhere"], 0, b"k") as seen:
            found = seen()
    finally:
        doorway.close()
    assert found == stacks.Wait(marks.MESSAGE.label)


@pytest.mark.parametrize("what", ["receive", "read", "send", "prove", "take over"])
def test_an_answer_of_a_server_is_waited_for(pair, what):
    link = worker.Link(pair[0], 0, "tcp")
    large = connection.np.zeros(1 << 24, connection.np.uint8)
    link._size_bytes = large.size
    call = {
        "receive": (link.receive,),
        "read": (link.read, connection.Message("board", {}, large.size), [large]),
        "send": (link.push, "push", {}, [large]),
        "prove": (connection.prove_worker, pair[0], b"key", 0),
        "take over": (connection.take_over, pair[0], [(8, True)], "server s0"),
    }[what]
    with blocked(*call) as seen:
        found = seen()
        pair[1].close()
    assert found == stacks.Wait(marks.ANSWER.label)


def test_a_server_that_has_nothing_to_do_waits(pair):
    served = server.Hub(1, b"key")
    served._peers[0] = server._Peer(pair[0], 0)
    served._selector.register(pair[0], server.selectors.EVENT_READ, served._peers[0])
    with blocked(served.next) as seen:
        found = seen()
        pair[1].close()
    served.close()
    assert found == stacks.Wait(marks.ANSWER.label)


@pytest.mark.torch
def test_who_waits_for_the_thread_of_messages_waits_in_the_all_reduce():
    need("torch")
    from workbench.strategies.torch.allreduce.auto import Aside

    aside, leave = Aside(), threading.Event()
    with blocked(aside.run, leave.wait) as seen:
        found = seen()
        leave.set()
    aside.close()
    assert found == stacks.Wait("in all_reduce")


@pytest.mark.torch
@pytest.mark.parametrize("what", ["settle", "arrived", "one"])
def test_a_stage_waits_for_its_messages(what):
    need("torch")
    from workbench.strategies.torch.pipeline.stage import Mail, Sent

    leave = threading.Event()
    sent = Sent(leave, None)
    mail = SimpleNamespace(_leaving=server.deque([sent]), _coming={("F", 0): [sent]}, _landed={})
    mail._stamps = {}
    call = {
        "settle": (Mail.settle, mail),
        "arrived": (Mail.arrived, mail, "F", 0),
        "one": (sent.wait,),
    }[what]
    with blocked(*call) as seen:
        found = seen()
        leave.set()
    assert found == stacks.Wait("in recv")


@pytest.mark.torch
@pytest.mark.parametrize("call", ["receive", "exchange", "gather"])
@pytest.mark.parametrize("name", ["ring", "recursive_doubling", "reduce_to_one", "hierarchical"])
def test_every_all_reduce_is_a_wait_for_the_others(name, call):
    """The process group's work blocks in C++: nothing of torch's is on the stack."""
    need("torch")
    import torch

    from workbench.strategies.torch import allreduce
    from workbench.strategies.torch.allreduce.links import Links

    leave = threading.Event()
    work = SimpleNamespace(wait=leave.wait)
    links = object.__new__(Links)
    gloo = SimpleNamespace(name=lambda: "gloo")
    group = SimpleNamespace(
        send=lambda *a: work, recv=lambda *a: work, rank=lambda: 0, _get_backend=lambda device: gloo
    )
    links.group, links.peers, links._travel, links._members = group, None, len_of, [0, 1]
    links.rank, links.size, links.hosts, links.sent_bytes = 0, 2, ["", ""], 0.0
    links._parent, links._parts, links._buffers, links._gloo = None, {}, {}, True
    own = torch.ones(4)
    links._agreed = {(4, own.dtype)}
    links.among = lambda ranks: links
    function, *args = {
        "receive": (allreduce.ALGORITHMS[name], own, links),
        "exchange": (links.exchange, own, 1, torch.ones(4), 1),
        "gather": (links.gather, own),
    }[call]
    with blocked(function, *args) as seen:
        found = seen()
        leave.set()
    assert found == stacks.Wait("in all_reduce")


def len_of(size_bytes):
    return None


TORCH = "workbench.strategies.torch"
BLOCK = {
    "workbench.engine.telemetry.step_gate": (PAUSE, ["Gate._wait"]),
    "workbench.engine.context": (BOARD, ["Rendezvous.wait"]),
    "workbench.engine.torch.group": (GROUP, ["ensure_group"]),
    "workbench.engine.transport.peers": (
        MESSAGE,
        ["Doorway.connect", "Peers.send", "Peers.receive", "Peers.exchange"],
    ),
    "workbench.engine.transport.connection": (
        ANSWER,
        ["send", "receive_into", "prove_worker", "prove_server", "take_over", "hand_over"],
    ),
    "workbench.engine.transport.address": (ANSWER, ["look_up", "dial"]),
    "workbench.engine.transport.server": (ANSWER, ["Hub.gather", "Hub.next"]),
    f"{TORCH}.parts.guard": (MESSAGE, ["TrainedSets._on_the_board", "TrainedSets._at_the_store"]),
    f"{TORCH}.allreduce": (ALL_REDUCE, ["AllReduce.__call__", "_backend"]),
    f"{TORCH}.parts.averaging": (ALL_REDUCE, ["Averaging.__init__", "FlatGradients.average"]),
    f"{TORCH}.allreduce.auto": (ALL_REDUCE, ["choose", "race", "Aside.run", "Aside.close"]),
    f"{TORCH}.allreduce.links": (
        ALL_REDUCE,
        [
            "Links.send",
            "Links.receive",
            "Links.exchange",
            "Links.gather",
            "Links.agree",
            "connect_near",
        ],
    ),
    f"{TORCH}.allreduce.algorithms": (
        ALL_REDUCE,
        ["ring", "hierarchical", "recursive_doubling", "reduce_to_one", "reduce", "broadcast"],
    ),
    f"{TORCH}.pipeline.stage": (
        RECEIVE,
        ["Sent.wait", "Mail.settle", "Mail.send", "Mail.receive", "Mail.arrived"],
    ),
}


@pytest.mark.parametrize("module", BLOCK)
def test_what_blocks_is_marked(module):
    if TORCH in module or "torch.group" in module:
        need("torch")
    rule, names = BLOCK[module]
    loaded = importlib.import_module(module)
    for name in names:
        function = loaded
        for part in name.split("."):
            function = getattr(function, part)
        assert wait_of(function) is rule, name


BLOCKING = {
    "wait", "recv", "recvmsg_into", "recv_fds", "sendmsg", "send_fds", "sendall", "accept",
    "connect", "select", "poll", "isend", "irecv", "all_gather", "broadcast", "all_reduce",
    "TCPStore", "batch_isend_irecv", "init_process_group",
}  # fmt: skip
ELSEWHERE = {
    "open_store": "sets up what `links.address.look_up` waits for",
    "_own_address": "a socket of datagrams: looks up a route",
    "_is_done": "for the device, for a moment, while the group is left",
    "naive_all_reduce": "shows the algorithm; tests alone call it",
}


@pytest.mark.parametrize("module", BLOCK)
def test_whoever_calls_what_blocks_is_marked_or_called_by_marked_ones_alone(module):
    """So a function that waits cannot be added to these modules without a mark."""
    if TORCH in module or "torch.group" in module:
        need("torch")
    tree = ast.parse(Path(importlib.import_module(module).__file__).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    marked = {f.name for f in functions if any("waits_in" in ast.unparse(d)
                                               for d in f.decorator_list)}  # fmt: skip
    calls = {f.name: _called(f) for f in functions}

    def covered(name, above=()):
        if name in marked or name in ELSEWHERE or name in above:
            return True
        callers = [other for other, called in calls.items() if name in called and other != name]
        return bool(callers) and all(covered(other, (*above, name)) for other in callers)

    assert [f.name for f in functions if calls[f.name] & BLOCKING and not covered(f.name)] == []


def _called(function):
    made = (one.func for one in ast.walk(function) if isinstance(one, ast.Call))
    return {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in made}


def test_a_mark_costs_nothing_and_goes_where_the_function_goes(monkeypatch):
    def sit(words):
        return words.get()

    rule = Rule("for godot")
    assert waits_in(rule)(sit) is sit
    monkeypatch.setattr(stacks, "RULES", (rule,))
    words = queue.SimpleQueue()
    moved = sit
    with blocked(moved, words) as seen:
        found = seen()
        words.put("there")
    assert found == stacks.Wait("for godot")


def test_what_a_marked_function_calls_and_makes_is_part_of_the_wait(monkeypatch):
    words = queue.SimpleQueue()

    def one_after_the_other():
        yield words.get()

    @waits_in(Rule("for godot"))
    def sit():
        return [(lambda it: next(it))(one_after_the_other())]

    monkeypatch.setattr(stacks, "RULES", (wait_of(sit),))
    with blocked(sit) as seen:
        found = seen()
        words.put("there")
    assert found == stacks.Wait("for godot")


def test_the_words_of_a_name_or_a_path_are_no_mark():
    leave = threading.Event()
    names = {"leave": leave, "__name__": "workbench.engine.telemetry.step_gate"}
    source = "def _wait():\n    leave.wait(60)\n"
    exec(compile(source, "/x/workbench/engine/telemetry/step_gate.py", "exec"), names)
    thread = threading.Thread(target=names["_wait"])
    thread.start()
    try:
        frame = sys._current_frames()[thread.ident]
        assert waiting_in(stacks._places(frame), None) is None
    finally:
        leave.set()
        thread.join()


def test_a_wrapper_cannot_be_marked():
    @contextlib.contextmanager
    def within():
        yield

    with pytest.raises(TypeError, match="decorators"):
        waits_in(PAUSE)(within)
    with pytest.raises(TypeError, match="plain function"):
        waits_in(PAUSE)(len)


def test_who_waits_in_several_ways_is_said_to_wait_in_the_first(monkeypatch):
    inner, outer = marks.RULES[0], Rule("later")
    monkeypatch.setattr(stacks, "RULES", (*RULES, outer))
    gate = Gate()
    gate.halt_at("pause", 0)
    through = waits_in(outer)(lambda: gate.enter(3))
    with blocked(through) as seen:
        found = seen()
        gate.resume()
    assert found.label == inner.label


# -- around the cell -------------------------------------------------------------------------------


def run_on_a_thread(function):
    with blocked_any(function) as stack:
        return stack()


@contextlib.contextmanager
def blocked_any(function):
    """Yield what gives the stack below the cell's beginning, while `function` blocks there."""
    ready, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=function, args=(ready, leave), daemon=True)
    thread.start()
    assert ready.wait(DEADLINE_S)
    try:
        yield lambda: stacks._below_entry(stacks._places(sys._current_frames()[thread.ident]))
    finally:
        leave.set()
        thread.join(DEADLINE_S)


def test_the_runtimes_frames_are_left_out_by_their_marks(monkeypatch):
    from workbench.engine import entry, runtime

    assert runtime.run_cell.__code__ in marks._begins
    assert {runtime.__name__, entry.__name__} <= marks._machinery

    def stand(ready, leave):
        ready.set()
        leave.wait(DEADLINE_S)

    # Called as a cell is: run_cell, something of the runtime's, then the cell.
    machine = {"__name__": runtime.__name__, "stand": stand}
    exec("def helper(ready, leave): stand(ready, leave)", machine)

    @marks.begins_cell
    def begin(ready, leave):
        machine["helper"](ready, leave)

    assert [p.name.rpartition(".")[2] for p in run_on_a_thread(begin)][-1] == "stand"
    monkeypatch.setattr(marks, "_machinery", set())
    assert [p.name.rpartition(".")[2] for p in run_on_a_thread(begin)][-1] == "helper"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("_undo", "leaving the process group"),
        ("_save_weights", "writing the final weights"),
        ("_ensure_group", "getting ready"),
    ],
)
def test_what_an_engine_does_around_the_cell_is_marked(name, words):
    """The real functions of the runtime, each stuck in what it calls."""
    from workbench.engine import runtime

    def stand(ready, leave):
        ready.set()
        leave.wait(DEADLINE_S)

    @marks.begins_cell
    def begin(ready, leave):
        def stuck(*args):
            stand(ready, leave)

        run = SimpleNamespace(
            strategy=SimpleNamespace(close=stuck), closers=[], weights=stuck,
            spec=SimpleNamespace(run_dir="x", run_id="r", group=""),
            failed=False,
        )  # fmt: skip
        engine = SimpleNamespace(
            group="", link=SimpleNamespace(detach=lambda: None, emit=lambda *a, **k: None)
        )
        framework = SimpleNamespace(destroy_group=lambda: None, ensure_group=stuck)
        spec = SimpleNamespace(group_name="p")
        args = {
            "_undo": (engine, run, framework),
            "_save_weights": (run, framework),
            "_ensure_group": (engine, spec, framework),
        }[name]
        getattr(runtime, name)(*args)

    assert stacks._phase(run_on_a_thread(begin)) == words


@pytest.mark.torch
def test_leaving_the_group_is_said_of_the_function_that_leaves_it():
    need("torch")
    from workbench.engine.torch import group as torch_group

    assert "leaving" in marks._doing[torch_group.destroy_group.__code__]
    assert inspect.isfunction(torch_group.destroy_group)
