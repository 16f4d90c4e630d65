"""A tag is released only where version and changelog are ready for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / ".ci" / "release_notes.py"
CHANGELOG = """# Changelog

## 0.3.0 (unreleased)

- Not yet.

## 0.2.0 (2026-12-01)

- Faster.
- Smaller.

## 0.1.0 (2026-11-01)

- First.
"""


def said(
    root: Path, tag: str, *, changelog: str = CHANGELOG, version: str = "0.2.0", package: str = ""
) -> tuple[int, str, str]:
    """Return exit status, standard output and error of the script in a project made up."""
    (root / ".ci").mkdir()
    (root / "workbench").mkdir()
    (root / ".ci" / SCRIPT.name).write_bytes(SCRIPT.read_bytes())
    (root / "pyproject.toml").write_text(f'[project]\nname = "x"\nversion = "{version}"\n')
    (root / "workbench" / "__init__.py").write_text(f'__version__ = "{package or version}"\n')
    (root / "CHANGELOG.md").write_text(changelog)
    done = subprocess.run(
        [sys.executable, str(root / ".ci" / SCRIPT.name), tag], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def test_the_notes_are_the_section_of_the_tag(tmp_path):
    assert said(tmp_path, "v0.2.0") == (0, "- Faster.\n- Smaller.\n", "")


def test_the_last_section_ends_with_the_file(tmp_path):
    assert said(tmp_path, "v0.1.0", version="0.1.0") == (0, "- First.\n", "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param({"tag": "v0.2.1"}, "the version of pyproject.toml 0.2.0", id="other version"),
        pytest.param({"tag": "0.2.0"}, "The tag is 0.2.0", id="no v"),
        pytest.param(
            {"tag": "v0.2.0", "package": "0.1.9"}, "the version of workbench 0.1.9", id="package"
        ),
        pytest.param(
            {"tag": "v0.4.0", "version": "0.4.0"},
            "no section for 0.4.0; it has: 0.3.0, 0.2.0, 0.1.0",
            id="no section",
        ),
        pytest.param({"tag": "v0.3.0", "version": "0.3.0"}, "not dated: unreleased", id="no date"),
        pytest.param(
            {"tag": "v0.2.0", "changelog": "## 0.2.0 (2026-12-01)\n\n## 0.1.0 (2026-11-01)\n- A\n"},
            "says nothing of 0.2.0",
            id="empty section",
        ),
    ],
)
def test_what_is_not_ready_is_not_released(tmp_path, given, words):
    status, output, error = said(tmp_path, **given)
    assert status == 1
    assert output == ""
    assert words in error
    assert "CONTRIBUTING.md" in error


def test_contributing_has_the_section_that_the_script_names():
    assert "\n## Release\n" in (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")
