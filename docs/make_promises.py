"""Writes the tables of docs/recovery.md that say what is lost at most, from `promises.py`.

    python docs/make_promises.py

Each cell leads to the test that shows it.
"""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "docs")]

from promises import PROMISES, WAYS  # noqa: E402

from workbench import catalog  # noqa: E402

PAGE = REPOSITORY / "docs" / "recovery.md"
BEGIN, END = "<!-- promises: written by make_promises.py -->", "<!-- end of promises -->"
DIES = {
    "worker": "A worker dies",
    "server": "A server dies",
    "warned": "A worker gets a warning before it is ended; the run has `--checkpoint`",
}
UNKNOWN = "-"


def tables() -> str:
    """Return a table for each way of dying, and which strategies are in none."""
    parts = []
    for dies, title in DIES.items():
        own = [one for one in PROMISES if one.dies == dies]
        parts.append(table(title, own))
    return "\n\n".join([*parts, left_out()])


def table(title, promises) -> str:
    """Return one table: a row per strategy and case, a column per word of `--on-failure`."""
    ways = [way for way in WAYS if any(way in one.on_failure for one in promises)]
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for one in promises:
        entry = catalog.lookup(one.strategy, one.framework)
        cells = rows.setdefault((one.framework, one.strategy, one.case), {})
        cells |= dict.fromkeys(one.on_failure, cell(one.at_most(entry), one.proof))
    lines = [f"| {title} | " + " | ".join(f"`{way}`" for way in ways) + " |"]
    lines.append("|" + "---|" * (1 + len(ways)))
    for (framework, strategy, case), cells in rows.items():
        of = "TensorFlow's " if framework == "tensorflow" else ""
        name = f"{of}`{strategy}`" + (f", {case}" if case else "")
        lines.append(f"| {name} | " + " | ".join(cells.get(way, UNKNOWN) for way in ways) + " |")
    return "\n".join(lines)


def cell(lost: str, proof: str) -> str:
    """Return what is lost, with a link to its test."""
    file, _, name = proof.partition("::")
    return f'[{lost}](../{file} "{name}")'


def left_out() -> str:
    """Say which strategies have no row."""
    from workbench import catalog

    said = {(one.framework, one.strategy) for one in PROMISES}
    names = [
        ("TensorFlow's " if entry.framework == "tensorflow" else "") + f"`{entry.name}`"
        for entry in catalog.CATALOG
        if (entry.framework, entry.name) not in said
    ]
    return f"No test kills an engine under these strategies: {', '.join(names)}."


def filled(page: str) -> str:
    """Return a page with its tables as the catalog has them.

    Raises:
        ValueError: It has no place for them.
    """
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"the page has no place for the tables: {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def written() -> str:
    """Return the page as it should be."""
    return filled(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
