"""Under `--dist loadgroup` a file's tests share a process, and what takes longest begins first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("unit/test_labs_limit.py", "unit/test_stages.py", "unit/test_called.py")
PYTEST = [sys.executable, "-m", "pytest", "-v", "-p", "no:nbval", "-p", "no:cacheprovider"]
TESTS = Path(__file__).parents[1]
CRASHES = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(6))
def test_one(number):
    log = pathlib.Path(__file__).with_suffix(".log")
    if number == 3 and log.read_text().count("3") < {crashes}:
        with log.open("a") as file:
            file.write("3")
        os._exit(1)
"""
CONFTEST = """
from spreading import Together

def pytest_xdist_make_scheduler(config, log):
    return Together(config, log)
"""


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


@pytest.mark.parametrize(("crashes", "passed", "rerun"), [(9, 9, 2), (1, 10, 1)])
def test_after_a_crash_the_rest_of_the_file_runs_and_all_ends(
    tmp_path: Path, crashes: int, passed: int, rerun: int
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_a.py").write_text(CRASHES.format(crashes=crashes))
    (tmp_path / "test_a.log").touch()
    (tmp_path / "test_b.py").write_text("def test_b(): pass\n")
    (tmp_path / "test_c.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(3))\ndef test_c(n): pass\n"
    )
    done = subprocess.run(
        [*PYTEST, "-n", "2", "--dist", "loadgroup", "--reruns", "2", "."],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )  # fmt: skip
    assert re.search(rf"\b{passed} passed, {rerun} rerun", done.stdout), done.stdout
    assert ("1 failed" in done.stdout) is (crashes > 2)
