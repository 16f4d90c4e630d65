"""A comparison's exports: numbers that are read back, words that are escaped."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from made_up_runs import compared, eight, make_run

from workbench.errors import PlanError
from workbench.history.analysis.comparison import compare
from workbench.notebook.compare import Compared
from workbench.views.tables import comparison_table

EVIL = "<script>alert(1)</script> | `a` *b* [c](d)"


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_reads_back_as_the_measured_numbers() -> None:
    comparison = compare(eight())
    rows = read(Compared(comparison).to_csv())
    assert len(rows) == 8
    for read_row, row in zip(rows, comparison.rows, strict=True):
        assert float(read_row["samples_per_s"]) == row.samples_per_s.mean
        assert float(read_row["step_s"]) == row.step_s
        assert float(read_row["eval_accuracy"]) == row.evals["accuracy"].mean
        assert int(read_row["workers"]) == row.workers


def test_csv_leaves_out_what_was_not_measured() -> None:
    rows = {row["run"]: row for row in read(Compared(compared("partial")).to_csv())}
    assert rows["nothing"]["final_loss"] == rows["nothing"]["step_s"] == ""
    assert rows["nothing"]["state"] == "failed"
    assert rows["one_device"]["final_loss_std"] == ""
    assert "nan" not in Compared(compared("partial")).to_csv().lower()


def test_csv_quotes_names() -> None:
    name = 'a, "b"\nc'
    (row,) = read(Compared(compare([make_run(name)])).to_csv())
    assert row["run"] == name


@pytest.mark.parametrize("name", ["=1+1", "@SUM(A1)", "+1", "-1", "\t=1"])
def test_csv_has_no_name_that_a_spreadsheet_would_calculate(name: str) -> None:
    (row,) = read(Compared(compare([make_run(name)])).to_csv())
    assert row["run"] == f"'{name}"


def test_pandas_has_the_same_figures_as_csv() -> None:
    pandas = pytest.importorskip("pandas")
    shown = Compared(compared("partial"))
    frame = shown.to_pandas()
    assert list(frame.columns) == list(read(shown.to_csv())[0])
    assert math.isnan(frame.set_index("run").loc["nothing", "step_s"])
    again = pandas.read_csv(io.StringIO(shown.to_csv()))
    pandas.testing.assert_series_equal(again["step_s"], frame["step_s"])


def test_markdown_has_one_cell_per_column_whatever_the_names() -> None:
    runs = [make_run("one_device", compute_s=0.02), make_run(EVIL, 2, strategy="mirrored")]
    text = Compared(compare(runs)).to_markdown()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    cells = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
    assert len(cells) == 1
    assert "<script>" not in text
    assert r"\`a\` \*b\* \[c\]" in text
    assert "one_device" in text
    assert text.startswith("**")


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


def test_html_is_escaped_and_brings_no_script() -> None:
    for text in (
        Compared(compare([make_run(EVIL), make_run("b")])).to_html(),
        Compared(compare([make_run(EVIL), make_run("b")]))._repr_mimebundle_()["text/html"],
    ):
        tags = Tags()
        tags.feed(text)
        assert "script" not in tags.seen
        assert EVIL in tags.words


@pytest.mark.parametrize("suffix", [".csv", ".md", ".html", ".png", ".svg", ".json", ".PNG"])
def test_a_file_is_saved_by_its_suffix(tmp_path, suffix: str) -> None:
    shown = Compared(compared("two"))
    path = shown.save(tmp_path / f"out{suffix}")
    made = path.read_bytes()
    if suffix.lower() == ".png":
        assert made.startswith(b"\x89PNG")
    elif suffix == ".svg":
        assert ElementTree.fromstring(made).tag.endswith("svg")
        assert b"Speed-up" in made
    elif suffix == ".json":
        assert json.loads(made) == json.loads(json.dumps(shown.to_wire()))
    elif suffix == ".csv":
        assert made.decode() == shown.to_csv()
    elif suffix == ".md":
        assert made.decode() == shown.to_markdown()
    else:
        page = made.decode()
        assert page.startswith("<!doctype html>")
        assert shown.comparison.verdict in page
        assert not re.search(r'(?:src|href)="(?!data:)', page)


def test_another_suffix_is_refused_and_nothing_is_written(tmp_path) -> None:
    with pytest.raises(PlanError, match=r"WB-PLAN-149[\s\S]*csv, \.md"):
        Compared(compared("two")).save(tmp_path / "out.docx")
    assert not list(tmp_path.iterdir())


def test_text_forms_are_written_where_a_path_is_given(tmp_path) -> None:
    shown = Compared(compared("two"))
    for name in ("to_csv", "to_markdown", "to_html"):
        text = getattr(shown, name)(tmp_path / name)
        assert (tmp_path / name).read_text() == text


def test_the_table_sorts_by_a_figure_or_a_heading() -> None:
    shown = Compared(compare(eight()))
    rates = {row.name: row.samples_per_s.mean for row in shown.comparison.rows}
    for key in ("samples_per_s", "samples/s"):
        for descending in (True, False):
            table = shown.table(sort=key, descending=descending)
            found = [rates[row[0]] for row in table.rows]
            assert found == sorted(rates.values(), reverse=descending)
            assert found[next(iter(table.strong))] == max(rates.values())
    with pytest.raises(PlanError, match=r"column to sort by.*WB-PLAN-037"):
        shown.table(sort="speediness")


def test_without_a_sort_rows_stand_as_they_were_given() -> None:
    shown = Compared(compare(eight()))
    assert [row[0] for row in shown.table().rows] == [row.name for row in shown.comparison.rows]


def test_columns_that_say_nothing_are_left_out() -> None:
    wide, narrow = (
        [column.title for column in comparison_table(compared(case)).columns]
        for case in ("partial", "two")
    )
    assert {"state", "staleness", "bubble"} <= set(wide)
    assert not {"state", "staleness", "bubble", "framework"} & set(narrow)


def test_the_outlook_is_the_first_note_and_part_of_the_verdict() -> None:
    runs = [
        make_run("one_device", compute_s=0.004, transfer_s=0.0, data_s=0.0),
        make_run("mirrored", 2, compute_s=0.002, transfer_s=0.006, data_s=0.0),
    ]
    shown = Compared(compare(runs))
    outlook = shown.comparison.outlook
    assert "estimate" not in outlook
    assert "one_device" in outlook
    assert shown.table().notes[0] == outlook
    assert any("estimate" in note for note in shown.table().notes)
    assert shown.verdict == f"{shown.comparison.verdict} {outlook}"
