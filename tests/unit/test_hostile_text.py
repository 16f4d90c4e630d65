"""What workers and users write is shown as text: no view makes markup or script of it."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fake_run import fake_snapshot

import workbench.views
from workbench.session.logs import Stack, Stacks
from workbench.shared.members import Member
from workbench.views import tables
from workbench.views.live import svg
from workbench.views.output import OutputBoard

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\" onload='alert(3)' &amp; ]]></style>"


class Elements(HTMLParser):
    """Collects what a browser would make of markup."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def harmless(markup: str, *, shown: bool = True) -> None:
    """Check that a page has no script, no handler, and (where asked) the text itself."""
    found = Elements(markup)
    assert not found.tags & {"script", "img", "iframe", "object", "embed", "foreignobject"}
    assert not {name for name in found.attributes if name.startswith("on")}
    if shown:
        assert "<script>alert(1)" in found.text


def evil_snapshot() -> Any:
    snapshot = fake_snapshot(workers=2, name=EVIL, strategy=EVIL, notes=(EVIL,), extra=True,
                             logged=True, device=EVIL)  # fmt: skip
    renamed = {f"{EVIL}{i}": curve for i, curve in enumerate(snapshot.extra.values())}
    return replace(snapshot, extra=renamed, evals=[{"step": 1, "epoch": 0, EVIL: 0.5}],
                   banner=EVIL)  # fmt: skip


def test_the_drawn_dashboard_is_text() -> None:
    harmless(svg.run_svg(evil_snapshot()))


def test_what_workers_print_and_raise_is_text() -> None:
    board = OutputBoard({0: Member.helper(EVIL), 1: Member.of_ranks(1)})
    board.message(0, "stream", {"name": "stdout", "text": EVIL})
    board.message(1, "display_data", {"data": {"text/plain": EVIL, "text/markdown": EVIL}})
    board.message(1, "display_data", {"data": {"text/plain": EVIL, "image/png": EVIL}})
    error = {"ename": EVIL, "evalue": EVIL, "traceback": [EVIL]}
    board.message(0, "error", error)
    board.fold(1, error)
    board.say_with_it(EVIL)
    board.banner = EVIL
    for final in (False, True):
        page = board.html(final)
        found = Elements(page)
        assert found.tags <= {"div", "pre", "span", "details", "summary", "img"}
        assert found.attributes <= {"style", "role", "src", "alt"}
        assert "javascript" not in page
        assert "<script>alert(1)" in found.text


def test_stacks_are_text() -> None:
    bundle = Stacks([Stack(0, EVIL, EVIL, EVIL)])._repr_mimebundle_()
    harmless(bundle["text/html"])


@pytest.mark.parametrize("where", ["title", "cell", "note"])
def test_tables_are_text(where: str) -> None:
    table = tables.cluster_table(
        [{"engine": 0, "host": EVIL if where == "cell" else "h", EVIL: 1}],
        title=EVIL if where == "title" else "",
        notes=[EVIL] if where == "note" else [],
    )
    harmless(table.html())


def test_the_browsers_side_writes_text_alone() -> None:
    source = (Path(workbench.views.__file__).parent / "live" / "dashboard.js").read_text()
    for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                   "new Function", "DOMParser", "srcdoc", "createContextualFragment"):  # fmt: skip
        assert danger not in source, danger
    assert re.search(r"textContent", source)
    assert not re.search(r"https?://(?!www\.w3\.org)", source)  # nothing is fetched from anywhere
