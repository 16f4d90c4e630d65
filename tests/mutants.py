"""Breaks the product in one place at a time, and checks whether the tests notice.

    python tests/mutants.py                         # all of them, about five minutes
    python tests/mutants.py ring seed --jobs 2      # those whose names begin so, two at a time
    python tests/mutants.py --report mutants.json

The mutants are in `mutants.toml`. Each mutant is one change of a file of `workbench`, made in a
copy of the checkout. It names the tests of the quick suite that should fail because of it. Before,
the same tests run without the change and must pass. `GUARD` records which package the processes of
the tests import, and engines are asked once, because a test on another checkout proves nothing.

A mutant is killed if a test fails, also if pytest's own time limit ends a test that hangs. If only
the limit of this command ends the run, the result is undecided, which counts as survived.

The exit status is 0 if all were killed, 1 if one survived, and 2 if a mutant no longer fits the
files or there was an error outside of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
CARRIED = (
    "workbench", "tests", "docs", "notebooks", "benchmarks", "binder", "pyproject.toml",
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "constraints.txt", "run-tests",
)  # fmt: skip
"""What of the checkout is copied, where it is there."""
MARKS = "not long and not timing and not browser"
"""Which tests are the quick suite's."""
TEST_S, SELECTION_S = 90, 420
"""How long a test may hang, and all tests of a mutant may take."""
TOKEN = "WORKBENCH_MUTANT"
"""In the environment of what a mutant's tests start, so that nothing of it is left behind."""

GUARD = '''
import os, sys
class Guard:
    """Write down from where `workbench` is imported; refuse every place but the copy."""
    def find_spec(self, name, path=None, target=None):
        if name != "workbench":
            return None
        found = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        spec = next((spec for spec in found if spec is not None), None)
        origin = os.path.realpath(spec.origin) if spec is not None else "nowhere"
        with open(os.environ["WORKBENCH_MUTANT_SEEN"], "a") as file:
            file.write(origin + "\\n")
        if not origin.startswith(os.environ["WORKBENCH_MUTANT_ROOT"] + os.sep):
            raise ImportError(f"workbench is imported from {origin}, not from the copy")
        return spec
if "WORKBENCH_MUTANT_SEEN" in os.environ:
    sys.meta_path.insert(0, Guard())
'''
PROBE = """
import workbench
from workbench.session.cluster import Cluster
with Cluster(1) as cluster:
    there = cluster.engine_set.call([0], "builtins:eval", ("__import__('workbench').__file__",))
print("imported", workbench.__file__)
print("imported", there[0])
"""


@dataclass(frozen=True)
class Mutant:
    """One place that is broken.

    Attributes:
        name: Its name on the command line.
        breaks: The property that is broken, as a sentence.
        file: Below `workbench/`.
        old, new: The text of the file, which is there once, and what takes its place.
        caught_by: Files or functions of the tests, below `tests/`.
        only: What pytest is given as `-k`.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]
    only: str = ""

    @property
    def path(self) -> Path:
        """The file that is changed, below the checkout."""
        return Path("workbench") / self.file


MUTANTS = tuple(
    Mutant(**{**entry, "caught_by": tuple(entry["caught_by"])})
    for entry in tomllib.loads((ROOT / "tests" / "mutants.toml").read_text("utf-8"))["mutant"]
)


@dataclass
class Outcome:
    """What pytest made of a selection.

    Attributes:
        verdict: `passed`, `failed`, `hung` (the limit of this command ended it) or `broken`
            (pytest itself could not do its work).
        by: The first test that failed.
        timed_out: Whether pytest's time limit for a test is why it failed.
        tail: The end of what pytest printed.
    """

    verdict: str
    seconds: float
    by: str = ""
    timed_out: bool = False
    tail: str = ""


@dataclass
class Finding:
    """The result of one mutant."""

    name: str
    breaks: str
    file: str
    status: str  # killed, survived, undecided, invalid
    by: str
    seconds: float
    unchanged_s: float
    why: str = ""


class StrayImportError(Exception):
    """A process of the tests imports another checkout than the copy."""


def stale(mutant: Mutant, root: Path = ROOT) -> str:
    """Return why a mutant no longer fits its file; empty if it fits."""
    path = root / mutant.path
    if not path.is_file():
        return f"{mutant.path} is not there"
    count = path.read_text().count(mutant.old)
    return "" if count == 1 else f"its text is {count} times in {mutant.path}, not once"


def copy_of(root: Path, into: Path) -> Path:
    """Copy the checkout; compiled files come along and stay valid."""
    ignored = shutil.ignore_patterns("_build", ".pytest_cache", ".hypothesis", ".ipynb_checkpoints")
    into.mkdir()
    for name in CARRIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, into / name, ignore=ignored)
        elif source.exists():
            shutil.copy2(source, into / name)
    guard = into / ".guard"
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(GUARD)
    return into


def apply(mutant: Mutant, root: Path) -> None:
    """Make the change in a copy."""
    path = root / mutant.path
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()  # it is told by time and size, which may both be as before


def environment(copy: Path, seen: Path) -> dict[str, str]:
    """Return the environment in which Python imports the copy, and says so."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(copy / ".guard"), str(copy)]),
        "WORKBENCH_MUTANT_ROOT": os.path.realpath(copy),
        "WORKBENCH_MUTANT_SEEN": str(seen),
        "OMP_NUM_THREADS": "1",
        TOKEN: str(copy),
    }


def run(copy: Path, arguments: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run Python in a copy; return its exit status (None: the limit ended it) and its output.

    Raises:
        StrayImportError: A process imported `workbench` from elsewhere, or none did.
    """
    seen = copy / "seen"
    seen.write_text("")
    with open(copy / "output", "w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=copy, env=environment(copy, seen),
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_all(str(copy), process)
        output.seek(0)
        text = output.read()
    places = set(seen.read_text().split("\n")) - {""}
    inside = os.path.realpath(copy) + os.sep
    if not places or any(not place.startswith(inside) for place in places):
        raise StrayImportError(f"imported: {', '.join(sorted(places)) or 'nothing'}\n{text}")
    return code, text


def end_all(token: str, process: subprocess.Popen[Any]) -> None:
    """End the remaining processes of a run: a mutant may be that children are not ended."""
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or gone
            if other.pid == process.pid or other.environ().get(TOKEN) == token:
                other.send_signal(signal.SIGKILL)
    process.wait()


def probe(copy: Path) -> None:
    """Ask an interpreter and an engine where `workbench` comes from.

    Raises:
        StrayImportError: Not from the copy.
    """
    code, text = run(copy, ["-c", PROBE], 120)
    there = re.findall(r"^imported (.+)$", text, re.MULTILINE)
    inside = os.path.realpath(copy) + os.sep
    if code != 0 or len(there) != 2 or any(not p.startswith(inside) for p in there):
        raise StrayImportError(text)


def ask(copy: Path, mutant: Mutant) -> Outcome:
    """Run the tests of a mutant in a copy."""
    only = ["-k", mutant.only] if mutant.only else []
    tests = [f"tests/{one}" for one in mutant.caught_by]
    began = time.monotonic()
    code, text = run(
        copy,
        ["-m", "pytest", "-p", "no:nbval", "-p", "no:cacheprovider", "-x", "-q", "--timeout",
         str(TEST_S), "-m", MARKS, *only, *tests],
        SELECTION_S,
    )  # fmt: skip
    seconds = time.monotonic() - began
    return read(code, text, seconds)


def read(code: int | None, text: str, seconds: float) -> Outcome:
    """Return what pytest's exit status and words say."""
    failed = re.search(
        r"^(?:FAILED|ERROR) (?:tests/)?(\S+?(?:\[.*?\])?)(?: - .*)?$", text, re.MULTILINE
    )
    # The limit's thread ends the whole process, which then names no test; its stack does.
    limit = "+ Timeout +" in text or "Failed: Timeout" in text
    by = failed[1] if failed else ""
    if limit and not by:
        stack = re.findall(r"/tests/(\S+\.py)\", line \d+, in (test_\w+)", text)
        by = "::".join(stack[-1]) if stack else "a test that hangs"
    verdict = "hung" if code is None else "broken"
    if code == 0:
        verdict = "passed"
    elif code == 1 and by:
        verdict = "failed"
    return Outcome(verdict, seconds, by, limit, text[-3000:])


class Bench:
    """Tries mutants out, in copies below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._unchanged = copy_of(ROOT, folder / "unchanged")
        self._known: dict[tuple[Any, ...], Outcome] = {}
        probe(self._unchanged)

    def unchanged(self, mutant: Mutant) -> Outcome:
        """Return the result of the mutant's tests without the change; they run only once."""
        key = mutant.caught_by, mutant.only
        with self._lock:
            if key not in self._known:
                self._known[key] = ask(self._unchanged, mutant)
            return self._known[key]

    def try_out(self, mutant: Mutant) -> Finding:
        """Return the result of a mutant."""
        before = self.unchanged(mutant)
        about = mutant.name, mutant.breaks, str(mutant.path)
        if before.verdict != "passed":
            why = f"its tests do not pass without it ({before.verdict})\n{before.tail}"
            return Finding(*about, "invalid", before.by, 0.0, before.seconds, why)
        copy = copy_of(ROOT, self._folder / mutant.name)
        try:
            apply(mutant, copy)
            found = ask(copy, mutant)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        status = {"passed": "survived", "failed": "killed", "hung": "undecided"}
        why = "pytest's time limit for a test ended it" if found.timed_out else ""
        if found.verdict in ("hung", "broken"):
            why = f"{found.verdict}\n{found.tail}"
        return Finding(
            *about, status.get(found.verdict, "invalid"), found.by, found.seconds, before.seconds,
            why,
        )  # fmt: skip


def chosen(names: Sequence[str]) -> list[Mutant]:
    """Return the mutants whose names begin with one of these; without names, all.

    Raises:
        SystemExit: No mutant's name begins with one of them.
    """
    for name in names:
        if not any(mutant.name.startswith(name) for mutant in MUTANTS):
            known = ", ".join(mutant.name for mutant in MUTANTS)
            raise SystemExit(f"There is no mutant {name}; there are: {known}")
    return [m for m in MUTANTS if not names or any(m.name.startswith(name) for name in names)]


def line_of(finding: Finding) -> str:
    """Return a finding as a line of the table."""
    by = finding.by + (" (timed out)" if finding.why.startswith("pytest's") else "")
    return (
        f"{finding.status:9} {finding.name:33} {finding.seconds:6.1f} s "
        f"({finding.unchanged_s:5.1f} s)  {by}"
    )


def main(arguments: Sequence[str]) -> int:
    """Try mutants out; print a table, write a report."""
    parser = argparse.ArgumentParser(description="Break the product; see whether tests notice.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of mutants' names")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--report", type=Path, help="a file for the findings, as JSON")
    given = parser.parse_args(arguments)
    mutants = chosen(given.names)
    if wrong := [f"{m.name} is stale: {why}" for m in mutants if (why := stale(m))]:
        print("\n".join(wrong))
        return 2
    findings = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        try:
            bench = Bench(Path(folder))
            print("verdict   mutant                               tests (without it)  failed first")
            with ThreadPoolExecutor(max(1, given.jobs)) as pool:
                for finding in pool.map(bench.try_out, mutants):
                    findings.append(finding)
                    print(line_of(finding), flush=True)
        except StrayImportError as error:
            print(f"The tests do not run on the copy alone, so they say nothing.\n{error}")
            return 2
    for finding in findings:
        if finding.status in ("undecided", "invalid"):
            print(f"\n{finding.name}: {finding.why}")
    killed = sum(finding.status == "killed" for finding in findings)
    print(f"\n{killed} of {len(findings)} were killed")
    if given.report is not None:
        report = {"killed": killed, "of": len(findings), "mutants": [asdict(f) for f in findings]}
        given.report.write_text(json.dumps(report, indent=2) + "\n")
    if any(finding.status == "invalid" for finding in findings):
        return 2
    return 0 if killed == len(findings) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
