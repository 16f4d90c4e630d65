"""What a check says: right, not right, and a hint; never the answer."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PASSED = "workbench_passed"
"""Name in an output's metadata: whether the check has passed."""
MARKS = {True: "✓", False: "✗"}
_COLORS = {True: "#0B9A75", False: "#D9652B"}
"""Colours with a contrast of at least 3 on white and on dark pages."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        right: Whether it is as it should be.
        words: What was found, in a sentence.
        hint: Where to look next; empty where it is right.
    """

    right: bool
    words: str
    hint: str = ""

    def to_wire(self) -> dict[str, Any]:
        """The same, JSON-ready."""
        return {"right": self.right, "words": self.words, "hint": self.hint}


@dataclass(frozen=True)
class Report:
    """The result of one check; the notebook shows it below the cell.

    Attributes:
        exercise: Its number, such as `3.2`.
        title: What the exercise is about.
        where: Where its cell runs: `the notebook` or `the engines`.
    """

    exercise: str
    title: str
    where: str
    findings: Sequence[Finding]

    @property
    def passed(self) -> bool:
        """Whether all that was looked at is right."""
        return bool(self.findings) and all(finding.right for finding in self.findings)

    @property
    def ran(self) -> str:
        """Where its cell ran, in words."""
        return f"ran {'in' if self.where == 'the notebook' else 'on'} {self.where}"

    @property
    def verdict(self) -> str:
        """`right`, or `not yet`."""
        return "right" if self.passed else "not yet"

    def to_wire(self) -> dict[str, Any]:
        """The same, JSON-ready."""
        return {
            "exercise": self.exercise,
            "title": self.title,
            "passed": self.passed,
            "findings": [finding.to_wire() for finding in self.findings],
        }

    def text(self) -> str:
        """The report as plain text."""
        lines = [f"{self.exercise} {self.title}: {self.verdict} ({self.ran})"]
        for finding in self.findings:
            lines.append(f"  {MARKS[finding.right]} {finding.words}")
            if finding.hint:
                lines.append(f"    hint: {finding.hint}")
        return "\n".join(lines)

    def html(self) -> str:
        """The report as a block of HTML without classes or scripts."""
        body = "".join(_line(finding) for finding in self.findings)
        color = _COLORS[self.passed]
        return (
            f'<div style="border-left:4px solid {color};padding:4px 12px;color:inherit;'
            f'font-size:13px;line-height:1.5"><div style="font-weight:600">'
            f"{html.escape(self.exercise)} {html.escape(self.title)}: "
            f'<span style="color:{color}">{self.verdict}</span> <span style="opacity:.6;'
            f'font-weight:400">· {html.escape(self.ran)}</span></div>{body}</div>'
        )

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        return {"text/html": self.html(), "text/plain": self.text()}, {PASSED: self.passed}

    def __repr__(self) -> str:
        return self.text()


def _line(finding: Finding) -> str:
    mark = f'<span style="color:{_COLORS[finding.right]}">{MARKS[finding.right]}</span>'
    hint = f'<div style="opacity:.72;padding-left:1.2em">hint: {_code(finding.hint)}</div>'
    return f"<div>{mark} {_code(finding.words)}</div>{hint if finding.hint else ''}"


def _code(words: str) -> str:
    """Return words for a page, with what stands in backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(words))
