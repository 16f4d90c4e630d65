"""Hints of the labs' checks: each wrong answer gets the hint that belongs to it."""

from __future__ import annotations

import math
import re

import pytest

from workbench.labs import asking
from workbench.labs.checks import lab_6


def hint_of(exercise, **names):
    """What the check says about the first thing that is wrong."""
    report = asking.check(exercise, names)
    return next(finding for finding in report.findings if not finding.right)


def test_a_part_of_a_worker_is_to_be_rounded_up_and_a_string_to_lose_its_quotes():
    found = hint_of("6.1", workers_needed=lambda parameters, limit: 16 * parameters / limit)
    assert "1.6" in found.words
    assert "round up" in found.hint
    found = hint_of("6.1", workers_needed=lambda parameters, limit: "2")
    assert "quotes" in found.hint


@pytest.mark.parametrize(
    ("decimals", "passed"), [(2, False), (3, True), (4, True), (6, True), (9, True)]
)
def test_a_bubble_may_be_rounded_to_three_decimals(decimals, passed):
    names = {"bubble": lambda p, m: round((p - 1) / (m + p - 1), decimals), "m_10": 27}
    assert asking.check("6.3", names).passed == passed


def test_a_bubble_rounded_too_far_is_told_so_and_a_wrong_one_is_not():
    assert "round" in hint_of("6.3", bubble=lambda p, m: round((p - 1) / (m + p - 1), 2)).hint
    assert "round" not in hint_of("6.3", bubble=lambda p, m: (p - 1) / m).hint


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_wrong_number_of_microbatches_gets_a_hint_about_its_own_stage(monkeypatch, stage, off):
    monkeypatch.setattr(lab_6, "_counted", lambda c, name: lab_6._HELD[name.removeprefix("most_")])
    held = [3, 2, 1]
    held[stage] += off
    found = hint_of("6.4", held_gpipe=[6, 6, 6], held_1f1b=held)
    assert f"stage {stage}" in found.words
    assert f"stage {stage}" in found.hint
    assert bool(re.search(r"\b1 microbatch\b", found.words)) == (held[stage] == 1)


@pytest.mark.parametrize("unit", [2**20, 2**30, 1e6])
def test_bytes_in_a_larger_unit_are_told_so(unit):
    def held_bytes(strategy, parameters, workers):
        return 16 * parameters / unit

    found = hint_of("9.6", held_bytes=held_bytes)
    assert "bytes" in found.hint
    other = hint_of("9.6", held_bytes=lambda *given: math.pi * held_bytes(*given))
    assert found.hint != other.hint
