"""Prints the changelog's section for a tag; ends with 1 where the tag is not ready to be released.

    python .ci/release_notes.py v0.1.0

The version stands in pyproject.toml and in the package. The changelog's heading has the day in
brackets, `## 0.1.0 (2026-12-01)`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HEADING = re.compile(r"^## +(?P<version>\S+)(?: +\((?P<when>.*)\))? *$", re.MULTILINE)


def section(changelog: str, version: str) -> tuple[str, str]:
    """Return what stands in the brackets of a version's heading, and the text below it.

    Raises:
        ValueError: There is no section, or nothing in it.
    """
    headings = list(HEADING.finditer(changelog))
    for at, heading in enumerate(headings):
        if heading["version"] == version:
            end = headings[at + 1].start() if at + 1 < len(headings) else len(changelog)
            text = changelog[heading.end() : end].strip()
            if not text:
                raise ValueError(f"CHANGELOG.md says nothing of {version}.")
            return heading["when"] or "", text
    there = ", ".join(one["version"] for one in headings) or "none"
    raise ValueError(f"CHANGELOG.md has no section for {version}; it has: {there}.")


def notes(root: Path, tag: str) -> str:
    """Return the notes of the release that a tag names.

    Raises:
        ValueError: The tag is not the version, or the changelog is not ready.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    package = (root / "workbench" / "__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    versions = {"pyproject.toml": project["version"], "workbench": found[1] if found else "none"}
    for place, version in versions.items():
        if tag != f"v{version}":
            raise ValueError(f"The tag is {tag}, the version of {place} {version}.")
    when, text = section((root / "CHANGELOG.md").read_text("utf-8"), project["version"])
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", when):
        raise ValueError(f"The changelog's section is not dated: {when or 'nothing'} in brackets.")
    return text


if __name__ == "__main__":
    try:
        sys.stdout.write(notes(Path(__file__).resolve().parents[1], sys.argv[1]) + "\n")
    except ValueError as error:
        sys.exit(f'{error}\nCONTRIBUTING.md, "Release", says what comes before a tag.')
