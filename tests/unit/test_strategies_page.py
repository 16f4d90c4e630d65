"""docs/strategies.md says what the catalog and the strategies' docstrings say."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
from doc_pages import generator

from workbench import catalog


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return generator("make_strategies")


def test_the_page_is_up_to_date(maker: ModuleType) -> None:
    written = maker.PAGE.read_text(encoding="utf-8")
    assert written == maker.make_page(), "run python docs/make_strategies.py"


@pytest.mark.parametrize("entry", catalog.CATALOG, ids=lambda e: f"{e.framework}-{e.name}")
def test_every_strategy_has_a_diagram_and_its_options(
    maker: ModuleType, entry: catalog.Strategy
) -> None:
    text = maker.chapter(entry)
    own = text.partition("\n#### ")[0]
    assert "```text\n" in own
    assert re.search(r"^Sources?:", own, re.MULTILINE)
    for option in entry.options:
        assert f"| `{option.name}` |" in own


def test_what_mirrored_builds_on_is_shown(maker: ModuleType) -> None:
    text = maker.chapter(catalog.lookup("mirrored"))
    for word in ("Ring all-reduce", "Recursive doubling", "Hierarchical", "Gradient compression"):
        assert f"\n#### {word}" in text


def test_the_naive_algorithm_is_shown(maker: ModuleType) -> None:
    text = maker.chapter(catalog.lookup("mirrored"))
    shown = text.partition("```python\n")[2].partition("\n```")[0]
    assert shown.startswith("def naive_step(")
    assert "    dist.all_reduce(p.grad)" in shown


def test_fences_are_balanced_and_links_lead_somewhere(maker: ModuleType) -> None:
    page = maker.make_page()
    assert page.count("```") % 2 == 0
    headings = re.findall(r"^### (\S+)$", page, re.MULTILINE)
    assert set(re.findall(r"\]\(#([a-z_]+)\)", page)) <= set(headings)


def test_indented_blocks_are_fenced_and_the_rest_is_left(maker: ModuleType) -> None:
    text = "First.\n\n    a --> b\n\n    c\n\n- item\n  goes on\n"
    expected = "First.\n\n```text\na --> b\n\nc\n```\n\n- item\n  goes on"
    assert maker.to_markdown(text) == expected
