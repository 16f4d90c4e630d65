"""docs/reliability.md shows what was measured, and nothing else."""

import pytest
from doc_pages import DOCS, generator


@pytest.fixture(scope="module")
def maker():
    return generator("make_reliability")


def test_the_tables_are_those_of_the_figures_that_were_measured(maker):
    assert (DOCS / "reliability.md").read_text() == maker.written()


def test_other_tools_are_compared_as_they_were_measured(maker):
    page = (DOCS / "alternatives.md").read_text()
    assert page == maker.compared()
    rows = maker.measured("rivals")
    assert {"workbench", "ipyparallel"} <= {row["tool"] for row in rows}
    slower = [{**row, "median": 123.0} for row in rows]
    assert maker.rivals(slower) not in page


def test_a_class_is_described_as_it_was_measured(maker):
    page = (DOCS / "shared-machines.md").read_text()
    assert page == maker.shared()
    once = maker.measured("class")["with_turns"]
    larger = {**once, "training_pss_mb": 2 * once["training_pss_mb"]}
    assert maker.a_class({"with_turns": larger, "without_turns": once}) not in page


def test_what_stands_between_the_marks_comes_from_the_figures(maker):
    page = (DOCS / "reliability.md").read_text()
    for name in ("faults", "hosts", "chaos", "soak", "restarts"):
        edited = maker.put(page, name, "| made up |")
        assert "| made up |" in edited
        assert maker.filled(edited) == page


def test_a_page_without_the_marks_is_refused(maker):
    with pytest.raises(ValueError, match="faults"):
        maker.put("no marks here", "faults", "| table |")
