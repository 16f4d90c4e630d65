"""Whatever a user can type is mentioned in the pages."""

from __future__ import annotations

import inspect
import re

import pytest
from doc_pages import DOCS, pages

import workbench as wb
from workbench.cli import main
from workbench.magics import WorkbenchMagics
from workbench.shared.magic_args import ACTIONS

TEXT = "\n".join(page.read_text("utf-8") for page in pages())
HOOKS = {"load_ipython_extension", "unload_ipython_extension"}
"""Called by `%load_ext`, never by a user."""


def mentioned(word: str) -> bool:
    return re.search(rf"(?<![\w%-]){re.escape(word)}(?![\w-])", TEXT) is not None


@pytest.mark.parametrize("name", sorted(set(wb.__all__) - HOOKS))
def test_a_public_name_is_mentioned(name: str) -> None:
    assert mentioned(f"wb.{name}")


@pytest.mark.parametrize("argument", inspect.signature(wb.fit).parameters)
def test_an_argument_of_fit_is_explained(argument: str) -> None:
    table = (DOCS / "training.md").read_text("utf-8")
    assert f"\n| `{argument}` | " in table


@pytest.mark.parametrize(
    "magic",
    [f"{sign}{name}" for kind, sign in (("line", "%"), ("cell", "%%"))
     for name in WorkbenchMagics.magics[kind]],
)  # fmt: skip
def test_a_magic_is_mentioned(magic: str) -> None:
    assert mentioned(magic)


@pytest.mark.parametrize("action", ACTIONS)
def test_what_the_cluster_s_magic_does_is_mentioned(action: str) -> None:
    assert mentioned(f"%cluster {action}") or mentioned(f"`{action}`")


def test_a_command_of_the_shell_is_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.search(r"\{([\w,]+)\}", capsys.readouterr().out)
    assert commands is not None
    missing = [one for one in commands[1].split(",") if not mentioned(f"workbench {one}")]
    assert not missing


def test_what_is_not_there_is_not_found() -> None:
    assert mentioned("wb.fit")
    assert not mentioned("wb.fi")
    assert not mentioned("wb.nothing_of_that_name")
