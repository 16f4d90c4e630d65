"""docs/performance.md names commands that can be run, and its dated rows have their raw figures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from rows import COMMANDS  # noqa: E402

PAGE = (ROOT / "docs/performance.md").read_text()
TAKEN = json.loads((ROOT / "docs/measured/performance.json").read_text())


def test_each_command_of_the_page_is_one_that_is_taken_anew() -> None:
    named = set(re.findall(r"`benchmarks/(bench_[^`]+)`", PAGE))
    assert named <= {command.replace(" --no-goals", "") for command in COMMANDS}


def test_a_dated_row_has_its_raw_figures() -> None:
    dated = re.findall(r"`benchmarks/(bench_[^`]+)`, \d+ \w+", PAGE)
    assert len(dated) > 10
    assert set(dated) <= set(TAKEN)
    assert all(entry["results"] for entry in TAKEN.values())
