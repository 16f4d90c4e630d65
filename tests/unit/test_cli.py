import sys

import nbformat
import pytest

from workbench import cli
from workbench.errors import WorkbenchError


def table(text):
    return nbformat.v4.new_output(
        "display_data", data={"text/html": "<table></table>", "text/plain": text}
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
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "workbench" / "cli.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(WorkbenchError, match="not installed"):
        cli.notebooks_folder()
    assert cli.main(["demo", "--out", str(tmp_path)]) == 1
    assert "install from a checkout" in capsys.readouterr().err


def test_the_summary_is_the_last_table():
    assert cli._summary(notebook(table("first"), table("last"))) == "last"
    assert "no table" in cli._summary(notebook())


def test_a_missing_tool_is_named_with_what_installs_it():
    with pytest.raises(WorkbenchError, match="pip install"):
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
    monkeypatch.setattr(cli.subprocess, "call", lambda command, env: calls.append(command) or 0)
    assert cli.main(["lab", "--no-browser"]) == 0
    assert (tmp_path / "workbench-notebooks" / cli.QUICKSTART).is_file()
    assert calls[0][-1] == "--no-browser"


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit):
        cli.main([])
    assert "demo" in capsys.readouterr().err
