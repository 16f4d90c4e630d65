"""The files of TensorFlow's tests: each in a forked process, again where a signal ended it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tensorflow_files import ATTEMPTS, files, run_all


def test_what_jobs_print_is_shown_and_failures_are_counted() -> None:
    def prints(text: str, code: int) -> int:
        print(text)
        return code

    shown: list[str] = []
    jobs = {"good": lambda: prints("all well", 0), "bad": lambda: prints("not well", 1)}
    assert run_all(jobs, 2, shown.append) == 1
    assert sorted(text.strip() for text in shown) == ["all well", "not well"]


def test_what_raises_has_failed() -> None:
    shown: list[str] = []
    assert run_all({"broken": lambda: 1 // 0}, 1, shown.append) == 1
    assert "ZeroDivisionError" in shown[0]


def test_a_job_that_a_signal_ends_is_repeated_until_it_passes(tmp_path: Path) -> None:
    def crashes_once() -> int:
        if not (tmp_path / "crashed").exists():
            (tmp_path / "crashed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    shown: list[str] = []
    assert run_all({"file": crashes_once}, 1, shown.append) == 0
    assert f"SIGKILL ended the process of file (attempt 1 of {ATTEMPTS})" in shown


def test_a_job_that_signals_always_end_has_failed() -> None:
    def crashes() -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    shown: list[str] = []
    assert run_all({"file": crashes}, 1, shown.append) == 1
    assert sum("SIGKILL" in text for text in shown) == ATTEMPTS


def test_files_are_those_with_the_mark_the_longest_first(tmp_path: Path) -> None:
    tensorflow = "pytestmark = pytest.mark.tensor" + "flow\n"
    for name, text in {
        "contract/test_short.py": tensorflow,
        "contract/test_long.py": tensorflow + "\n" * 9 + "# mark.timing",
        "contract/test_torch.py": "pytestmark = pytest.mark.torch",
        "cluster/test_engines.py": tensorflow,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    names = [path.name for path in files("not timing", tmp_path)]
    assert names == ["test_long.py", "test_short.py"]
    assert [path.name for path in files("timing", tmp_path)] == ["test_long.py"]
