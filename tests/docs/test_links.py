"""Links of the pages lead somewhere on GitHub; the build of the site checks its own pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import REPOSITORY, name_of, pages, without_code

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
ROOT = [REPOSITORY / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^( *)(```+).*?^ *\2`*\s*$", "", text, flags=re.M | re.S)
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*?) *#*$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 0
        while (name := slug if number == 0 else f"{slug}-{number}") in found:
            number += 1
        found.add(name)
    return found


def broken(text: str, page: Path) -> list[str]:
    """Return the links of a page's text that lead nowhere in the repository."""
    bad = []
    for link in LINK.findall(without_code(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        there = REPOSITORY in target.parents and target.exists()
        if not there or (anchor and anchor not in anchors(target.read_text("utf-8"))):
            bad.append(link)
    return bad


@pytest.mark.parametrize("page", [pytest.param(one, id=name_of(one)) for one in [*pages(), *ROOT]])
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    assert broken(page.read_text("utf-8"), page) == []


def test_links_that_lead_nowhere_are_found() -> None:
    wrong = ["nothing.md", "panel.md#nothing", "../../outside.md", "#nothing"]
    right = ["panel.md#choose", "../LICENSE", "diagrams", "https://example.org/x#y", "#run"]
    text = "\n".join(f"[text]({one})" for one in [*wrong, *right])
    assert broken(text, REPOSITORY / "docs" / "panel.md") == wrong
    assert broken(f"```text\n{text}\n```", REPOSITORY / "docs" / "panel.md") == []


def test_headings_have_github_s_anchors() -> None:
    text = "# `a` & b_c\n## Run\n## Run\n```text\n# not one\n```\n### [linked](x.md) it's\n"
    assert anchors(text) == {"a--b_c", "run", "run-1", "linked-its"}
