"""The proofs that the pages name exist, and figures are those that were measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workbench.history.take_snapshot import COLUMNS

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGE = (DOCS / "metrics.md").read_text(encoding="utf-8")

PROOFS = sorted(
    {
        (page.name, *found)
        for page in DOCS.glob("*.md")
        for found in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text("utf-8"))
    }
)


@pytest.mark.parametrize(("page", "file", "test"), PROOFS)
def test_a_test_that_a_page_names_exists(page: str, file: str, test: str) -> None:
    path = REPOSITORY / file
    assert path.is_file()
    assert not test or f"def {test}(" in path.read_text(encoding="utf-8")


def test_every_metric_has_a_proof() -> None:
    chapters = re.split(r"^#{2,3} ", PAGE, flags=re.MULTILINE)
    measured = [chapter for chapter in chapters if "- **Proof**: " in chapter]
    defined = [chapter for chapter in chapters if re.search(r"^    .* = ", chapter, re.MULTILINE)]
    assert len(defined) >= 10
    assert all("`tests/" in chapter.partition("- **Proof**: ")[2] for chapter in measured)
    assert [chapter.split("\n")[0] for chapter in defined if chapter not in measured] == []


def test_every_column_of_the_history_is_explained() -> None:
    table = PAGE.partition("| column |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) >= set(COLUMNS)


def test_figures_are_those_of_the_page_on_performance() -> None:
    measured = (DOCS / "performance.md").read_text(encoding="utf-8")
    table = PAGE.partition("<!-- figures:")[2].partition("<!-- end of figures -->")[0]
    rows = [line.split("|")[2:4] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 6
    for figures, command in rows:
        script = re.findall(r"`(\S+\.py)", command)[0]
        assert (REPOSITORY / script).is_file()
        lines = [line for line in measured.splitlines() if "|" in line]
        for figure in figures.split(";"):
            assert any(figure.strip() in line for line in lines), figure
        assert Path(script).name in measured
