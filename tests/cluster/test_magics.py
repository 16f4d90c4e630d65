"""The magics in a real Jupyter kernel: what is shown, completed, interrupted, left behind."""

import os
import time

import nbformat
import psutil
import pytest
from lending import lent
from needs import need
from notebook_shell import WAIT_S, notebook, soon
from warm_support import gone

import workbench as wb
from workbench.errors import ClusterError
from workbench.notebook.session import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")
nbclient = pytest.importorskip("nbclient")

FIT = """import torch
from torch import nn
wb.fit(nn.Linear(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=STEPS)
"""


class Kernel:
    """A Jupyter kernel of its own, driven as a notebook's front end does."""

    def __init__(self, folder, **env):
        self.client = nbclient.NotebookClient(
            nbformat.v4.new_notebook(),
            timeout=90,
            allow_errors=True,
            resources={"metadata": {"path": str(folder)}},
        )
        self.env = {**os.environ, **env}

    def __enter__(self):
        self.client.create_kernel_manager()
        self.client.start_new_kernel(env=self.env)
        self.client.start_new_kernel_client()
        return self

    def __exit__(self, *exc):
        self.client._cleanup_kernel()

    def run(self, source):
        """Execute a cell; its outputs, errors among them."""
        cells, cell = self.client.nb.cells, nbformat.v4.new_code_cell(source)
        cells.append(cell)
        self.client.execute_cell(cell, len(cells) - 1, store_history=True)
        return cell.outputs

    @property
    def pid(self):
        return self.client.km.provisioner.process.pid


def texts(outputs):
    found = [o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in outputs]
    return "\n".join([*found, *(o["evalue"] for o in outputs if o.output_type == "error")])


def kinds(outputs):
    return [sorted(o["data"]) if "data" in o else [o.output_type] for o in outputs]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    with Kernel(tmp_path_factory.mktemp("notebook")) as kernel:
        kernel.run("%load_ext workbench\nimport workbench as wb")
        yield kernel


def test_a_start_leaves_one_output_the_table(kernel):
    outputs = kernel.run("%cluster start 2")
    assert len(outputs) == 1
    assert "text/html" in outputs[0]["data"]
    assert outputs[0]["data"]["text/plain"].count("idle") == 2
    assert "starting" not in texts(outputs)


def test_the_kernel_has_loaded_no_framework(kernel):
    outputs = kernel.run("import sys\n[m for m in ('torch', 'tensorflow') if m in sys.modules]")
    assert texts(outputs).strip() == "[]"


def test_output_of_ranks_is_one_display_and_figures_are_pictures(kernel):
    outputs = kernel.run("%%distributed\nprint('same')\nrank")
    assert kinds(outputs) == [["text/html", "text/plain"]]
    for source in ("import matplotlib.pyplot as plt\nplt.plot([1, rank]);", "plt.plot([rank, 1]);"):
        html = kernel.run(f"%%distributed\n{source}")[0]["data"]["text/html"]
        assert html.count("data:image/png;base64,iVBOR") == 2
        assert "Line2D" not in html  # the semicolon


@pytest.mark.parametrize("plot", ["svg", "text", "off", "widget", "auto"])
def test_every_plot_works_and_leaves_nothing_that_needs_a_kernel(kernel, plot):
    kernel.run("%cluster start 2")  # of these tests some are run without the first one
    outputs = kernel.run(f"%%distributed mirrored --plot {plot}\n" + FIT.replace("STEPS", "20"))
    assert not [o for o in outputs if o.output_type == "error"], texts(outputs)
    assert "application/vnd.jupyter.widget-view+json" not in str(kinds(outputs))
    pictures = sum("image/png" in kind for kind in kinds(outputs))
    assert pictures == (1 if plot in ("svg", "widget", "auto") else 0)
    assert "samples/s" in texts(outputs)


def test_the_kernels_interrupt_ends_a_blocked_cell_as_an_error(kernel):
    kernel.run(
        "import _thread, threading\n"
        "threading.Timer(1.0, lambda: __import__('os').kill(__import__('os').getpid(), 2)).start()"
    )
    before = time.perf_counter()
    outputs = kernel.run(
        "%%distributed\nimport torch, time\n"
        "dist.all_reduce(torch.ones(1)) if rank == 0 else time.sleep(60)"
    )
    assert time.perf_counter() - before < 8
    assert outputs[-1].output_type == "error"
    assert "Interrupted" in texts(outputs)
    outputs = kernel.run("%%distributed\nx = torch.ones(1); dist.all_reduce(x); x.item()")
    assert "2.0" in texts(outputs)


def test_the_kernels_interrupt_stops_a_run(kernel):
    kernel.run(
        "threading.Timer(1.5, lambda: __import__('os').kill(__import__('os').getpid(), 2)).start()"
    )
    outputs = kernel.run("%%distributed mirrored --plot off\n" + FIT.replace("STEPS", "10**7"))
    assert outputs[-1].output_type == "error"
    assert "was stopped" in texts(outputs)
    assert "stopped" in texts(kernel.run("print(_run)"))


def test_a_background_runs_output_appears_below_its_own_cell(kernel):
    source = "%%distributed mirrored --background --plot off --name bg\nprint('from the engine')\n"
    kernel.run(source + FIT.replace("STEPS", "5"))
    assert "finished" in texts(kernel.run("print(wb.runs['bg'].wait(60))"))


def test_a_background_runs_line_of_text_does_not_appear_below_another_cell(kernel):
    source = "%%distributed mirrored --background --plot text --name line\n"
    kernel.run(source + FIT.replace("STEPS", "5"))
    outputs = kernel.run(
        "import threading\nprint(wb.runs['line'].wait(60))\n"
        "for thread in threading.enumerate():\n"
        "    thread.join(60) if thread.name == 'workbench-follow' else None"
    )
    assert "finished" in texts(outputs)
    assert "samples/s" not in texts(outputs)


def test_an_ordinary_end_of_the_kernel_leaves_no_process(tmp_path):
    with Kernel(tmp_path) as kernel:
        kernel.run("%load_ext workbench\n%cluster start 1")
        kernel.run("%%distributed mirrored --plot off\n" + FIT.replace("STEPS", "2"))
        family = {child.pid for child in psutil.Process(kernel.pid).children(recursive=True)}
        engines = texts(kernel.run("%cluster"))
        assert "idle" in engines
    assert len(family) > 3
    assert not gone(family, timeout_s=10)


# -- without a kernel ------------------------------------------------------------------------------


def test_completion_comes_from_the_catalog():
    with notebook() as book:

        def complete(line):
            book.shell.set_completer_frame()
            return book.shell.Completer.complete(line_buffer=line, cursor_pos=len(line))[1]

        assert "mirrored" in complete("%%distributed mir")
        assert "--epochs" in complete("%%distributed mirrored --ep")
        assert "bucket_mb=" in complete("%%distributed mirrored -o bu")
        assert "svg" in complete("%%distributed mirrored --plot s")
        assert "restart" in complete("%cluster re")
        assert "restart" in book.ok("%cluster?").text
        help_text = book.ok("%%distributed?").text
        assert "mirrored" in help_text
        assert "bucket_mb" in help_text


def test_without_prewarming_nothing_is_started_until_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("WORKBENCH_PREWARM", "off")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with notebook(fresh=True) as book:
        assert session.prepared is None
        assert {c.pid for c in psutil.Process().children(recursive=True)} == before
        book.ok("%cluster start 1")
        assert book.ok("%%distributed\nworld_size").lines() == ["[rank 0] 1"]


def test_a_cluster_stops_and_another_starts():
    with notebook(1, fresh=True) as book:
        first = {engine.pid for engine in session.cluster.engines}
        assert "stopped" in book.ok("%cluster stop").stdout
        assert not gone(first, timeout_s=10)
        book.refused("%cluster", "No cluster is running")
        book.ok("%cluster start 2")
        assert book.ok("%%distributed\nworld_size").lines() == ["[ranks 0-1] 2"]
        assert "4 engines" not in book.ok("%cluster start 1").stdout
        assert len(session.cluster.ids) == 2
        book.ok("%cluster start 3  # one more")
        assert len(session.cluster.ids) == 3


def test_two_clusters_side_by_side_do_not_meet():
    with lent(2) as one, wb.Cluster(1) as two:
        one.push({"who": "one"})
        two.push({"who": "two"})
        source = "import torch; x = torch.ones(1); dist.all_reduce(x); seen = (who, x.item())"
        tasks = [one.execute(source), two.execute(source)]
        assert all(task.over.wait(WAIT_S) for task in tasks)
        assert [one.pull(["seen"])[i]["seen"] for i in (0, 1)] == [("one", 2.0)] * 2
        assert two.pull(["seen"])[0]["seen"] == ("two", 1.0)
        runs = [c.run(FIT.replace("STEPS", "5"), strategy="mirrored") for c in (one, two)]
        assert [run.wait(WAIT_S).state for run in runs] == ["finished", "finished"]
        assert [len(run.history) for run in runs] == [10, 5]
        pids = [engine.pid for cluster in (one, two) for engine in cluster.engines]
    assert not gone(pids, timeout_s=10)


def test_logs_free_and_status_of_a_cluster():
    with notebook(2) as book:
        book.ok("%%distributed\nbig = list(range(10))")
        assert "--- engine 1" in book.ok("%cluster logs 1").stdout
        assert "--- engine 0" not in book.ok("%cluster logs 1").stdout
        book.ok("%cluster free")
        book.refused("%%distributed\nbig", "NameError")
        assert book.ok("%%distributed\nworld_size").lines() == ["[ranks 0-1] 2"]
        os.kill(session.cluster.engines[1].pid, 9)
        assert soon(lambda: len(session.cluster.ids) == 1)
        assert "dead (SIGKILL)" in book.ok("%cluster").text
        book.ok("%cluster restart")
        assert session.cluster.ids == [0, 1]
        assert "MiB" in book.ok("%cluster").text


def test_a_start_that_fails_leaves_a_notebook_that_can_try_again(monkeypatch):
    with notebook(fresh=True) as book:
        monkeypatch.setattr(
            "workbench.cluster.services.ClusterServices.launch",
            lambda *args: (_ for _ in ()).throw(
                ClusterError("They did not start.", code="WB-CLUSTER-000")
            ),
        )
        book.refused("%cluster start 1", "did not start")
        monkeypatch.undo()
        book.ok("%cluster start 1")
        assert book.ok("%%distributed\nworld_size").lines() == ["[rank 0] 1"]
