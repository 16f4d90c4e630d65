"""What a student reads of a lab fits the width of a notebook beside its file browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[2] / "notebooks" / "solutions").glob("lab_*.md"))
MOST = 105
"""Letters of a line: what a window of 1400 pixels shows beside the file browser."""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_option_of_a_run_is_out_of_sight(path):
    lines = path.read_text().splitlines()
    magics = [line for line in lines if re.match(r"\s*%distributed\b", line)]
    assert not [line for line in magics if len(line) > MOST]
