"""Under `--dist loadgroup` a file's tests share a process, and what takes longest begins first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FILES = ("unit/test_labs_limit.py", "unit/test_stages.py", "unit/test_called.py")
PYTEST = [sys.executable, "-m", "pytest", "-v", "-p", "no:nbval", "-p", "no:cacheprovider"]
TESTS = Path(__file__).parents[1]


def test_a_files_tests_share_a_process() -> None:
    done = subprocess.run(
        [*PYTEST, "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder",
         *(str(TESTS / file) for file in FILES)],
        cwd=TESTS.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = re.findall(r"\[(gw\d)\].*PASSED tests/(\S+?)::", done.stdout)
    assert len(found) > 2 * len(FILES)
    assert len(set(found)) == len({file for _, file in found}) == len(FILES)
    assert {process for process, _ in found} == {"gw0", "gw1"}
