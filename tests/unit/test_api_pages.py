"""The API reference has every public name, every argument and every member for users."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from doc_pages import DOCS, blocks_of

import workbench as wb
from workbench.history.store import RunHistory
from workbench.notebook.completion import OFFERED, limit_completion

API = DOCS / "api"
INTERNAL = {"load_ipython_extension", "unload_ipython_extension", "to_a_cell"}
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: workbench\.([\w.]+)", re.MULTILINE)
HOW = {"function": "@wb.recipe"}
"""How an example gives an argument, where that is not by its name."""
CLASSES = {"run.md": wb.Run, "cluster.md": wb.Cluster, "history.md": RunHistory}


def pages() -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in sorted(API.glob("*.md"))}


def shown() -> dict[str, str]:
    """Return the page of each name that a page documents."""
    return {name: page for page, text in pages().items() for _, name in DIRECTIVE.findall(text)}


def functions() -> list[Any]:
    found = []
    for name, page in shown().items():
        thing: Any = wb
        for part in name.removesuffix(".__call__").split("."):
            thing = getattr(thing, part)
        if name.endswith(".__call__"):
            thing = type(thing).__call__
        if inspect.isfunction(thing):
            found.append(pytest.param(thing, page, id=name))
    return found


def arguments(function: Any) -> list[str]:
    """Return those that have a name of their own."""
    of = inspect.signature(function).parameters.values()
    return [one.name for one in of if one.name != "self" and one.kind is not one.VAR_POSITIONAL]


def test_every_public_name_has_a_page() -> None:
    names = {name.partition(".")[0] for name in shown()}
    assert set(wb.__all__) - INTERNAL == names - {"history", "notebook"}


def test_every_page_is_in_the_list() -> None:
    listed = set(re.findall(r"^\w+$", pages()["index.md"].partition(":hidden:")[2], re.MULTILINE))
    assert listed == {name.removesuffix(".md") for name in pages()} - {"index"}


@pytest.mark.parametrize(("function", "page"), functions())
def test_every_argument_is_documented_and_in_an_example(function: Any, page: str) -> None:
    doc = inspect.getdoc(function) or ""
    told = doc.partition("Args:")[2]
    examples = "\n".join(one.source for one in blocks_of(pages()[page]) if one.language == "python")
    for name in arguments(function):
        assert re.search(rf"^ *(\w+, )*\*?\*?{name}(, \w+)*: ", told, re.MULTILINE) or (
            re.search(rf"(\. |: ){name}: ", told)
        ), f"{name} has no line in the docstring"
        kind = inspect.signature(function).parameters[name].kind
        if kind is not inspect.Parameter.VAR_KEYWORD:
            given = pages()[page] if page == "run_job.md" else examples  # a job's script calls that
            assert re.search(HOW.get(name, rf"\b{name}="), given), f"no example gives {name}"


@pytest.mark.parametrize("page", CLASSES)
def test_members_that_a_page_shows_are_there_and_say_what_they_are(page: str) -> None:
    (members,) = re.findall(r":members: (.*)", pages()[page])
    for name in members.split(", "):
        assert inspect.getdoc(getattr(CLASSES[page], name)), name


@pytest.mark.parametrize("page", CLASSES)
def test_completion_offers_what_the_page_shows_and_nothing_internal(page: str) -> None:
    (members,) = re.findall(r":members: (.*)", pages()[page])
    kind = CLASSES[page]
    offered = set(OFFERED[kind])
    assert set(members.split(", ")) <= offered
    text = pages()[page] + (inspect.getdoc(kind) or "")
    mapping = {"keys", "items", "values", "get"} if kind is RunHistory else set()
    for name in offered - mapping:
        assert re.search(rf"\b{name}\b", text), f"{name} is offered and on no page"


def test_dir_lists_what_completion_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in OFFERED:
        monkeypatch.setattr(kind, "__dir__", object.__dir__)  # put back afterwards
    history = RunHistory((0,))
    assert "rewind" in dir(history)
    limit_completion()
    assert set(dir(history)) == set(OFFERED[RunHistory])
    assert hasattr(history, "rewind")
