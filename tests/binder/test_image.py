"""The image's environment, built anew by what repo2docker reads, and lab 1 in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WANTED = (ROOT / "binder" / "runtime.txt").read_text().strip().removeprefix("python-")
OURS = sys.executable if "{}.{}".format(*sys.version_info) == WANTED else None
PYTHON = OURS or shutil.which(f"python{WANTED}")
LIMIT_S = 1500


@pytest.mark.torch
@pytest.mark.cluster
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.skipif(PYTHON is None, reason=f"there is no python{WANTED}")
def test_the_environment_builds_and_lab_1_starts_in_time_and_fits():
    check = subprocess.Popen(
        [ROOT / "binder" / "check"], env={**os.environ, "PYTHON": str(PYTHON)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = check.communicate(timeout=LIMIT_S)
    except BaseException:
        os.killpg(check.pid, signal.SIGTERM)
        said, _ = check.communicate()
        print(said)
        raise
    print(said)
    assert check.returncode == 0, said
    assert "kept: engines" in said
