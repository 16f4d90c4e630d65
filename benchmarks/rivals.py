"""The same cells and faults in other tools, each in a separate Jupyter kernel.

    python benchmarks/rivals.py [--tool NAME ...] [--repeats 3] [--limit 20] [--json FILE]

A tool that is not installed is left out. The tools are unchanged: cells are sent to the kernel
as a notebook sends them, and faults come from outside.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty

import psutil
from jupyter_client.manager import KernelManager

WORKERS = 4
MARK = "RIVALS_MARK"
GROUP = """
import os, torch, torch.distributed as dist
if not dist.is_initialized():
    rank = NUMBER
    dist.init_process_group("gloo", init_method="file://STORE", rank=rank, world_size=4)
rank = dist.get_rank()
open("PIDS/%d" % rank, "w").write(str(os.getpid()))
"""


@dataclass(frozen=True)
class Tool:
    """How one tool is started and told to run a cell on all its workers.

    Attributes:
        module: What must be installed.
        start: Cells that start the workers.
        cell: The text around a cell; CELL is replaced by the cell, QUOTED by it as a string.
        number: An expression for the number of a worker.
        kernel: Module of the kernel.
        group: Whether the cell must make the process group.
    """

    module: str
    start: tuple[str, ...]
    cell: str
    number: str = 'int(os.environ.get("RANK", 0))'
    kernel: str = "ipykernel_launcher"
    group: bool = True
    env: dict[str, str] = field(default_factory=dict)


RUNS_CELLS = """
import contextlib, io

class {base}:
    def __init__(self{arguments}):
        self.names = {{"number": {number}}}

    {endpoint}
    def run(self, source):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(source, self.names)
        return said.getvalue()
"""
"""An actor that keeps variables from cell to cell, as a notebook does."""

TOOLS = {
    "workbench": Tool(
        "workbench",
        ("%load_ext workbench", f"%cluster start {WORKERS}"),
        "%%distributed\nCELL",
        group=False,
    ),
    "ipyparallel": Tool(
        "ipyparallel",
        (
            f"import ipyparallel as ipp\nrc = ipp.Cluster(n={WORKERS}).start_and_connect_sync()",
            "rc[:].scatter('number', list(range(4)), block=True); rc[:].activate()",
        ),
        "%%px --block\nCELL",
        number="number[0]",
    ),
    "jupyter-distributed": Tool(
        "jupyter_distributed",
        (),
        "CELL",
        kernel="jupyter_distributed.kernel",
        env={"JUPYTER_DISTRIBUTED_WORLD_SIZE": str(WORKERS)},
    ),
    "nbdistributed": Tool(
        "nbdistributed",
        ("%load_ext nbdistributed", f"%dist_init --num-processes {WORKERS}"),
        "%%distributed\nCELL",
    ),
    "accelerate": Tool(
        "accelerate",
        ("from accelerate import notebook_launcher",),
        f"notebook_launcher(lambda: exec(QUOTED, {{}}), num_processes={WORKERS})",
    ),
    "Monarch": Tool(
        "monarch",
        (
            "from monarch.actor import Actor, current_rank, endpoint, this_host"
            + RUNS_CELLS.format(
                base="Cells(Actor)", arguments="", number="current_rank().rank",
                endpoint="@endpoint",
            ),
            # A first import of torch inside a cell fails: the stack that torch formats then asks
            # Monarch for the cell's source, and Monarch asks the half-imported torch.
            "import functools, importlib\n"
            "ready = functools.partial(importlib.import_module, 'torch')\n"
            f"procs = this_host().spawn_procs({{'gpus': {WORKERS}}}, bootstrap=ready)\n"
            "workers = procs.spawn('cells', Cells)",
        ),
        "for _, said in workers.run.call(QUOTED).get().items(): print(said)",
        number="number",
    ),
    "Ray": Tool(
        "ray",
        (
            f"import ray; ray.init(num_cpus={WORKERS}, include_dashboard=False)"
            + RUNS_CELLS.format(
                base="Cells", arguments=", number", number="number", endpoint=""
            ),
            f"workers = [ray.remote(Cells).remote(i) for i in range({WORKERS})]",
        ),
        "for said in ray.get([one.run.remote(QUOTED) for one in workers]): print(said)",
        number="number",
    ),
}  # fmt: skip


class Book:
    """A kernel with one tool's workers, and cells sent to it."""

    def __init__(self, tool: Tool, folder: Path) -> None:
        self.tool, self.folder, self._cells = tool, folder, 0
        (folder / "pids").mkdir()
        self.manager = KernelManager(kernel_name="python3")
        spec = self.manager.kernel_spec
        spec.argv = [sys.executable, "-m", tool.kernel, "-f", "{connection_file}"]
        here = str(Path(__file__).parents[1])
        paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        env = {**os.environ, **tool.env, "OMP_NUM_THREADS": "1", MARK: str(folder)}
        self.manager.start_kernel(env={**env, "PYTHONPATH": paths}, cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        began = time.monotonic()
        for source in tool.start:
            self.run(source, 120)
        _, text, ended = self.run(self.source("dist.all_reduce(torch.ones(1))"), 120)
        self.started_s = ended - began
        pids = list((folder / "pids").iterdir())
        if len(pids) != WORKERS:
            raise RuntimeError(f"{len(pids)} of {WORKERS} workers: {text[-500:]}")

    def source(self, body: str) -> str:
        """Return a cell for all workers; the process group exists when `body` runs."""
        self._cells += 1  # workers that end with a cell meet in a file of their own
        head = GROUP.replace("PIDS", str(self.folder / "pids"))
        head = head.replace("STORE", str(self.folder / f"store-{self._cells}"))
        head = head.replace("NUMBER", self.tool.number)
        if not self.tool.group:
            head = (
                "import os, torch, torch.distributed as dist\n" + head[head.index("rank = dist") :]
            )
        cell = self.tool.cell.replace("QUOTED", repr(head + body))
        return cell.replace("CELL", head + body)

    def send(self, source: str) -> str:
        """Send a cell; return its message's id."""
        return self.client.execute(source, allow_stdin=False)

    def ended(self, sent: str, limit_s: float) -> tuple[str, str, float]:
        """Return status (`hangs` beyond the limit), text, and when it ended."""
        text, end = "", time.monotonic() + limit_s
        while time.monotonic() < end:
            with contextlib.suppress(Empty):
                message = self.client.get_iopub_msg(timeout=0.05)
                if message["parent_header"].get("msg_id") != sent:
                    continue
                content = message["content"]
                text += str(content.get("text", "")) + str(content.get("evalue", ""))
                text += str(content.get("data", {}).get("text/plain", ""))
                if message["msg_type"] == "status" and content["execution_state"] == "idle":
                    at = time.monotonic()
                    return self.reply(sent), text, at
        return "hangs", text, time.monotonic()

    def reply(self, sent: str) -> str:
        """Return how the kernel says that a cell ended."""
        while True:
            message = self.client.get_shell_msg(timeout=5)
            if message["parent_header"].get("msg_id") == sent:
                return str(message["content"]["status"])

    def run(self, source: str, limit_s: float) -> tuple[str, str, float]:
        """Run a cell to its end."""
        return self.ended(self.send(source), limit_s)

    def pid(self, rank: int) -> int:
        """Return the pid of a worker."""
        return int((self.folder / "pids" / str(rank)).read_text())

    def processes(self) -> list[psutil.Process]:
        """Return every process of this book, the kernel too."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.folder):
                    found.append(process)
        return found

    def close(self) -> None:
        """End everything."""
        with contextlib.suppress(Exception):
            self.client.stop_channels()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def book(tool: Tool) -> Iterator[Book]:
    """A fresh book; all its processes end afterwards."""
    with tempfile.TemporaryDirectory(prefix="rivals-", ignore_cleanup_errors=True) as folder:
        made = None
        try:
            made = Book(tool, Path(folder))
            yield made
        finally:
            if made is not None:
                made.close()


def wait_for(path: Path, limit_s: float = 30.0) -> None:
    """Wait until a worker has written that it is there."""
    end = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > end:
            raise RuntimeError(f"{path.name} never came")
        time.sleep(0.01)


def raises(page: Book, limit_s: float) -> tuple[float | None, str]:
    """One rank raises an error, the others wait in all_reduce: how long until the cell ends?"""
    at = page.folder / "raised"
    body = (
        f"if rank == 1:\n    open({str(at)!r}, 'w').close()\n    raise ValueError('mine')\n"
        "dist.all_reduce(torch.ones(1))"
    )
    sent = page.send(page.source(body))
    wait_for(at)
    began = time.monotonic()
    status, text, ended = page.ended(sent, limit_s)
    shown = "the rank's error is shown" if "mine" in text else "the rank's error is not shown"
    return (None if status == "hangs" else ended - began), f"{status}, {shown}"


def killed(page: Book, limit_s: float) -> tuple[float | None, str]:
    """A worker receives SIGKILL while all workers train: how long until the cell ends?"""
    at = page.folder / "going"
    body = (
        f"if rank == 1:\n    open({str(at)!r}, 'w').close()\n"
        "while True:\n    dist.all_reduce(torch.ones(1))"
    )
    sent = page.send(page.source(body))
    wait_for(at)
    os.kill(page.pid(1), signal.SIGKILL)
    began = time.monotonic()
    status, text, ended = page.ended(sent, limit_s)
    named = "SIGKILL" in text or "died" in text
    return (None if status == "hangs" else ended - began), (
        f"{status}, {'the death is named' if named else 'the death is not named'}"
    )


def interrupted(page: Book, limit_s: float) -> tuple[float | None, str]:
    """The stop button, while ranks wait in all_reduce: how long until the cell ends?"""
    at = page.folder / "blocked"
    body = (
        f"import time\nif rank == 1:\n    open({str(at)!r}, 'w').close()\n    time.sleep(1000)\n"
        "dist.all_reduce(torch.ones(1))"
    )
    sent = page.send(page.source(body))
    wait_for(at)
    time.sleep(0.3)
    page.manager.interrupt_kernel()
    began = time.monotonic()
    status, _, ended = page.ended(sent, limit_s)
    if status == "hangs":
        return None, status
    alive = page.run(page.source("print('alive', rank)"), limit_s)
    works = "the next cell works" if "alive 0" in alive[1] else "the next cell does not work"
    return ended - began, f"cell marked {status}, {works}"


def orphans(page: Book, limit_s: float) -> tuple[float | None, str]:
    """The kernel receives SIGKILL while a cell runs: how many processes remain after 10 s?"""
    page.send(page.source("while True: pass"))
    time.sleep(1.0)
    kernel = page.manager.provisioner.pid  # type: ignore[union-attr]
    os.kill(kernel, signal.SIGKILL)
    time.sleep(10.0)
    left = [one for one in page.processes() if one.pid != kernel]
    return float(len(left)), "processes left"


def listens(page: Book, limit_s: float) -> tuple[float | None, str]:
    """Which sockets listen beyond loopback, while a cell runs?"""
    page.send(page.source("import time; time.sleep(3)"))
    time.sleep(1.0)
    wide = set()
    for process in page.processes():
        with contextlib.suppress(psutil.Error):
            for one in process.net_connections(kind="inet"):
                if one.status == psutil.CONN_LISTEN and one.laddr.ip not in ("127.0.0.1", "::1"):
                    wide.add((one.laddr.ip, one.laddr.port))
    return float(len(wide)), "sockets listen on other interfaces"


def starts(page: Book, limit_s: float) -> tuple[float | None, str]:
    """From the first cell in a new kernel until all workers have done an all_reduce."""
    return page.started_s, "from the first cell to the end of an all_reduce"


def answers(page: Book, limit_s: float) -> tuple[float | None, str]:
    """A cell with one all_reduce, run many times: the median time until it ends."""
    times_s = []
    for _ in range(10):
        began = time.monotonic()
        status, _, ended = page.run(page.source("dist.all_reduce(torch.ones(1))"), limit_s)
        if status != "ok":
            return None, f"a cell was marked {status}"
        times_s.append(ended - began)
    return statistics.median(times_s), "median of ten cells"


QUESTIONS = (starts, answers, raises, killed, interrupted, orphans, listens)
FAULTS = {one.__name__: one for one in QUESTIONS}


def main() -> None:
    """Provoke each fault in each tool."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--only", action="append", choices=FAULTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for name in given.tool or TOOLS:
        if importlib.util.find_spec(TOOLS[name].module) is None:
            print(f"{name}: not installed")
            continue
        for fault in given.only or FAULTS:
            rows.append(measure(name, fault, given.repeats, given.limit))
            row = rows[-1]
            print(f"{name:20} {fault:12} {row['figures']} {row['says']}", flush=True)
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1))
    for row in rows:
        print(json.dumps(row))


def measure(name: str, fault: str, repeats: int, limit_s: float) -> dict[str, object]:
    """Return a row with the measured values; None if the cell had not ended at the limit."""
    figures: list[float | None] = []
    says: list[str] = []
    for _ in range(repeats):
        try:
            with book(TOOLS[name]) as page:
                figure, said = FAULTS[fault](page, limit_s)
        except Exception as error:  # told in the row
            figure, said = None, f"{type(error).__name__}: {error}"
        figures.append(None if figure is None else round(figure, 3))
        says.append(said)
    known = [one for one in figures if one is not None]
    return {
        "what": "the same fault in several tools", "tool": name, "fault": fault,
        "figures": figures, "limit_s": limit_s,
        "median": statistics.median(known) if known else None,
        "worst": max(known, default=None) if len(known) == len(figures) else None,
        "says": sorted(set(says)),
    }  # fmt: skip


if __name__ == "__main__":
    main()
