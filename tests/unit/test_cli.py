import json
import os
import subprocess
import sys

import nbformat
import pytest
from history_rows import make_summary
from nbformat.sign import NotebookNotary

from workbench import cli
from workbench.cluster import folders as kept
from workbench.errors import WorkbenchError
from workbench.history.analysis.comparison import compare
from workbench.views import blocks


def table(text, **metadata):
    return nbformat.v4.new_output(
        "display_data",
        data={"text/html": "<table></table>", "text/plain": text},
        metadata=metadata,
    )


def notebook(*outputs):
    book = nbformat.v4.new_notebook()
    for output in outputs:
        cell = nbformat.v4.new_code_cell("1")
        cell.outputs = [output]
        book.cells.append(cell)
    return book


def test_the_notebooks_of_the_checkout_are_found():
    assert (cli.notebooks_folder() / cli.QUICKSTART).is_file()


def test_notebooks_that_are_not_installed_are_an_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "workbench" / "shipped.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(WorkbenchError, match="WB-GEN-005"):
        cli.notebooks_folder()
    assert cli.main(["demo", "--out", str(tmp_path)]) == 1
    assert "WB-GEN-005" in capsys.readouterr().err


def test_the_summary_is_the_comparison_whatever_its_words():
    shown = notebook(
        table("the speed-up of another"),
        table("compared", workbench_shows="comparison"),
        table("speed-up"),
    )
    assert cli._summary(shown) == "compared"


def test_a_comparison_says_in_its_output_what_it_is(monkeypatch):
    from workbench.notebook.compare import Compared

    shown = []
    monkeypatch.setattr(blocks, "display", lambda thing, **more: shown.append(more))
    compared = Compared(compare([make_summary("a"), make_summary("b")]))
    compared._ipython_display_()
    blocks.show(compared.table())
    blocks.show("something else")
    assert [one.get("metadata") for one in shown] == [
        None, {"workbench_shows": "comparison"}, {"workbench_shows": "comparison"}, None,
    ]  # fmt: skip


def test_the_summary_is_the_last_table():
    assert cli._summary(notebook(table("first"), table("last"))) == "last"
    assert "no table" in cli._summary(notebook())


def test_a_missing_tool_is_named_with_what_installs_it():
    with pytest.raises(WorkbenchError, match="WB-GEN-001"):
        cli._need("surely_not_installed")


def test_demo_writes_notebook_and_page_and_reports_a_failing_cell(tmp_path, monkeypatch, capsys):
    book = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python"}}
    )
    book.cells = [nbformat.v4.new_code_cell(source) for source in ("1 + 1", "raise OSError('x')")]
    source = tmp_path / "source"
    source.mkdir()
    nbformat.write(book, source / cli.QUICKSTART)
    monkeypatch.setattr(cli, "notebooks_folder", lambda: source)
    out = tmp_path / "out"
    assert cli.main(["demo", "--out", str(out)]) == 1
    assert "OSError" in capsys.readouterr().err
    executed = nbformat.read(out / cli.QUICKSTART, as_version=4)
    assert executed.cells[0].outputs[0]["data"]["text/plain"] == "2"
    assert "<html" in (out / "quickstart.html").read_text()
    book.cells.pop()
    nbformat.write(book, source / cli.QUICKSTART)
    assert cli.main(["demo", "--out", str(out)]) == 0


def test_lab_opens_a_copy(tmp_path, monkeypatch):
    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(cli.subprocess, "call", lambda command, env: calls.append(command) or 0)
    assert cli.main(["lab", "--no-browser"]) == 0
    copied = {path.name for path in (tmp_path / "workbench-notebooks").iterdir()}
    assert {cli.QUICKSTART, "lab_1.ipynb"} <= copied
    assert "solutions" not in copied
    book = nbformat.read(tmp_path / "workbench-notebooks" / "lab_1.ipynb", as_version=4)
    assert NotebookNotary().check_signature(book)
    book.cells[1].source += "  # changed"
    assert not NotebookNotary().check_signature(book)
    assert calls[0][-1] == "--no-browser"


def test_lab_adds_what_a_folder_lacks_and_leaves_the_rest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(cli.subprocess, "call", lambda command, env: 0)
    folder = tmp_path / "workbench-notebooks"
    folder.mkdir()
    (folder / "lab_1.ipynb").write_text("mine")
    assert cli.main(["lab"]) == 0
    assert (folder / "lab_1.ipynb").read_text() == "mine"
    assert NotebookNotary().check_signature(nbformat.read(folder / "lab_2.ipynb", as_version=4))


def test_labs_are_made_from_their_sources(tmp_path, capsys):
    sources = cli.notebooks_folder() / "solutions"
    solved = tmp_path / "solved"
    where = ["--to", str(tmp_path), "--solved-to", str(solved)]
    assert cli.main(["labs", str(sources / "lab_1.md"), *where]) == 0
    assert (tmp_path / "lab_1.ipynb").is_file()
    assert (solved / "lab_1_solved.ipynb").is_file()
    assert "lab_1.ipynb" in capsys.readouterr().out
    assert cli.main(["labs", str(sources / "lab_99.md"), *where]) == 1
    assert "such lab" in capsys.readouterr().err


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Arguments that JupyterLab was started with; an empty folder to work in."""
    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(cli.subprocess, "call", lambda command, env: calls.append(command[4:]) or 0)
    return calls


@pytest.fixture
def sources(tmp_path):
    """A folder of labs' sources."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "lab_1.md").touch()
    return folder


def test_sources_given_to_lab_are_refused_and_lead_to_labs(opened, sources, capsys):
    one = str(sources / "lab_1.md")
    cases = {one: one, str(sources): str(sources / "lab_*.md"), "lab_77.md": "lab_77.md"}
    for text, named in cases.items():
        assert cli.main(["lab", "--no-browser", text]) == 1
        told = capsys.readouterr().err
        assert "WB-PLAN-018" in told
        assert f"workbench labs {named}\n" in told
    assert not opened
    assert not (sources.parent / "workbench-notebooks").exists()


def test_flags_and_their_values_are_passed_on_to_jupyterlab(opened, sources):
    given = ["--port", "8899", "--ServerApp.root_dir", str(sources), "--notebook-dir", str(sources)]
    assert cli.main(["lab", *given]) == 0
    assert opened == [given]


def test_labs_without_sources_leads_to_lab(opened, sources, capsys):
    notebooks = sources.parent / "notebooks"
    notebooks.mkdir()
    for given in ([], [str(notebooks)], ["lab_1.ipynb"]):
        assert cli.main(["labs", *given]) == 1
        told = capsys.readouterr().err
        assert "WB-PLAN-019" in told or "WB-PLAN-020" in told
        assert "`workbench lab`" in told
    assert cli.main(["labs", str(sources)]) == 1
    assert f"workbench labs {sources / 'lab_*.md'}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["labs", "--no-browser"])
    assert "`workbench lab`" in capsys.readouterr().err


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit):
        cli.main([])
    assert "demo" in capsys.readouterr().err


# -- clusters --------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(kept.tempfile, "tempdir", str(tmp_path))


def sleeping():
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def sleeper():
    """A process that stands for an engine, and its owner's description."""
    yield from sleeping()


@pytest.fixture
def another():
    yield from sleeping()


def cluster(process, **about):
    folder = kept.create()
    who = kept.identity(process.pid)
    kept.write(
        folder,
        {
            "engines": {"0": who}, "parents": {}, "controller": None, "owner": None, "kept": True,
            "since": 0.0, "framework": "torch", "notebook": "a.ipynb", **about,
        },
    )  # fmt: skip
    page = {"busy": True, "since": 1.0, "what": "run base", "pid": process.pid}
    kept.write_json(folder / kept.DOING / "engine-0.jsonl", page)
    return kept.cluster_id(folder)


@pytest.mark.usefixtures("folders")
def test_ps_lists_clusters_and_what_they_do(sleeper, capsys):
    assert cli.main(["ps"]) == 0
    assert capsys.readouterr().out == "no clusters\n"
    name = cluster(sleeper)
    assert cli.main(["ps"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["id", "since", "engines"]
    for word in (name, "torch", "run base", "nobody, kept", "a.ipynb"):
        assert word in row
    assert cli.main(["ps", "--json"]) == 0
    (about,) = json.loads(capsys.readouterr().out)
    assert (about["id"], about["engines"], about["idle_s"]) == (name, 1, 0.0)


@pytest.mark.usefixtures("folders")
def test_stop_ends_what_was_named_and_nothing_else(sleeper, another, capsys):
    name, other = cluster(sleeper), cluster(another)
    assert cli.main(["stop"]) == 1
    assert "WB-CLUSTER-002" in capsys.readouterr().err
    assert cli.main(["stop", "nope"]) == 1
    assert other in capsys.readouterr().err
    assert cli.main(["stop", name]) == 0
    assert sleeper.wait(10) == -9
    assert [one.id for one in kept.clusters()] == [other]
    assert cli.main(["stop", "--all"]) == 0
    assert another.wait(10) == -9
    assert kept.clusters() == []


@pytest.mark.usefixtures("folders")
def test_a_reused_pid_is_neither_listed_nor_ended(sleeper):
    who = kept.identity(sleeper.pid)
    wrong = {**who, "create_time": who["create_time"] - 60}
    assert cluster(sleeper, engines={"0": wrong})
    assert kept.clusters() == []
    name = cluster(sleeper, engines={"0": wrong, "1": kept.identity(os.getpid())})
    found = {one.id: one for one in kept.clusters()}[name]
    assert found.engines == [1]
    kept.write(found.folder, {**found.about, "engines": {"0": wrong}})
    kept.stop(kept.Found(found.folder, {**found.about, "engines": {"0": wrong}}, {}))
    assert sleeper.poll() is None


@pytest.mark.parametrize(
    "about",
    ["", "{", "[]", '{"version": 1}', '{"version": 9}', '{"version": 1, "engines": [1]}',
     '{"version": 1, "engines": {"x": {}}, "parents": {}, "since": "soon"}'],
)  # fmt: skip
@pytest.mark.usefixtures("folders")
def test_a_damaged_description_is_no_cluster(about):
    folder = kept.create()
    (folder / kept.ABOUT).write_text(about)
    assert kept.look(folder) is None
    assert kept.clusters() == []
