"""`wb.job` and `wb.submit`: what can be given to them reaches the job's folder and its files."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError
from workbench.execution.run import Run
from workbench.export.envelopes import ENVELOPES, Resources
from workbench.notebook import jobs
from workbench.shared.plan import make_plan

CELL = "import torch\nwb.fit(torch.nn.Linear(1, 1), None)\n"


@pytest.fixture(autouse=True)
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The notebook's folder."""
    here = tmp_path / "notebook"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


@pytest.mark.parametrize("call", [jobs.job, jobs.submit])
def test_every_resource_can_be_given(call) -> None:
    taken = {one.name for one in fields(Resources)} & {*inspect.signature(call).parameters}
    assert not taken


@pytest.mark.parametrize("name", [name for name, one in ENVELOPES.items() if one.needs])
def test_what_a_platform_must_be_told_is_what_is_asked_for(name: str) -> None:
    with pytest.raises(PlanError, match="WB-PLAN-225") as caught:
        jobs.job(CELL, "job", on=name, strategy="mirrored", workers=2)
    wanted = re.findall(r"(\w+)=\.\.\.", str(caught.value.next_step))
    told = {one: ("one", "two") if one == "hosts" else "/some/word" for one in wanted}
    nodes = len(told.get("hosts", "1"))
    path = jobs.job(CELL, "job", on=name, strategy="mirrored", workers=2, nodes=nodes, **told)
    assert {*ENVELOPES[name].files} <= {one.name for one in path.iterdir()}


def test_a_job_that_is_written_takes_no_other_folder(notebook: Path) -> None:
    jobs.job(CELL, "job", strategy="mirrored", workers=2)
    with pytest.raises(PlanError, match="WB-PLAN-198") as caught:
        jobs.submit("job", on="local", folder="elsewhere", follow=False)
    assert "folder" in str(caught.value)
    assert not (notebook / "elsewhere").exists()


def test_the_line_that_says_how_to_start_is_right_in_the_folder() -> None:
    cell = "import tensorflow as tf\nprint(tf, strategy)\n"
    path = jobs.job(
        cell, "a job", strategy="multi_worker_mirrored", workers=2, framework="tensorflow"
    )
    assert "\n    workbench run .\n" in jobs.job_line(path)


@pytest.mark.parametrize(("strategy", "nodes"), [("one_device", 1), ("mirrored", 2)])
def test_the_line_that_hands_it_over_fits_its_processes(strategy: str, nodes: int) -> None:
    path = jobs.job(CELL, "job", strategy=strategy, workers=nodes)
    assert f"on='slurm', nodes={nodes})" in jobs.job_line(path)
    jobs.job(CELL, "job", strategy=strategy, workers=nodes, on="slurm", nodes=nodes)


def test_nobody_is_told_to_follow_a_plain_job() -> None:
    cell = "import torch\nmodel = torch.nn.Linear(1, 1)\nwb.fit(model, 1, loss=2, optimizer=3)\n"
    path = jobs.job(cell, "job", strategy="mirrored", workers=2, plain=True, on="slurm")
    assert "follow" not in jobs.job_line(path) + (path / "job.sbatch").read_text()


def test_a_plain_job_is_handed_over_and_not_waited_for(monkeypatch, capsys) -> None:
    handed = SimpleNamespace(name="job")
    monkeypatch.setattr(type(jobs.jobs), "submit", lambda self, *given, **options: handed)
    monkeypatch.setattr(jobs, "_show_when_begun", lambda *given: pytest.fail("it is waited for"))
    cell = "import torch\nmodel = torch.nn.Linear(1, 1)\nwb.fit(model, 1, loss=2, optimizer=3)\n"
    path = jobs.job(cell, "job", strategy="mirrored", workers=2, plain=True)
    assert jobs.submit(path, on="local") is handed
    assert "wb.jobs['job']" in capsys.readouterr().out


def test_a_resource_with_a_typing_error_is_named() -> None:
    plan = make_plan(Recipe(CELL), "mirrored", workers=2)
    with pytest.raises(PlanError, match="WB-PLAN-037") as caught:
        jobs.job(plan, "job", on="slurm", partion="x")
    assert "'partition'" in str(caught.value.next_step)
    with pytest.raises(PlanError, match="WB-PLAN-199"):
        jobs.job(plan, "job", epochs=2)


def test_names_of_submit_are_known_and_other_names_write_nothing() -> None:
    plan = make_plan(Recipe(CELL), "mirrored", workers=2)
    path = jobs.job(plan, "job", on=["kubernetes", "local"])
    assert {*ENVELOPES["trainjob"].files} <= {one.name for one in path.iterdir()}
    with pytest.raises(PlanError, match="WB-PLAN-037"):
        jobs.job(plan, "other", on="slurmy")
    assert not Path("other").exists()


def test_a_run_writes_the_files_of_a_platform_too() -> None:
    run = Run(make_plan(Recipe(CELL), "mirrored", workers=2), number=1, name="base",
              engines=[0, 1], devices=["cpu", "cpu"], folder=Path("run"))  # fmt: skip
    assert (run.to_job("job", on="slurm") / "job.sbatch").is_file()
