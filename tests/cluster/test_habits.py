"""What somebody who comes from plain Jupyter and torchrun does first, in one cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from needs import need
from notebook_shell import Notebook, soon
from torchrun_scripts import GPT, MULTIGPU

from workbench.notebook.session import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")


@pytest.fixture(scope="module", autouse=True)
def names_that_cells_use(book: Notebook) -> None:
    """So that each test can run alone."""
    book.ok(
        "%%distributed\n"
        "import torch\n"
        "class OnlyThere(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(2, 2)\n"
    )


# -- %pull -----------------------------------------------------------------------------------------


def test_a_class_that_the_notebook_lacks_is_named_at_once(
    book: Notebook, capfd: pytest.CaptureFixture[str]
) -> None:
    book.ok("%%distributed\nn = OnlyThere()\nparts = n.state_dict()")
    cell = book.refused(
        "%pull n --rank 0",
        "n cannot be",
        "engine 0",
        "WB-RUN-062",
        "define OnlyThere in the notebook too",
        "`parts = n.state_dict()`",
        "%pull parts",
    )
    assert cell.seconds < 10  # a reply that could not be read was waited for for a minute
    assert "Traceback" not in capfd.readouterr().err
    book.ok("%pull parts --rank 0")
    assert book["parts"]["layer.weight"].shape == (2, 2)


def test_a_class_that_was_defined_again_is_named(book: Notebook) -> None:
    book.ok("%%distributed\nclass Twice: pass\nold = Twice()")
    book.ok("%%distributed\nclass Twice: pass")
    book.refused("%pull old", "WB-RUN-062", "Twice", "vars(old)")


def test_a_module_that_the_notebook_lacks_is_named(book: Notebook, tmp_path: Path) -> None:
    (tmp_path / "engines_only.py").write_text("class There: pass\n")
    book.ok(
        f"%%distributed\nimport sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "import engines_only\nthing = engines_only.There()\nnumber = 5"
    )
    book.refused("%pull thing", "no engines_only.There", "make engines_only importable")
    book.ok("%pull number")
    assert book["number"] == [5, 5]


def test_functions_and_large_arrays_come_as_before(book: Notebook) -> None:
    book.ok(
        "%%distributed\nimport numpy\nadd = lambda x: x + 1\nmany = numpy.full(10**6, rank)\n"
        "rows = [numpy.ones(3)] * 70"
    )
    book.ok("%pull add many rows")
    assert [one(1) for one in book["add"]] == [2, 2]
    assert [one.sum() for one in book["many"]] == [0, 10**6]
    assert len(book["rows"][1]) == 70


# -- ways to end a cell ----------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["exit()", "quit(3)", "%run {script}"])
def test_exit_ends_the_cell_and_no_engine(book: Notebook, tmp_path: Path, line: str) -> None:
    (tmp_path / "ends.py").write_text("print('here')\nexit(3)\nprint('not here')\n")
    pids = [info.pid for info in session.cluster.engines]
    book.ok("%%distributed\nkept = 1")
    cell = book.refused(
        f"%%distributed\n{line.format(script=tmp_path / 'ends.py')}", "SystemExit", "end a cell"
    )
    assert "not here" not in cell.text
    assert "To exit" not in cell.text
    assert book.ok("%%distributed\nkept").lines() == ["[ranks 0-1] 1"]
    assert [info.pid for info in session.cluster.engines] == pids


def test_a_script_that_fails_on_one_rank_ends_the_cell(book: Notebook, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise ValueError('of rank 1')\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    cell = book.refused(f"%%distributed\n%run {tmp_path / 'fails.py'}", "Rank 1", "of rank 1")
    assert "fails.py" in cell.text


# -- what is shown ---------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["auto", "notebook"])
def test_bars_of_tqdm_are_text_and_end_full(book: Notebook, module: str) -> None:
    pytest.importorskip("tqdm")
    cell = book.ok(
        f"%%distributed\nfrom tqdm.{module} import tqdm, trange\n"
        "for i in tqdm(range(20), desc='steps'): pass\n"
        "for i in trange(5): pass\n"
        "hidden = tqdm(total=3, display=False)\n"
    )
    assert cell.text.count("20/20") == cell.text.count("5/5") == 2
    assert "steps: 100%" in cell.text


def test_live_displays_of_rich_end_as_they_end(book: Notebook) -> None:
    pytest.importorskip("rich")
    cell = book.ok(
        "%%distributed\nfrom rich.progress import track\n"
        "for i in track(range(20), 'steps', update_period=0.01): pass\nprint('after')"
    )
    assert "100%" in cell.text
    assert "after" in cell.text
    assert cell.text.count("steps") <= 2  # one for each rank: it is replaced, not repeated
    assert "<text/html>" not in cell.text


def test_what_a_thread_prints_after_its_cell_comes_in(book: Notebook, tmp_path: Path) -> None:
    book.ok(
        "%%distributed\nimport os, threading, time\n"
        f"def late():\n    while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        "    print('late', rank)\n"
        "threading.Thread(target=late).start()\nprint('early')"
    )
    board = session.cluster.busy.board
    assert board.text() == "[ranks 0-1] early"
    (tmp_path / "go").touch()
    assert soon(lambda: "[rank 0] late 0" in board.text() and "[rank 1] late 1" in board.text())


def test_warnings_and_groups_of_errors_name_the_cell(book: Notebook) -> None:
    cell = book.ok("%%distributed\nimport warnings\nwarnings.warn('careful')")
    number = book.shell.execution_count - 1  # it counts on after each cell
    assert cell.lines() == [
        f"[ranks 0-1] Cell In[{number}]:3: UserWarning: careful",
        "[ranks 0-1]   warnings.warn('careful')",
    ]
    if sys.version_info >= (3, 11):
        cell = book.refused(
            "%%distributed\ntry:\n    1 / 0\nexcept Exception as error:\n"
            "    raise ExceptionGroup('both', [error, TypeError('second')])",
            "ExceptionGroup",
        )
        number = book.shell.execution_count - 1  # it counts on after each cell
        assert f"[ranks 0-1]   |   Cell In[{number}], line 5" in cell.text
        assert f"[ranks 0-1]     |   Cell In[{number}], line 3" in cell.text
        assert "ipykernel_" not in cell.text


def test_an_error_is_told_once_and_names_the_users_line(book: Notebook) -> None:
    cell = book.refused("%%distributed\nraise ValueError('mine')", "ValueError: mine")
    assert cell.text.count("ValueError: mine") == 1
    assert "RunError: Ranks 0-1 failed" in cell.text
    cell = book.refused("%%distributed mirrored --plot off\nx = 1\nwb.fit(None)", "FitError")
    number = book.shell.execution_count - 1  # it counts on after each cell
    assert f"[ranks 0-1] Cell In[{number}], line 3" in cell.lines()
    assert "[ranks 0-1] ----> 3 wb.fit(None)" in cell.lines()
    assert not book["_run"].error.shown  # asked for elsewhere, it is told whole


@pytest.mark.parametrize("line", ["?len", "len?"])
def test_help_is_shown_below_the_cell(book: Notebook, line: str) -> None:
    assert "[ranks 0-1] Signature: len(obj, /)" in book.ok(f"%%distributed\n{line}").lines()


# -- scripts for torchrun --------------------------------------------------------------------------


def run_in_cell(book: Notebook, script: Path, arguments: str) -> str:
    return book.ok(f"%%distributed\n%run {script} {arguments}").text


def weights(path: Path) -> dict[str, object]:
    import torch

    found = torch.load(path)
    return {name: one.tolist() for name, one in found.get("MODEL_STATE", found).items()}


# What pytorch/examples' multigpu_torchrun.py and nanoGPT's train.py do, in their DDP path.
SCRIPTS = {
    "multigpu": (MULTIGPU, "3 1 --snapshot_path={out}"),
    "gpt": (GPT, "--device=cpu --backend=gloo --out={out}"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_for_torchrun_runs_as_it_is(book: Notebook, tmp_path: Path, name: str) -> None:
    source, arguments = SCRIPTS[name]
    script = tmp_path / "train.py"
    script.write_text(source)
    for again in range(3):  # it leaves its group each time
        out = tmp_path / f"{again}.pt"
        text = run_in_cell(book, script, arguments.format(out=out))
        assert "(gloo, 2 ranks)" in text
    assert weights(tmp_path / "0.pt") == weights(tmp_path / "2.pt")
    assert book.ok("%%distributed\nprint(dist.get_world_size())").lines() == ["[ranks 0-1] 2"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_for_torchrun_trains_as_under_torchrun(
    book: Notebook, tmp_path: Path, name: str
) -> None:
    source, arguments = SCRIPTS[name]
    script = tmp_path / "train.py"
    script.write_text(source)
    run_in_cell(book, script, arguments.format(out=tmp_path / "cell.pt"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*command, script, *arguments.format(out=tmp_path / "plain.pt").split()],
        check=True, capture_output=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert weights(tmp_path / "cell.pt") == weights(tmp_path / "plain.pt")


# -- the cluster stays, or what is lost is said ----------------------------------------------------


def test_a_strategy_that_refuses_does_not_end_the_row(book: Notebook) -> None:
    cell = book.refused(
        "%%distributed model_split,mirrored,one_device --plot off\n"
        "x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))\n"
        "def step(m, b): return torch.nn.functional.cross_entropy(m(b[0]), b[1])\n"
        "wb.fit(torch.nn.Linear(8, 3), (x, y), step_fn=step,\n"
        "       optimizer=lambda p: torch.optim.SGD(p, 0.1), batch_size=16, steps=4)",
        "1 of 3 runs",
        "model_split: The model has fewer layers than the pipeline has stages",
    )
    assert [run.state for run in list(book["wb"].runs.values())[-3:]] == [
        "failed", "finished", "finished",
    ]  # fmt: skip
    assert "one_device  one_device" in cell.text


def test_the_extension_loaded_again_keeps_the_cluster(book: Notebook) -> None:
    book.ok("%%distributed\nkept = rank")
    cluster = session.cluster
    book.ok("%reload_ext workbench")
    assert session.cluster is cluster
    assert book.ok("%%distributed\nkept").lines() == ["[rank 0] 0", "[rank 1] 1"]


def test_a_dead_worker_is_told_by_each_cell_until_it_is_back(book: Notebook) -> None:
    book.refused("%%rank 1\nimport os\nos._exit(3)", "exited with code 3")
    note = "Engine 1 is dead, so 1 of 2 workers remains; %cluster restart 1 starts it again."
    for _ in range(2):
        assert book.ok("%%distributed\nprint(world_size)").lines() == [
            f"[rank 0] note: {note}",
            "[rank 0] 1",
        ]
    run = session.cluster.run(
        "import torch\nwb.fit(torch.nn.Linear(8, 1), (torch.ones(8, 8), torch.ones(8, 1)),\n"
        "  loss=torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1), batch_size=8)",
        strategy="mirrored",
    ).wait()
    assert note in run.summary()._repr_mimebundle_()["text/plain"]
    book.ok("%cluster restart 1")
    assert book.ok("%%distributed\nprint(world_size)").lines() == ["[ranks 0-1] 2"]
