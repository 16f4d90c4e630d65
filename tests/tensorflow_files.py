"""Runs the files of TensorFlow's tests, each in a process forked from one that has it imported.

Importing TensorFlow and Keras takes longer than many a file, so it is done once, as for engines:
the parent imports and never runs an operation (`workbench.cluster.forkserver.preload`).

TensorFlow's runs of a file happen one after the other in one process, as in an engine. TensorFlow
has sometimes ended that process by a segmentation fault. Then the file is repeated, at most twice.

    python tests/tensorflow_files.py "not long" "not timing" 2 --reruns 2    # two files at a time

If WORKBENCH_TEST_REPORTS names a folder, each file writes a report there.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

TESTS = Path(__file__).parent
FOLDERS = ("contract", "unit")
ATTEMPTS = 3
NO_SUCH_TEST = 5
"""What pytest ends with where a file has no test of the kind asked for."""
UNUSED = ("anyio", "hypothesispytest", "nbval")
"""Plugins of pytest that these files do not use; loading them takes seconds."""

Job = Callable[[], int]


def files(kind: str, folder: Path = TESTS) -> list[Path]:
    """Return the files with tests of TensorFlow, the longest first.

    Args:
        kind: `timing` or `not timing`; for the former, files without such tests are left out.
    """
    wanted = ["mark.tensorflow", *(["mark.timing"] if kind == "timing" else [])]
    found = [path for name in FOLDERS for path in (folder / name).rglob("test_*.py")]
    texts = {path: path.read_text() for path in found}
    found = [path for path in found if all(word in texts[path] for word in wanted)]
    return sorted(found, key=lambda path: len(texts[path]), reverse=True)


def run_all(jobs: dict[str, Job], at_once: int, show: Callable[[str], object] = print) -> int:
    """Run each job in a forked process; return how many failed.

    A job that a signal ends is repeated. The output of a job is shown after its end.

    Args:
        jobs: Functions that return an exit status, by name.
        at_once: How many run at a time.
        show: Where to.
    """
    waiting = [(name, 1) for name in jobs]
    running: dict[int, tuple[str, int, IO[bytes]]] = {}
    failed = 0
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name, attempt = waiting.pop(0)
                fresh: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
                running[_fork(jobs[name], fresh)] = (name, attempt, fresh)
            pid, status = os.wait()
            if pid not in running:
                continue
            name, attempt, report = running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            with report:
                report.seek(0)
                show(report.read().decode(errors="replace"))
            if code < 0:
                ended = signal.Signals(-code).name
                show(f"{ended} ended the process of {name} (attempt {attempt} of {ATTEMPTS})")
            if code < 0 and attempt < ATTEMPTS:
                waiting.insert(0, (name, attempt + 1))
            else:
                failed += code not in (0, NO_SUCH_TEST)
    finally:
        for pid, (_, _, report) in running.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            report.close()
    return failed


def _fork(job: Job, report: IO[bytes]) -> int:
    """Start a job in a child, which writes to `report`; return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(report.fileno(), 1)
        os.dup2(report.fileno(), 2)
        # Pytest's own, where this is tested in it, would keep what is printed.
        sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115
        code = job()
        atexit._run_exitfuncs()  # processes that the tests started end here
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # nothing of the parent's is torn down


def preload() -> bool:
    """Import the files' libraries, as an engine's parent does; return whether forking is safe."""
    from importlib.util import find_spec

    import pytest  # noqa: F401

    from workbench.cluster.forkserver import preload as warm

    if find_spec("tensorflow") is None:
        return True  # the tests skip themselves
    report = warm.first_stage("tensorflow")
    if "error" in report:
        print(f"TensorFlow is imported for each file: {report['error']}")
        return False
    gc.collect()
    gc.freeze()
    return True


def _pytest(arguments: Sequence[str], forked: bool) -> int:
    """Run pytest in this process, or replace this process by it."""
    if not forked:
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
    import pytest

    return int(pytest.main([*arguments]))


def main(arguments: Sequence[str]) -> int:
    """Run the files; return 1 if one failed."""
    suite, kind, at_once, *others = arguments
    marks = f"tensorflow and not (cluster or browser) and {suite} and {kind}"
    off = [word for plugin in UNUSED for word in ("-p", f"no:{plugin}")]
    forked = preload()
    reports = os.environ.get("WORKBENCH_TEST_REPORTS")

    def job(path: Path) -> Job:
        name = f"{path.stem}{'-times' if kind == 'timing' else ''}.xml"
        report = [f"--junitxml={reports}/{name}"] if reports else []
        return lambda: _pytest(["-m", marks, *off, *report, *others, str(path)], forked)

    jobs = {str(path.relative_to(TESTS.parent)): job(path) for path in files(kind)}
    return min(1, run_all(jobs, int(at_once)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
