"""docs/terms.md speaks of strategies, options and classes that exist."""

from __future__ import annotations

import importlib
import itertools
import re
from pathlib import Path

import pytest

from workbench import catalog
from workbench.catalog.schedules import SCHEDULES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "terms.md").read_text(encoding="utf-8")
TABLES = [line for line in PAGE.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("name", sorted({entry.name for entry in catalog.CATALOG}))
def test_every_strategy_has_its_place(name: str) -> None:
    assert any(f"`{name}`" in line or f"`{name} -o" in line for line in TABLES)


def test_every_schedule_has_its_place() -> None:
    for name in SCHEDULES:
        assert re.search(rf"`(-o schedule=)?{name}`", PAGE), name


def test_options_that_are_named_exist() -> None:
    entries = catalog.strategies()
    named = re.findall(r"-o (\w+)=([\w:.]+)", PAGE)
    assert len(named) > 3
    for name, value in named:
        options = [each for entry in entries for each in entry.options if each.name == name]
        assert options, name
        if value not in ("s", "k"):  # any number
            assert any(accepts(option, value) for option in options), f"{name}={value}"


def accepts(option: catalog.Option, value: str) -> bool:
    try:
        option.parse(value)
    except ValueError:
        return False
    return True


def test_rows_are_as_wide_as_their_head() -> None:
    pairs = [pair for pair in itertools.pairwise(TABLES) if "\n".join(pair) in PAGE]
    assert len(pairs) > 10
    for before, line in pairs:
        assert before.count("|") == line.count("|"), line


@pytest.mark.torch
def test_names_of_pytorch_are_found() -> None:
    pytest.importorskip("torch")
    names = set(re.findall(r"`(torch(?:\.\w+)+)`", PAGE))
    assert len(names) >= 6
    for name in names:
        assert exists(name), name
    schedules = importlib.import_module("torch.distributed.pipelining")
    for name in re.findall(r"`(Schedule\w+)`", PAGE):
        assert hasattr(schedules, name)


def exists(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        module, _, attribute = name.rpartition(".")
        return hasattr(importlib.import_module(module), attribute)
    return True
