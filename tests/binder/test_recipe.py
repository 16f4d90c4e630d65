"""What repo2docker reads: its own rules, and the versions that were tested together."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BINDER = ROOT / "binder"
OTHER_BUILDS = (
    "Dockerfile", "environment.yml", "environment.yaml", "Pipfile", "Pipfile.lock", "Project.toml",
    "REQUIRE", "install.R", "DESCRIPTION", "default.nix", "pyproject.toml", "setup.py",
)  # fmt: skip


def lines_of(name: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in (BINDER / name).read_text().splitlines())
    return [line for line in lines if line]


@pytest.mark.parametrize("name", OTHER_BUILDS)
def test_nothing_takes_precedence_over_the_requirements(name):
    assert not (BINDER / name).exists()


def test_no_second_folder_makes_repo2docker_refuse():
    assert not (ROOT / ".binder").exists()


@pytest.mark.parametrize("name", ["postBuild", "check"])
def test_scripts_can_be_run_and_are_proper_bash(name):
    path = BINDER / name
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


def test_the_python_is_the_one_that_the_versions_were_tested_with():
    (runtime,) = lines_of("runtime.txt")
    tested = re.search(r"on Python (\d+\.\d+)", (ROOT / "constraints.txt").read_text())
    assert tested is not None
    assert runtime == f"python-{tested[1]}"


def test_requirements_take_their_versions_from_the_constraints():
    constraint, *packages = lines_of("requirements.txt")
    flag, path = constraint.split()
    assert flag == "-c"
    assert (BINDER / path).resolve() == ROOT / "constraints.txt"  # pip: relative to the file
    assert packages == ["-e ."]  # pip: relative to the repository's root


def test_post_build_finds_one_version_of_tensorflow():
    command = re.search(r"tensorflow=\$\((sed .*)\)\n", (BINDER / "postBuild").read_text())
    assert command is not None
    found = subprocess.run(
        ["bash", "-c", command[1]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", found.stdout)


def test_what_the_image_brings_is_pinned():
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in lines_of("base.txt"))
