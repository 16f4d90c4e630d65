"""How the code is cut gets no worse: `python tests/house.py` prints the measures."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import house
import pytest


@pytest.fixture(scope="module")
def trees():
    return house.modules()


def graph(trees, *, loading):
    return {
        name: house.imported(name, tree, trees, loading=loading) for name, tree in trees.items()
    }


def test_the_package_is_cut_as_its_measures_ask(trees):
    found = house.measures(trees)
    assert [one for one in found if one.count > one.most] == []
    assert all(one.count for one in found if one.name.startswith("places for"))


def test_a_class_that_is_cut_in_two_files_is_found():
    rest, whole = "class Rest: pass", "from .rest import Rest\nclass Whole(Rest): pass\nWhole()"
    cut = {"a.rest": ast.parse(rest), "a.whole": ast.parse(whole)}
    assert house.sliced(cut) == ["Rest"]
    also = {**cut, "b.other": ast.parse("Rest()")}
    assert house.sliced(also) == []


def test_no_module_imports_itself_when_it_is_loaded(trees):
    assert house.circles(graph(trees, loading=True)) == []


def test_a_circle_is_found_and_a_chain_is_counted():
    assert house.circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert house.longest({"a": {"b"}, "b": {"c"}, "c": set(), "d": {"c"}}) == 3


def test_no_file_holds_the_marks_of_a_merge():
    listed = subprocess.run(
        ["git", "grep", "-lE", "^(<{7}|>{7}) "],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode > 1:
        pytest.skip("no git repository")
    assert listed.stdout == ""
