"""The report of `./run-tests`: all rounds in one, the longest tests first."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import reports

ROUND = """<testsuites><testsuite name="pytest">
<testcase classname="tests.a" name="quick" time="0.5"/>
<testcase classname="tests.a" name="wrong" time="2"><failure message="no"/></testcase>
</testsuite></testsuites>"""
OTHER = """<testsuites><testsuite name="pytest">
<testcase classname="tests.b" name="left_out" time="0"><skipped message="why"/></testcase>
<testcase classname="tests.b" name="broken" time="1"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_the_rounds_become_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "parts.xml").write_text(ROUND)
    (tmp_path / "engines.xml").write_text(OTHER)
    for _ in range(2):  # its own result is no round
        reports.main(tmp_path)
    suites = ElementTree.parse(tmp_path / "junit.xml").getroot().findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["engines", "parts"]
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 2 failed, 1 skipped"
    lines = (tmp_path / "durations.txt").read_text().splitlines()
    assert [line.split()[1] for line in lines[:3]] == [
        "tests.a::wrong", "tests.b::broken", "tests.a::quick",
    ]  # fmt: skip
