"""Says at the end how long the labs took."""

from __future__ import annotations

from typing import Any

BUDGET_S = 480


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Report the time of every lab, and of all together."""
    took = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in report.user_properties:
                if name == "lab_s":
                    took[report.nodeid.partition("[")[2].rstrip("]")] = value
    if took:
        words = ", ".join(f"{lab} {seconds:.0f} s" for lab, seconds in sorted(took.items()))
        total = sum(took.values())
        terminalreporter.write_sep("-", f"labs: {total:.0f} s of {BUDGET_S} s")
        terminalreporter.write_line(words)
