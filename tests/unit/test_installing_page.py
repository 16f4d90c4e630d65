"""docs/installing.md names every extra and every environment variable that there is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "installing.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]

VARIABLES = sorted(
    {
        name
        for path in (REPOSITORY / "workbench").rglob("*.py")
        for name in re.findall(r"[\"'`](WORKBENCH_[A-Z_]+)[\"'`]", path.read_text("utf-8"))
    }
)


def test_there_are_variables_to_look_for() -> None:
    assert {"WORKBENCH_PREWARM", "WORKBENCH_HOME", "WORKBENCH_HANG_S"} <= set(VARIABLES)


@pytest.mark.parametrize("name", VARIABLES)
def test_every_environment_variable_is_explained(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_variables_that_are_explained_exist() -> None:
    sources = [
        path for name in ("workbench", "tests") for path in (REPOSITORY / name).rglob("*.py")
    ]
    sources += [REPOSITORY / name for name in ("run-tests", "binder/check", "binder/postBuild")]
    code = "\n".join(path.read_text("utf-8") for path in sources)
    explained = re.findall(r"`(WORKBENCH_[A-Z_]+)", PAGE)
    assert len(explained) > 3
    for name in explained:
        assert name in code, name


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_every_extra_is_explained(extra: str) -> None:
    assert f"| `{extra}` |" in PAGE


def test_versions_are_those_that_are_required() -> None:
    assert PROJECT["requires-python"].removeprefix(">=") in PAGE
    for extra, name in (("torch", "PyTorch"), ("tensorflow", "TensorFlow"), ("lab", "JupyterLab")):
        (needed,) = (
            each for each in PROJECT["optional-dependencies"][extra] if extra in each.lower()
        )
        assert f"{name} {needed.partition('>=')[2]}" in PAGE
