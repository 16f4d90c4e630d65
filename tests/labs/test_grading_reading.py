"""Whatever is handed in: cells, or the reason why it is no notebook."""

from __future__ import annotations

import json
import os

import pytest
from handed_in import STUBS, book, cells, code, text, write

from workbench.labs.grading import reading
from workbench.labs.grading.reading import Unreadable, definitions, read


def refused(path):
    with pytest.raises(Unreadable) as caught:
        read(path)
    return str(caught.value)


def test_code_cells_are_read_with_their_numbers(tmp_path):
    found = read(write(tmp_path / "a.ipynb", cells()))
    assert found.lab == 1
    assert [cell.exercise for cell in found.cells if cell.exercise] == list(STUBS)
    assert [cell.check for cell in found.cells if cell.check] == list(STUBS)
    assert found.cells[0].tags == {"step"}
    assert found.cells[0].place == 2


def test_sources_in_lines_and_a_byte_order_mark_are_read(tmp_path):
    made = book([code(["a = 1\n", "b = 2"]), text("x")])
    path = tmp_path / "a.ipynb"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(made).encode())
    assert [cell.source for cell in read(path).cells] == ["a = 1\nb = 2"]


def test_notebooks_of_format_3_are_read(tmp_path):
    path = tmp_path / "a.ipynb"
    cell = {"cell_type": "code", "input": ["# YOUR CODE 2.1\n", "x = 1"], "outputs": []}
    sheets = [{"cells": [cell, {"cell_type": "heading", "source": "x"}]}]
    path.write_text(json.dumps({"worksheets": sheets, "nbformat": 3, "metadata": {}}))
    found = read(path)
    assert [cell.source for cell in found.cells] == ["# YOUR CODE 2.1\nx = 1"]
    assert found.lab is None
    assert found.guessed_lab() == 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"{", "not JSON"),
        (b"\xff\xfe{", "not UTF-8"),
        (b"[1, 2]", "not a notebook"),
        (b"{}", "no cells"),
        (b'{"cells": 3}', "not a list"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"cells": %s}' % (b"1" * 6000), "JSON"),
    ],
)
def test_what_is_no_notebook_is_refused_with_the_reason(tmp_path, content, why):
    path = tmp_path / "a.ipynb"
    path.write_bytes(content)
    assert why in refused(path)


def test_files_that_cannot_be_read_are_refused(tmp_path, monkeypatch):
    assert "such file" in refused(tmp_path / "none.ipynb")
    assert "folder" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe.ipynb")
    assert "regular file" in refused(tmp_path / "pipe.ipynb")
    path = write(tmp_path / "a.ipynb", cells())
    monkeypatch.setattr(reading, "MOST_BYTES", 100)
    assert "at most" in refused(path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path):
    path = write(tmp_path / "a.ipynb", cells())
    path.chmod(0)
    assert "be read" in refused(path)


def test_a_file_that_the_system_does_not_give_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.ipynb", cells())

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    assert refused(path).endswith("Permission denied.")


def test_more_cells_than_anybody_writes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_CELLS", 3)
    assert "at most 3" in refused(write(tmp_path / "a.ipynb", cells()))


def test_metadata_and_cells_of_any_kind_do_no_harm(tmp_path):
    strange = [
        None, 3, [], {}, {"cell_type": "code"}, {"cell_type": "code", "source": 7},
        {"cell_type": "code", "source": [1, "x"], "metadata": 5, "id": []},
        {"cell_type": "code", "source": "\ud800", "metadata": {"workbench": [], "tags": 3}},
        code("y", exercise=["1.1"]), code("z", exercise="1.1; x"),
    ]  # fmt: skip
    path = tmp_path / "a.ipynb"
    for lab in ("1", True, 1.5, None, [1]):
        path.write_text(json.dumps({**book(strange), "metadata": {"workbench": {"lab": lab}}}))
        found = read(path)
        assert [cell.source for cell in found.cells] == ["", "", "x", "?", "y", "z"]
        assert [cell.exercise for cell in found.cells] == [""] * 6
        assert found.lab is None


def test_the_lab_is_the_one_that_most_markers_name(tmp_path):
    made = [code("# YOUR CODE 3.1"), code("#YOUR CODE 3.2"), code("# YOUR CODE 4.1"), code("x")]
    assert read(write(tmp_path / "a.ipynb", made, lab=None)).guessed_lab() == 3
    assert read(write(tmp_path / "b.ipynb", [code("x")], lab=None)).guessed_lab() is None


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("def f(x):\n    return x\nf(3)\nn = 4\nm = f(n)", "def f(x):\n    return x\nn = 4"),
        ("%%distributed\n%pull a\nimport torch\nclass A:\n    n = 1\nA()",
         "%%distributed\nimport torch\nclass A:\n    n = 1"),
        ("import os\nos._exit(0)", ""),
        ("def f(:", ""),
    ],
)  # fmt: skip
def test_the_definitions_of_a_cell_are_what_runs_nothing(source: str, kept: str) -> None:
    assert "\n".join(line for line in definitions(source).splitlines() if line) == kept
