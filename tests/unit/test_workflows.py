"""What runs in a fork: the README's commands, on the Pythons that are promised."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / ".github" / "workflows"
TEXTS = {path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.yml"))}
WORKFLOWS: dict[str, dict[Any, Any]] = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
JOBS = {
    f"{name}-{key}": job
    for name, workflow in WORKFLOWS.items()
    for key, job in workflow["jobs"].items()
}
STEPS = [(where, step) for where, job in JOBS.items() for step in job["steps"]]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
PYTHONS = [
    one.rpartition(" ")[2]
    for one in PROJECT["classifiers"]
    if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", one)
]

README = (REPOSITORY / "README.md").read_text("utf-8")
TWO_COMMANDS = README.partition("## Two commands")[2].partition("\n## ")[0]
INSTALL, TEST = re.findall(r"```bash\n(.*)\n```", TWO_COMMANDS)
ALLOWED = {
    INSTALL,
    TEST,
    f"{TEST} --long",
    ".venv/bin/workbench labs notebooks/solutions/lab_1.md --to lab-run --solved-to lab-run --run",
}
OURS = re.compile(r"run-tests|workbench (?:demo|lab|labs)\b|\[torch")
"""Words of a line that types what the README types."""


def typed(step: dict[str, Any]) -> list[str]:
    """Return the lines that a step types into a shell."""
    return str(step.get("run", "")).splitlines()


def test_there_are_the_workflows_that_these_tests_are_about() -> None:
    assert set(WORKFLOWS) == {"platforms", "release", "tests"}


@pytest.mark.parametrize("job", JOBS)
def test_a_job_ends_in_time_and_says_what_it_may_do(job: str) -> None:
    assert 0 < JOBS[job]["timeout-minutes"] < 360
    assert isinstance(JOBS[job]["permissions"], dict)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_allows_nothing_but_reading_and_has_one_run_at_a_time(name: str) -> None:
    assert WORKFLOWS[name]["permissions"] in ({}, {"contents": "read"})
    assert WORKFLOWS[name]["concurrency"]["group"]
    assert "secrets." not in TEXTS[name]


def test_only_a_release_may_write() -> None:
    writers = {job for job, made in JOBS.items() if "write" in made["permissions"].values()}
    assert writers == {"release-attest", "release-publish", "release-github"}


def test_what_signs_or_publishes_runs_nothing_that_pip_installed() -> None:
    for where, step in STEPS:
        if JOBS[where]["permissions"].get("id-token") == "write":
            assert "uses" in step, where


@pytest.mark.parametrize("name", TEXTS)
def test_an_action_is_one_commit_and_names_its_version(name: str) -> None:
    used = re.findall(r"^ *(?:- )?uses: (.*)$", TEXTS[name], re.MULTILINE)
    assert used
    for one in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", one), one


def test_an_action_is_the_same_commit_everywhere() -> None:
    pins = set(re.findall(r"uses: (\S+)@(\S+)", "\n".join(TEXTS.values())))
    assert len(pins) == len({action for action, _ in pins})


def test_no_credentials_stay_in_a_checkout() -> None:
    checkouts = [step for _, step in STEPS if "actions/checkout@" in step.get("uses", "")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_what_others_can_write_reaches_no_shell_as_code() -> None:
    assert not [line for _, step in STEPS for line in typed(step) if "${{" in line]


def test_what_the_readme_names_is_typed_word_for_word() -> None:
    lines = [line.strip() for _, step in STEPS for line in typed(step) if OURS.search(line)]
    assert {INSTALL, TEST, f"{TEST} --long"} <= set(lines)
    assert set(lines) <= ALLOWED


@pytest.mark.parametrize(
    ("job", "line"),
    [
        ("tests-demo", INSTALL),
        ("tests-suite", TEST),
        ("tests-long", f"{TEST} --long"),
        ("tests-wheel", ".ci/wheel"),
        ("platforms-macos", INSTALL),
        ("platforms-wsl2", INSTALL),
    ],
)
def test_a_job_runs_its_command(job: str, line: str) -> None:
    assert line in [text for step in JOBS[job]["steps"] for text in typed(step)]


def test_a_script_that_is_called_is_there() -> None:
    called = {
        word for _, step in STEPS for line in typed(step)
        for word in re.findall(r"(?<!\S)(\.ci/\S+|\./\S+|notebooks/\S+)", line)
    }  # fmt: skip
    assert {".ci/wheel", ".ci/release_notes.py", "./run-tests"} <= called
    for one in called:
        assert (REPOSITORY / one).is_file(), one
    for one in (".ci/wheel", "run-tests"):
        assert os.access(REPOSITORY / one, os.X_OK), one


def test_the_suite_runs_on_the_pythons_that_are_promised() -> None:
    assert JOBS["tests-suite"]["strategy"]["matrix"]["python"] == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    minors = [int(one.partition(".")[2]) for one in PYTHONS]
    assert minors == list(range(minors[0], minors[-1] + 1))
    tried = JOBS["tests-demo"]["strategy"]["matrix"]["python"]
    assert tried == [*PYTHONS, f"3.{minors[-1] + 1}"]


def test_every_other_python_is_one_that_is_promised() -> None:
    named = [
        step["with"]["python-version"]
        for _, step in STEPS
        if "actions/setup-python@" in step.get("uses", "")
    ]
    assert {one for one in named if not one.startswith("${{")} <= set(PYTHONS)


def test_pip_s_cache_is_that_of_these_constraints() -> None:
    for where, step in STEPS:
        if "actions/setup-python@" in step.get("uses", ""):
            about = step["with"]
            if where.startswith("release-"):
                assert "cache" not in about  # what is published comes from no other run
            else:
                assert about["cache"] == "pip", where
                assert about["cache-dependency-path"] == "constraints.txt", where


@pytest.mark.parametrize("job", ["tests-suite", "tests-long"])
def test_reports_of_a_suite_that_failed_are_kept(job: str) -> None:
    (kept,) = [one for one in JOBS[job]["steps"] if "upload-artifact@" in one.get("uses", "")]
    assert kept["if"] == "failure()"
    assert kept["with"]["path"] == "test-reports/"


def test_the_night_runs_what_is_left_to_it() -> None:
    on = WORKFLOWS["tests"][True]  # YAML 1.1 reads the key `on` so
    assert len(on["schedule"]) == 1
    assert "github.event_name == 'schedule'" in JOBS["tests-long"]["if"]


def test_nothing_is_published_until_somebody_switches_it_on() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}
    assert jobs["build"]["if"] == "vars.PUBLISH_RELEASES == 'true'"
    for name, job in jobs.items():  # whatever follows from it is skipped with it
        while "needs" in job:
            assert "if" not in job, name
            name, job = job["needs"], jobs[job["needs"]]
        assert name == "build"
    assert "`PUBLISH_RELEASES`" in (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")


def test_pypi_believes_the_job_and_no_password() -> None:
    job = JOBS["release-publish"]
    assert job["environment"]["name"] == "pypi"
    assert job["permissions"] == {"id-token": "write"}
    assert "with" not in job["steps"][-1]
