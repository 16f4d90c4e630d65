"""The pages of `docs/` and the README: their blocks of code, and the instructions for each.

A comment directly above a block says how the tests use it; GitHub and the site do not show it:

    <!-- not run: why -->      it is not run
    <!-- fails: words -->      it fails, and its error holds these words
    <!-- first: code -->       what is run before it and not shown
"""

from __future__ import annotations

import functools
import importlib.util
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
FENCE = re.compile(r"^( *)(```+)\s*([^\s`]*)[^`]*$")
COMMENT = re.compile(r"<!-- (not run|fails|first):\s(.*?)\s*-->", re.DOTALL)


@functools.cache
def generator(name: str) -> ModuleType:
    """Return the script `docs/NAME.py`, which writes a page, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    source: str
    said: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def not_run(self) -> str:
        """Why the block is not run; empty if it is run."""
        return self.said.get("not run", "")


def pages() -> list[Path]:
    return [REPOSITORY / "README.md", *sorted([*DOCS.glob("*.md"), *DOCS.glob("api/*.md")])]


def name_of(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def blocks_of(text: str, page: str = "page.md") -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found, lines, at = [], text.split("\n"), 0
    while at < len(lines):
        opening = FENCE.match(lines[at])
        if opening is None:
            at += 1
            continue
        ticks, language = opening.group(2, 3)
        end = at + 1
        while end < len(lines) and not re.match(rf" *{ticks}`*\s*$", lines[end]):
            end += 1
        body = textwrap.dedent("\n".join(lines[at + 1 : end])) + "\n"
        found.append(Block(page, at + 1, language, body, _said_above(lines[:at])))
        at = end + 1
    return found


def blocks(page: Path) -> list[Block]:
    return blocks_of(page.read_text("utf-8"), name_of(page))


def _said_above(lines: list[str]) -> dict[str, str]:
    """Return the text of the comments directly above a block."""
    text, said = "\n".join(lines).rstrip(), {}
    while text.endswith("-->"):
        start = text.rindex("<!--")
        if comment := COMMENT.fullmatch(text[start:]):
            said[comment[1]] = textwrap.dedent(comment[2])
        text = text[:start].rstrip()
    return said


def without_code(text: str) -> str:
    """Return a page's prose: its blocks, spans of code and comments are left out."""
    text = re.sub(r"^( *)(```+).*?^ *\2`*\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"(`+)[^`].*?\1", "", text)
