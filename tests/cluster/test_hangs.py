"""A hang is named while it lasts, in the notebook and in Python, and is gone when it is over."""

import time

import pytest
from needs import need
from notebook_shell import WAIT_S, notebook, soon

from workbench.notebook.session import session
from workbench.views.blocks import Blocks

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

STUCK = """
import os, time, torch
def load_batch():
    while not os.path.exists({gate!r}): time.sleep(0.01)
x = torch.ones(1)
dist.all_reduce(x)
if rank == 1:
    load_batch()
{collective}
"""
FIT = """
import os, time, torch
from torch import nn
class Data(torch.utils.data.Dataset):
    asked = 0
    def __len__(self): return 240
    def __getitem__(self, i):
        Data.asked += 1
        while rank == 1 and Data.asked > 100 and not os.path.exists({gate!r}): time.sleep(0.01)
        return torch.zeros(64), 0
wb.fit(nn.Linear(64, 10), Data(), batch_size=30, loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), epochs=3)
"""


@pytest.fixture(scope="module")
def book():
    with pytest.MonkeyPatch.context() as patch, notebook(3) as book:
        patch.setenv("WORKBENCH_HANG_S", "1")
        yield book


@pytest.fixture
def gate(tmp_path):
    return tmp_path / "go on"


@pytest.mark.parametrize(
    ("collective", "called"),
    [
        ("dist.all_reduce(x)", "in all_reduce"),
        ("dist.barrier()", "in barrier"),
        ("if rank < 2: (dist.recv if rank == 0 else dist.send)(x, 1 - rank)", "in recv"),
        ("work = dist.all_reduce(x, async_op=True)\nwork.wait()", "in wait"),
        (
            "m = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))\nm(torch.ones(1)).backward()",
            "in",
        ),
    ],
)
def test_a_cells_hang_is_named_and_over_when_it_goes_on(book, gate, collective, called):
    source = "from torch import nn" + STUCK.format(gate=str(gate), collective=collective)
    task = session.cluster.execute(source)
    assert soon(lambda: "rank 1 is at cell line 4 in load_batch" in task.banner), task.banner
    assert f" s {called}" in task.banner
    began = float(task.banner.split(" s in")[0].rsplit(" ", 1)[1])
    assert soon(lambda: float(task.banner.split(" s in")[0].rsplit(" ", 1)[1]) > began)
    gate.touch()
    assert task.over.wait(WAIT_S)
    assert task.failure() is None
    assert task.banner == ""


def test_the_banner_stands_below_the_cell_and_not_in_what_stays(book, gate):
    published = []
    blocks = Blocks(lambda bundle, display, update: published.append((bundle, update)))
    source = STUCK.format(gate=str(gate), collective="dist.all_reduce(x)")
    task = session.cluster.execute(source)
    assert soon(lambda: "load_batch" in task.banner)
    blocks.update(task.board, final=False)
    gate.touch()
    assert task.over.wait(WAIT_S)
    blocks.update(task.board, final=True)
    first, last = published[0][0], published[-1][0]
    assert "rank 1 is at cell line 3 in load_batch" in first["text/plain"]
    assert 'role="status"' in first["text/html"]
    assert (last["text/plain"], last["text/html"]) == ("", "")


@pytest.mark.parametrize("strategy", ["mirrored", "sharded", "central_storage"])
def test_a_runs_hang_is_named_in_what_views_draw(book, gate, strategy):
    run = session.cluster.run(FIT.format(gate=str(gate)), strategy=strategy)
    where = "; rank 1 is at cell line 8 in Data.__getitem__"
    assert soon(lambda: run.snapshot().banner.endswith(where)), (run.error, run.snapshot().banner)
    assert run.snapshot().banner.startswith("ranks 0, 2 have waited ")
    gate.touch()
    run.wait(WAIT_S)
    assert run.snapshot().banner == ""
    assert run.state == "finished"


def test_ranks_that_all_compute_and_paused_runs_are_no_hang(book, gate):
    cluster = session.cluster
    seen = []
    asked = cluster.engine_set.router.questions.ask

    def ask(*args):
        seen.append(asked(*args))
        return seen[-1]

    cluster.engine_set.router.questions.ask = ask
    try:
        task = cluster.execute(
            "import time\nend = time.time() + 3.5\nwhile time.time() < end: sum(range(999))"
        )
        banners = set()
        while not task.over.wait(0.05):
            banners.add(task.banner)
        assert banners == {""}
        states = {place.state for answers in seen for place in answers.values()}
        assert "busy" in states
        assert "waits" not in states

        seen.clear()
        gate.touch()
        endless = FIT.format(gate=str(gate)).replace("epochs=3", "steps=10**7")
        run = cluster.run(endless, strategy="mirrored")
        assert soon(lambda: run.history.totals.steps > 5)
        run.pause()
        assert soon(lambda: run.state == "paused")
        end = time.monotonic() + 3
        while time.monotonic() < end:
            assert run.snapshot().banner == ""
            run.over.wait(0.05)
        run.stop()
        assert run.wait(WAIT_S).state == "stopped"
    finally:
        cluster.engine_set.router.questions.ask = asked


def test_stacks_of_every_rank_on_demand(book, gate):
    source = STUCK.format(gate=str(gate), collective="dist.all_reduce(x)")
    book.ok(f"%%distributed --background\n{source}")
    # rank 1 must be in load_batch, the others in the second all_reduce
    assert soon(lambda: "load_batch" in session.cluster.stacks([1])[0].place)
    assert soon(lambda: "waits in all_reduce" in session.cluster.stacks([0])[0].place)
    text = book.ok("%cluster stacks").text
    gate.touch()
    assert soon(lambda: not session.cluster.is_busy)
    assert "--- rank 1 (engine 1, pid" in text
    assert "> cell line 5 in load_batch" in text
    assert "while not os.path.exists" in text
    assert "distributed_c10d.py" in text
    assert "thread workbench-control" in text
    assert "idle" in book.ok("%cluster stacks 0").text
    book.refused("%cluster stacks 7", "WB-CLUSTER-006", "7")
