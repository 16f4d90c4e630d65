"""Every check, both ways: the empty cell and wrong answers are found, the solution passes."""

from __future__ import annotations

import importlib.util

import pytest
from labs_by_hand import NEEDS_TENSORFLOW, SOURCES, prove

MISSING = importlib.util.find_spec("tensorflow") is None


def marked(path):
    marks = [pytest.mark.torch]
    if int(path.stem[4:]) in NEEDS_TENSORFLOW:
        reason = "tensorflow is not installed"
        marks = [pytest.mark.tensorflow, pytest.mark.skipif(MISSING, reason=reason)]
    return pytest.param(path, marks=marks, id=path.stem)


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [marked(path) for path in SOURCES])
def test_a_check_finds_what_is_wrong_and_passes_what_is_right(tmp_path, path):
    proof = prove(path, tmp_path)
    assert proof.errors == []
    let_through = [t for t in proof.tried if t.passed and t.answer != "solution"]
    assert let_through == []
    refused = [t for t in proof.tried if not t.passed and t.answer == "solution"]
    assert refused == []
    without_hint = [t for t in proof.tried if t.answer != "solution" and not t.has_hint]
    assert without_hint == []
    solved = [t for t in proof.tried if t.answer == "solution"]
    assert len(solved) >= 3
