"""Every check, both ways: the empty cell and wrong answers are found, the solution passes."""

from __future__ import annotations

import pytest
from labs_by_hand import SOURCES, marked, prove


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [marked(path) for path in SOURCES])
def test_a_check_finds_what_is_wrong_and_passes_what_is_right(tmp_path, path):
    proof = prove(path, tmp_path)
    assert proof.errors == []
    let_through = [t for t in proof.tried if t.passed and not t.is_right]
    assert let_through == []
    refused = [t for t in proof.tried if not t.passed and t.is_right]
    assert refused == []
    without_hint = [t for t in proof.tried if not t.is_right and not t.has_hint]
    assert without_hint == []
    solved = [t for t in proof.tried if t.answer == "solution"]
    assert len(solved) >= 3
