"""debugpy: an engine listens for an editor, on loopback, as long as it lives."""

import re
import socket

import psutil
import pytest
from dap_client import DapClient
from debugging import idle, where
from needs import need

from workbench.notebook.session import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")


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
    assert "already listens" in serve(book, 1)[1]
    assert serve(book, 1)[0] == port
    book.refused(f"%cluster debug 0 --port {port}", "WB-CLUSTER-039", "Address already in use")


def test_vs_code_stops_at_a_breakpoint_and_looks_around(book):
    client = DapClient(serve(book, 1)[0])
    client.attach()
    cell = "x = 41 + rank\nif rank == 1:\n    breakpoint()\n    z = x\ny = x + 1"
    book.ok(f"%%distributed --background\n{cell}")
    stop = client.event("stopped")
    stack = client.ask("stackTrace", threadId=stop["threadId"])["stackFrames"]
    assert client.ask("evaluate", expression="x", frameId=stack[0]["id"])["result"] == "42"
    assert where(1)[1].state == "paused"
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
    assert where(0)[0].state == "paused"
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
    book.refused("%cluster debug 0 --port 0", "WB-CLUSTER-038", "[debug]")
    book.ok("%cluster restart 0")
