"""Cells without a strategy: every worker runs them, as torchrun would."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest
from lending import lent
from needs import need
from notebook_shell import WAIT_S, interrupt_main_thread, soon

import workbench as wb
from workbench.errors import RunError
from workbench.notebook.session import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")


@pytest.fixture(scope="module", autouse=True)
def names_that_cells_use(book):
    """So that each test can run alone."""
    book.ok("%%distributed\nimport torch")


def test_the_all_reduce_of_the_first_page(book):
    cell = book.ok(
        "%%distributed\n"
        "import torch, torch.nn as nn\n"
        "x = torch.ones(3, device=device) * rank\n"
        "dist.all_reduce(x)\n"
        "print(rank, world_size, device, x)\n"
    )
    assert cell.lines() == [
        "[rank 0] 0 2 cpu tensor([1., 1., 1.])",
        "[rank 1] 1 2 cpu tensor([1., 1., 1.])",
    ]


def test_variables_persist_and_the_last_expression_is_shown_once_where_it_is_equal(book):
    book.ok("%%distributed\nkept = [rank, 'kept']")
    assert book.ok("%%distributed\nkept[1]").lines() == ["[ranks 0-1] 'kept'"]
    assert book.ok("%%distributed\nkept[0]").lines() == ["[rank 0] 0", "[rank 1] 1"]


def test_the_environment_is_torchruns_and_only_while_a_cell_runs(book):
    cell = book.ok(
        "%%distributed\n"
        "import os\n"
        "names = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR'.split()\n"
        "print(*(os.environ[name] for name in names))\n"
        "assert int(os.environ['MASTER_PORT']) and os.environ['TORCHELASTIC_RUN_ID']\n"
    )
    assert cell.lines() == ["[rank 0] 0 0 2 2 127.0.0.1", "[rank 1] 1 1 2 2 127.0.0.1"]
    left = session.cluster.engine_set.call([0, 1], "os:getenv", ("RANK",))
    assert left == {0: None, 1: None}


def test_errors_and_carriage_returns_of_both_streams_come_through(book):
    cell = book.ok(
        "%%distributed\nimport sys\nprint('10 %\\r20 %')\nprint('loud', file=sys.stderr)\n"
    )
    assert cell.lines() == ["[ranks 0-1] 20 %", "[ranks 0-1] loud"]


def test_what_c_code_and_child_processes_print_last_comes_with_the_cell(monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # ipykernel does not read pipes where it finds this
    source = "import os\n_ = os.system('echo child')\n"
    source += "_ = os.write(1, b'out\\n')\n_ = os.write(2, b'err\\n')"
    with wb.Cluster(2, devices="cpu") as cluster:
        for _ in range(30):
            task = cluster.execute(source)
            assert task.over.wait(WAIT_S)
            printed = {0: [], 1: []}
            for line in task.board.text().splitlines():
                ranks, _, word = line.rpartition("] ")
                for rank in (0, 1) if ranks == "[ranks 0-1" else (int(ranks[-1]),):
                    printed[rank].append(word)
            for words in printed.values():  # in which order both streams come is not said
                assert sorted(words) == ["child", "err", "out"], task.board.text()
                assert words.index("child") < words.index("out")


def test_figures_and_html_come_through(book):
    task = session.cluster.execute(
        "%matplotlib inline\n"
        "from IPython.display import HTML, display\n"
        "import matplotlib.pyplot as plt\n"
        "display(HTML(f'<b>bold {rank}</b>'))\n"
        "lines = plt.plot([rank, 1])\n"
    )
    assert task.over.wait(WAIT_S)
    assert task.failure() is None
    html = task.board.render(final=True)["text/html"]
    assert "<b>bold 0</b>" in html
    assert "<b>bold 1</b>" in html
    assert html.count("data:image/png;base64,iVBOR") == 2


def test_a_traceback_counts_lines_as_the_notebooks_cell_does_and_is_shown_once(book):
    cell = book.refused(
        "%%distributed\n\nfirst = 1\nraise LookupError('here')\n", "Ranks 0-1", "LookupError: here"
    )
    assert cell.stdout.count("Traceback (most recent call last)") == 1
    assert ", line 4" in cell.stdout
    assert "----> 4 raise" in cell.stdout


def test_a_cell_magic_below_the_magic_still_works(book):
    assert "Wall time" in book.ok("%%distributed\n%%time\nprint('timed')\n").stdout


def test_await_works_at_the_top_of_a_cell_and_leaves_nothing_behind(book):
    source = "%%distributed\nimport asyncio\nawait asyncio.sleep(0.001)\nprint('after', rank)\n"
    assert book.ok(source).lines() == ["[rank 0] after 0", "[rank 1] after 1"]
    assert book.ok("%%distributed\nawait asyncio.sleep(0)\nrank").lines()[1] == "[rank 1] 1"
    book.refused("%%distributed\nawait asyncio.sleep(0)\n1/0", "ZeroDivisionError")


def test_some_ranks_run_a_cell_and_the_world_stays_whole(book):
    assert book.ok("%%rank 1\nprint(rank, world_size)").lines() == ["[rank 1] 1 2"]
    assert book.ok("%%distributed --ranks [0]\nworld_size").lines() == ["[rank 0] 2"]
    book.refused("%%rank 7\n1", "WB-PLAN-101", "7", "0, 1")


def test_the_number_of_workers_shrinks_and_grows(book):
    one = "%%distributed -n 1\nx = torch.ones(1); dist.all_reduce(x); print(world_size, x.item())"
    assert book.ok(one).lines() == ["[rank 0] 1 1.0"]
    assert len(session.cluster.ids) == 2
    three = one.replace("-n 1", "-n 3").replace("x =", "import torch; x =")
    assert book.ok(three).lines() == ["[ranks 0-2] 3 3.0"]
    assert len(session.cluster.ids) == 3
    two = one.replace("-n 1", "-n 2")
    assert book.ok(two).lines() == ["[ranks 0-1] 2 2.0"]


def test_local_runs_the_cell_in_the_notebook_too(book):
    book.ok("%%distributed -n 2 --local\nhere = __import__('os').getpid()\n")
    assert book["here"] == os.getpid()
    book.ok("%pull here --rank 0,1 --as there")
    assert sorted(book["there"]) == sorted(e.pid for e in session.cluster.engines[:2])


def test_a_background_cell_returns_at_once_and_another_is_refused_meanwhile(book, tmp_path):
    gate = tmp_path / "go on"
    waiting = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    book.ok(f"%%distributed -n 2 --background\n{waiting}")
    book.refused("%%distributed\n1", "WB-RUN-065", "a cell", "interrupt")
    book.namespace["value"] = 1
    book.refused("%push value", "WB-RUN-065")
    gate.touch()
    assert soon(lambda: session.cluster.busy.is_over)
    book.ok("%%distributed -n 2\n1")


def test_a_reassigned_name_is_mentioned_and_set_again(book):
    assert "rank" in book.ok("%%distributed -n 2\nrank = 99\n").stdout
    assert book.ok("%%distributed -n 2\nrank").lines() == ["[rank 0] 0", "[rank 1] 1"]


def test_push_and_pull_carry_values_both_ways(book):
    book.namespace.update(a=1, b=[2, 3])
    book.ok("%push a b --rank 0,1  # both")
    assert book.ok("%%distributed -n 2\na, b").lines() == ["[ranks 0-1] (1, [2, 3])"]
    book.ok("%%distributed -n 2\nloss = rank / 2\n")
    book.ok("%pull loss --rank 1 --as l")
    assert book["l"] == 0.5
    book.refused("%pull nowhere --rank 0", "nowhere")
    book.refused("%push a --rank 9", "WB-PLAN-139", "9")


def test_an_edited_module_reaches_engines_that_autoreload(book, tmp_path, monkeypatch):
    module = tmp_path / "wb_edited_module.py"
    module.write_text("def answer():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    book.ok(f"%%distributed -n 2\nimport sys; sys.path.insert(0, {str(tmp_path)!r})")
    book.ok("%load_ext autoreload\n%autoreload 2")
    try:
        assert "1" in book.ok("%%distributed -n 2\nimport wb_edited_module as m\nm.answer()").stdout
        module.write_text("def answer():\n    return 'edited'\n")
        later = module.stat().st_mtime + 10
        os.utime(module, (later, later))
        assert "edited" in book.ok("%%distributed -n 2\nm.answer()").stdout
    finally:
        book.ok("%autoreload 0")


# -- failing fast ----------------------------------------------------------------------------------


def test_one_ranks_error_ends_the_others_wait_and_the_next_cell_works(book):
    pids = {engine.id: engine.pid for engine in session.cluster.engines}
    cell = book.refused(
        "%%distributed -n 2\n"
        "import torch\n"
        "dist.barrier()\n"
        "if rank == 1:\n"
        "    raise ValueError('mine')\n"
        "dist.all_reduce(torch.ones(1))\n",
        "Rank 1 (engine 1) failed: ValueError: mine",
        "Also failed: rank 0: ",
    )
    assert cell.seconds < 5
    assert "KeyboardInterrupt" not in cell.stdout
    assert {engine.id: engine.pid for engine in session.cluster.engines} == pids
    again = "%%distributed -n 2\nx = torch.ones(1); dist.all_reduce(x); print(x.item())"
    assert book.ok(again).lines() == ["[ranks 0-1] 2.0"]


def test_an_error_before_the_first_collective_of_a_group_ends_the_others_wait_too(book):
    pids = {engine.id: engine.pid for engine in session.cluster.engines}
    for attempt in range(3):
        session.cluster.pool.drop_group()  # the next cell makes a new one
        cell = book.refused(
            "%%distributed -n 2\nimport torch\n"
            f"if rank == {attempt % 2}: raise ValueError('mine')\ndist.all_reduce(torch.ones(1))",
            "ValueError: mine",
        )
        assert cell.seconds < 6
    assert {engine.id: engine.pid for engine in session.cluster.engines} == pids
    again = "%%distributed -n 2\nx = torch.ones(1); dist.all_reduce(x); print(x.item())"
    assert book.ok(again).lines() == ["[ranks 0-1] 2.0"]


def test_a_cell_may_destroy_the_group_and_the_next_has_one(book):
    book.ok("%%distributed -n 2\ndist.destroy_process_group()")
    again = "%%distributed -n 2\nx = torch.ones(1); dist.all_reduce(x); print(x.item())"
    assert book.ok(again).lines() == ["[ranks 0-1] 2.0"]


def test_an_interrupt_ends_a_blocked_collective_and_marks_the_cell(book):
    pids = {engine.id: engine.pid for engine in session.cluster.engines}
    book.ok("%%distributed -n 2\nimport torch")
    timer = threading.Timer(1.0, interrupt_main_thread)
    timer.start()
    cell = book.run(
        "%%distributed -n 2\nif rank == 0:\n    dist.all_reduce(torch.ones(1))\n"
        "else:\n    import time; time.sleep(60)\n"
    )
    assert isinstance(cell.error, RunError)
    assert "Interrupted" in str(cell.error)
    assert cell.seconds < 1.0 + 5
    assert {engine.id: engine.pid for engine in session.cluster.engines} == pids
    again = "%%distributed -n 2\nx = torch.ones(1); dist.all_reduce(x); print(x.item())"
    assert book.ok(again).lines() == ["[ranks 0-1] 2.0"]


def test_an_interrupt_of_idle_engines_does_them_no_harm(book):
    pids = {engine.id: engine.pid for engine in session.cluster.engines}
    session.cluster.engine_set.interrupt(session.cluster.ids)
    assert book.ok("%%distributed -n 2\nworld_size").lines() == ["[ranks 0-1] 2"]
    assert {engine.id: engine.pid for engine in session.cluster.engines} == pids


def test_an_engine_killed_in_a_cell_is_named_and_comes_back_under_its_id(book):
    began = time.perf_counter()
    cell = book.refused(
        "%%distributed -n 2\nimport os, signal\ndist.barrier()\n"
        "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.all_reduce(torch.ones(1))\n",
        "Rank 1 is gone",
        "SIGKILL",
        "%cluster restart 1",
    )
    assert time.perf_counter() - began < 10, cell.text
    status = book.ok("%cluster").text
    assert "dead (SIGKILL)" in status
    book.ok("%cluster restart 1")
    again = "%%distributed -n 2\nimport torch; x = torch.ones(1); dist.all_reduce(x); x.item()"
    assert book.ok(again).lines() == ["[ranks 0-1] 2.0"]
    assert "dead" not in book.ok("%cluster").text


def test_an_engine_that_dies_while_idle_is_noticed_and_replaced_when_it_is_needed(book):
    victim = next(e for e in session.cluster.engines if e.id == 1)
    os.kill(victim.pid, 9)
    assert soon(lambda: victim.state == "dead")
    need = len(session.cluster.ids) + 1
    cell = book.ok(f"%%distributed -n {need}\nprint(world_size)")
    assert cell.lines() == [f"[ranks 0-{need - 1}] {need}"]
    book.ok("%cluster restart 1")
    assert 1 in session.cluster.ids


def test_engines_see_the_notebooks_folder_path_and_environment_as_they_were_at_start(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WB_TEST_SEEN", "yes")
    monkeypatch.setattr(sys, "path", [*sys.path, "/nowhere/in/particular"])
    with lent(1) as cluster:
        task = cluster.execute(
            "import os, sys\n"
            "path = '/nowhere/in/particular' in sys.path\n"
            "found = [os.getcwd(), os.environ['WB_TEST_SEEN'], path]"
        )
        assert task.over.wait(WAIT_S)
        found = cluster.pull(["found"])[0]["found"]
    assert found == [str(Path(tmp_path).resolve()), "yes", True]


TWO_DEVICES = """%%distributed -n 2
import torch, torch.nn as nn, torch.nn.functional as F
first, second = (f"cuda:{i}" for i in range(2)) if torch.cuda.device_count() > 1 else ("cpu",) * 2

class ModelParallelCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1).to(first)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1).to(second)
        self.fc1 = nn.Linear(64 * 14 * 14, 128).to(first)
        self.fc2 = nn.Linear(128, 10).to(second)

    def forward(self, x):
        x = F.relu(self.conv1(x.to(first)))
        x = F.relu(self.conv2(x.to(second)))POOL
        x = x.view(-1, 64 * 14 * 14)
        x = F.relu(self.fc1(x.to(first)))
        return self.fc2(x.to(second))

model = ModelParallelCNN()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
x, y = torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,), device=second)
loss = nn.CrossEntropyLoss()(model(x), y)
loss.backward()
optimizer.step()
print("trained")
"""


def test_the_textbooks_two_device_cnn_runs_on_devices_or_stand_ins(book):
    cell = book.ok(TWO_DEVICES.replace("POOL", "; x = F.max_pool2d(x, 2)"))
    assert cell.lines() == ["[ranks 0-1] trained"]


def test_its_shape_mistake_is_explained(book):
    cell = book.run(TWO_DEVICES.replace("POOL", ""))
    assert cell.error is not None
    text = "\n".join(cell.lines())
    assert "128 outputs for 32 targets" in text
    assert "(32, 64, 28, 28) became (128, 12544) in: x = x.view(-1, 64 * 14 * 14)" in text
    assert "2x2 max-pool" in text
