"""Makes one report of the rounds that `./run-tests` ran.

    python tests/reports.py test-reports

Writes `junit.xml`, all rounds in one, and `durations.txt`: seconds and name of every test with its
fixtures, the longest first. Shows the longest tests and how many passed, failed and were skipped.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

SHOWN = 25


def merge(folder: Path) -> ElementTree.Element:
    """Return the suites of all reports in a folder as one document, in the order of their names."""
    whole = ElementTree.Element("testsuites")
    for path in sorted(folder.glob("*.xml")):
        if path.name == "junit.xml":
            continue
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            suite.set("name", path.stem)
            whole.append(suite)
    return whole


def durations(whole: ElementTree.Element) -> list[tuple[float, str]]:
    """Return seconds and name of each test, the longest first."""
    found = [
        (float(case.get("time", "0")), f"{case.get('classname')}::{case.get('name')}")
        for case in whole.iter("testcase")
    ]
    return sorted(found, reverse=True)


def counts(whole: ElementTree.Element) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped."""
    found = {"passed": 0, "failed": 0, "skipped": 0}
    for case in whole.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            found["failed"] += 1
        else:
            found["skipped" if case.find("skipped") is not None else "passed"] += 1
    return found


def main(folder: Path) -> None:
    """Write both files and show a summary."""
    whole = merge(folder)
    ElementTree.ElementTree(whole).write(folder / "junit.xml", "utf-8", xml_declaration=True)
    times = durations(whole)
    lines = [f"{seconds:9.2f} {name}" for seconds, name in times]
    (folder / "durations.txt").write_text("\n".join(lines) + "\n")
    print(f"the longest of {len(times)} tests ({folder}/durations.txt has all, in seconds):")
    print("\n".join(lines[:SHOWN]))
    print(", ".join(f"{count} {name}" for name, count in counts(whole).items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
