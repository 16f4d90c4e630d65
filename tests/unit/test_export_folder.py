"""A plan as a job folder: what is in it, that it is portable and says nothing of its maker."""

from __future__ import annotations

import getpass
import json
import os
import platform
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from workbench.cookbook import builtin
from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError
from workbench.export import folder as folders
from workbench.export import packages
from workbench.export.folder import Pins, job_of, read_job, workbench_wheel, write_job
from workbench.shared.events import Topic
from workbench.shared.plan import make_plan

CELL = "import torch\nimport numpy as np\nprint(torch, np)\n"


def plan_of(source=CELL, strategy="mirrored", *, framework="torch", workers=2, **settings):
    recipe = source if isinstance(source, Recipe) else Recipe(source, origin="In[3]")
    return make_plan(recipe, strategy, framework=framework, workers=workers, **settings)


def code_of(function, *args, **words):
    with pytest.raises(PlanError) as caught:
        function(*args, **words)
    return caught.value.code


@pytest.fixture(autouse=True)
def notebook(tmp_path, monkeypatch):
    """The notebook's folder, from which a job is written; its wheel is a small one."""
    here = tmp_path / "notebook"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


@pytest.fixture
def quick(monkeypatch):
    """No wheel: packing one takes most of the time."""

    def wheel(into):
        (into / "distributed_workbench-0-py3-none-any.whl").write_bytes(b"")
        return "distributed_workbench-0-py3-none-any.whl"

    monkeypatch.setattr(folders, "workbench_wheel", wheel)


@pytest.mark.usefixtures("quick")
class TestContents:
    def test_a_folder_holds_all_that_a_run_needs(self, tmp_path):
        plan = plan_of(overrides={"seed": 7}, name="base", options={"bucket_mb": 3.0})
        path = write_job(plan, tmp_path / "job", pins=Pins(threads=2, allreduce="ring"))
        assert path == tmp_path / "job"
        assert sorted(one.name for one in path.iterdir()) == [
            "README.md", "distributed_workbench-0-py3-none-any.whl", "requirements.txt",
            "run.json", "train.py",
        ]  # fmt: skip
        about = json.loads((path / "run.json").read_text())
        assert about["format"] == "workbench-job/1"
        assert (about["name"], about["framework"], about["seed"]) == ("base", "torch", 7)
        assert about["launch"] == {
            "workers": 2, "servers": 0, "processes": 2, "framework": "torch",
        }  # fmt: skip
        pins = about["pins"]
        assert pins["python"] == platform.python_version()
        assert (pins["threads"], pins["allreduce"], pins["dtype"]) == (2, "ring", "float32")

    def test_what_was_written_is_read_back(self, tmp_path):
        plan = plan_of(overrides={"steps": 4}, faults=())
        job = read_job(write_job(plan, tmp_path / "job"))
        assert job.plan == plan
        assert job.plan.recipe.digest == plan.recipe.digest
        assert (job.name, job.plain, job.runs) == ("mirrored", False, [])
        for number in ("1", "10", "2"):
            (job.path / "runs" / number).mkdir(parents=True)
        assert [path.name for path in read_job(job.path).runs] == ["1", "2", "10"]

    def test_servers_and_helpers_are_counted_as_processes(self, tmp_path):
        torch = plan_of(strategy="parameter_server", workers=3, options={"servers": 2})
        launch = read_job(write_job(torch, tmp_path / "torch")).launch
        assert (launch["workers"], launch["servers"], launch["processes"]) == (3, 2, 5)
        keras = "import keras\nprint(keras)\n"
        one = plan_of(keras, "mirrored", framework="tensorflow", workers=3)
        assert read_job(write_job(one, tmp_path / "one")).launch["processes"] == 1
        several = plan_of(keras, "parameter_server", framework="tensorflow", workers=2)
        launch = read_job(write_job(several, tmp_path / "several")).launch
        assert launch["processes"] == several.engines + len(several.helpers) > 2

    def test_exact_versions_without_local_suffixes_are_required(self, tmp_path, monkeypatch):
        versions = {"torch": "9.9.1+cpu", "numpy": "8.8"}
        found = packages.metadata.distribution

        class Known:
            def __init__(self, name):
                self.metadata, self.version = {"Name": name}, versions[name]

            def read_text(self, name):
                return None

        monkeypatch.setattr(
            packages.metadata, "distribution", lambda name: Known(name) if name in versions
            else found(name),
        )  # fmt: skip
        path = write_job(plan_of(), tmp_path / "job")
        lines = (path / "requirements.txt").read_text().splitlines()
        assert "torch==9.9.1" in lines
        assert "numpy==8.8" in lines
        assert lines[-1] == "./distributed_workbench-0-py3-none-any.whl"
        assert read_job(path).pins["packages"]["torch"] == "9.9.1"

    def test_what_the_cell_imports_is_required(self, tmp_path):
        path = write_job(
            plan_of("import sklearn.svm, json\nprint(sklearn, json)\n"), tmp_path / "a"
        )
        assert "scikit-learn" in read_job(path).pins["packages"]
        path = write_job(plan_of(builtin.lookup("digits_mlp")), tmp_path / "b")
        assert "scikit-learn" in read_job(path).pins["packages"]

    def test_a_package_is_found_by_its_files_where_it_declares_no_modules(self, monkeypatch):
        with monkeypatch.context() as older:
            older.setattr(sys, "version_info", (3, 10, 13))
            found = packages.packages_of("import sklearn.svm, yaml, json", "torch")
        assert {"scikit-learn", "PyYAML", "torch", "numpy"} == set(found)
        assert found == packages.packages_of("import sklearn.svm, yaml, json", "torch")

    def test_what_travelling_files_import_is_required(self, tmp_path, notebook):
        (notebook / "helper.py").write_text("import yaml, json, other\n")
        (notebook / "other").mkdir()
        (notebook / "other" / "deep.py").write_text("from PIL import Image\n")
        (notebook / "other" / "broken.py").write_text("def\n")
        files = [Path("helper.py"), Path("other")]
        path = write_job(plan_of("import torch, helper\n"), tmp_path / "job", files=files)
        lines = (path / "requirements.txt").read_text().splitlines()
        named = {line.partition("==")[0].lower() for line in lines if "==" in line}
        assert named == {"torch", "numpy", "pyyaml", "pillow"}

    def test_arguments_of_a_function_travel_in_its_cell(self, tmp_path):
        recipe = Recipe("def train(lr):\n    print(lr)\n", function="train", args=(0.5,))
        job = read_job(write_job(plan_of(recipe), tmp_path / "job"))
        assert job.plan.recipe.cell.rstrip().endswith("train(0.5)")
        assert (job.path / "train.py").read_text().endswith(job.plan.recipe.cell)

    def test_of_a_run_what_it_had_chosen_is_pinned(self, tmp_path):
        run = tmp_path / "run"
        run.mkdir()
        np.savez(run / "weights.npz", steps=np.int64(3), w=np.zeros(2, np.float64))
        (run / "run.json").write_text('{"framework": "torch"}')
        story = SimpleNamespace(started={"threads": 2}, facts={Topic.ALLREDUCE_CHOSEN: "ring"})
        known = SimpleNamespace(
            plan=plan_of(init_from="base"), folder=run, init_from=str(run),
            history=SimpleNamespace(story=story),
        )  # fmt: skip
        pins = read_job(job_of(known, tmp_path / "job")).pins
        assert (pins["threads"], pins["allreduce"], pins["dtype"]) == (2, "ring", "float64")
        story.facts.clear()  # the backend's own is told by nobody
        job = read_job(job_of(known, tmp_path / "job"))
        assert job.pins["allreduce"] == "backend"
        assert (job.path / "initial" / "weights.npz").is_file()

    def test_a_run_that_never_began_pins_nothing(self, tmp_path):
        story = SimpleNamespace(started={}, facts={})
        known = SimpleNamespace(
            plan=plan_of(), folder=tmp_path, init_from="", history=SimpleNamespace(story=story)
        )
        pins = read_job(job_of(known, tmp_path / "job")).pins
        assert (pins["threads"], pins["allreduce"], pins["dtype"]) == (None, None, "float32")

    def test_a_plan_is_pinned_to_what_it_would_have_here(self, tmp_path):
        pins = read_job(job_of(plan_of(), tmp_path / "job")).pins
        assert pins["threads"] >= 1
        assert pins["allreduce"] == "backend"

    def test_a_plain_folder_does_without_workbench(self, tmp_path):
        path = write_job(plan_of(builtin.lookup("digits_mlp")), tmp_path / "job", plain=True)
        assert read_job(path).plain
        assert not list(path.glob("*.whl"))
        assert "whl" not in (path / "requirements.txt").read_text()
        # a loop of the cell's own leaves none
        assert "`weights.pt`" in (path / "README.md").read_text()
        assert "run_job" not in (path / "train.py").read_text()

    def test_the_page_says_how_to_start_watch_stop_and_go_on(self, tmp_path):
        kept = plan_of(checkpoint="kept", checkpoint_every=7)
        page = (write_job(kept, tmp_path / "job") / "README.md").read_text()
        for said in (
            "pip install -r requirements.txt", "torchrun --standalone --nproc-per-node 2 train.py",
            "workbench run .", "wb.follow(", "runs/1", "workbench control . stop", "every 7 steps",
        ):  # fmt: skip
            assert said in page

    def test_doubts_stand_on_the_page(self, tmp_path):
        path = write_job(plan_of("open('data/x.csv')\n"), tmp_path / "job")
        assert "data/x.csv" in (path / "README.md").read_text()


@pytest.mark.usefixtures("quick")
class TestSafe:
    def test_nothing_of_the_machine_and_its_user_is_in_the_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("WANDB_API_KEY", "k3y-of-w4ndb")
        monkeypatch.setenv("HOME", "/home/somebody-special")
        run = tmp_path / "somebody" / "run"
        run.mkdir(parents=True)
        np.savez(run / "weights.npz", w=np.zeros(2))
        meta = {"framework": "torch", "user": "somebody", "folder": str(run), "files": {}}
        (run / "run.json").write_text(json.dumps(meta))
        plan = plan_of(
            checkpoint=str(tmp_path / "kept"), init_from="base",
            log=(f"tensorboard:{tmp_path}/boards/mine", f"mlflow:sqlite:///{tmp_path}/ml.db",
                 f"mlflow:file://{tmp_path}/mlruns"),
        )  # fmt: skip
        path = write_job(plan, tmp_path / "job", initial=run)
        job = read_job(path).plan
        assert (job.checkpoint, job.init_from) == ("checkpoints", "initial")
        assert job.log == ("tensorboard:mine", "mlflow:sqlite:///ml.db", "mlflow:file:mlruns")
        assert (path / "initial" / "weights.npz").is_file()
        kinds = (".json", ".md", ".py", ".txt")
        told = "".join(one.read_text() for one in path.rglob("*") if one.suffix in kinds)
        for private in (str(tmp_path), "somebody", "k3y-of-w4ndb", socket.gethostname()):
            assert private not in told
        if len(getpass.getuser()) > 4:
            assert getpass.getuser() not in told

    @pytest.mark.parametrize(
        "target",
        [
            "mlflow:https://me:s3cret@host/", "mlflow:https://me@host/",
            "mlflow:postgresql://me:s3cret@host/db", "mlflow:http://host/?token=s3cret",
        ],
    )  # fmt: skip
    def test_no_password_travels(self, target, tmp_path):
        plan = plan_of()
        object.__setattr__(plan, "log", (target,))
        with pytest.raises(PlanError) as caught:
            write_job(plan, tmp_path / "job")
        assert caught.value.code == "WB-PLAN-213"
        assert "s3cret" not in str(caught.value)
        assert not (tmp_path / "job").exists()

    def test_places_that_are_nobodys_stay(self, tmp_path):
        targets = ("mlflow:http://host:5000", "mlflow:", "wandb:team/project", "trackio:project")
        plan = plan_of()
        object.__setattr__(plan, "log", targets)
        assert read_job(write_job(plan, tmp_path / "job")).plan.log == targets

    def test_weights_to_start_from_must_be_at_hand(self, tmp_path):
        plan = plan_of(init_from="base")
        assert code_of(write_job, plan, tmp_path / "job") == "WB-PLAN-209"
        empty = tmp_path / "empty"
        empty.mkdir()
        assert code_of(write_job, plan, tmp_path / "job", initial=empty) == "WB-PLAN-212"
        assert not (tmp_path / "job").exists()


@pytest.mark.usefixtures("quick")
class TestFiles:
    def test_files_travel_under_their_relative_paths(self, tmp_path, notebook):
        (notebook / "data").mkdir()
        (notebook / "data" / "x.csv").write_text("1")
        (notebook / "data" / ".hidden").write_text("2")
        (notebook / "helpers.py").write_text("")
        (tmp_path / "far.bin").write_bytes(b"3")
        source = "import helpers\nopen('data/x.csv')\nprint(helpers)\n"
        assert code_of(write_job, plan_of(source), tmp_path / "job") == "WB-PLAN-206"
        files = [Path("data"), Path("helpers.py"), tmp_path / "far.bin"]
        path = write_job(plan_of(source), tmp_path / "job", files=files)
        assert (path / "data" / "x.csv").read_text() == "1"
        assert (path / "helpers.py").is_file()
        assert (path / "far.bin").read_bytes() == b"3"
        assert not (path / "data" / ".hidden").exists()

    @pytest.mark.parametrize("name", ["train.py", "run.json", "runs", "a.whl"])
    def test_names_of_the_folders_own_files_are_taken(self, name, tmp_path, notebook):
        (notebook / name).write_text("")
        assert code_of(write_job, plan_of(), tmp_path / "job", files=[Path(name)]) == "WB-PLAN-211"

    def test_a_file_that_is_not_there_is_said(self, tmp_path):
        gone = [Path("gone.csv")]
        assert code_of(write_job, plan_of(), tmp_path / "job", files=gone) == "WB-PLAN-210"
        assert not (tmp_path / "job").exists()


@pytest.mark.usefixtures("quick")
class TestReplacing:
    def test_runs_and_the_users_files_stay(self, tmp_path, notebook):
        (notebook / "old.csv").write_text("1")
        path = write_job(plan_of(name="a"), tmp_path / "job", files=[Path("old.csv")])
        (path / "runs" / "1").mkdir(parents=True)
        (path / "runs" / "1" / "run.json").write_text("{}")
        (path / "mine.txt").write_text("kept")
        write_job(plan_of(name="b", workers=3), path)
        assert read_job(path).launch["workers"] == 3
        assert (path / "runs" / "1" / "run.json").read_text() == "{}"
        assert (path / "mine.txt").read_text() == "kept"
        assert not (path / "old.csv").exists()
        assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []

    @pytest.mark.parametrize("holds", ["a file", "other files", "a run"])
    def test_what_is_no_job_folder_is_left_alone(self, holds, tmp_path):
        goal = tmp_path / "job"
        if holds == "a file":
            goal.write_text("mine")
        else:
            goal.mkdir()
            name = "run.json" if holds == "a run" else "mine.txt"
            (goal / name).write_text('{"state": "finished"}')
        assert code_of(write_job, plan_of(), goal, replace=True) == "WB-PLAN-214"
        assert goal.is_file() or len(list(goal.iterdir())) == 1

    def test_an_envelope_that_holds_the_old_cell_goes(self, tmp_path):
        path = write_job(plan_of(), tmp_path / "job")
        for name in ("trainjob.yaml", "job.sbatch"):
            (path / name).write_text("# as it was made for the cell before\n")
        write_job(plan_of(CELL + "print(1)\n"), path)
        assert not (path / "trainjob.yaml").exists()
        assert (path / "job.sbatch").exists()

    def test_an_empty_folder_is_taken(self, tmp_path):
        (tmp_path / "job").mkdir()
        assert read_job(write_job(plan_of(), tmp_path / "job"))

    def test_a_script_that_was_changed_is_kept_unless_said(self, tmp_path):
        path = write_job(plan_of(), tmp_path / "job")
        with (path / "train.py").open("a") as file:
            file.write("# mine\n")
        assert code_of(write_job, plan_of(), path) == "WB-PLAN-216"
        write_job(plan_of(), path, replace=True)
        assert "# mine" not in (path / "train.py").read_text()

    def test_a_job_that_runs_is_left_alone(self, tmp_path):
        path = write_job(plan_of(), tmp_path / "job")
        alive = path / "runs" / "1" / "alive"
        alive.parent.mkdir(parents=True)
        alive.write_text("{}")
        assert code_of(write_job, plan_of(), path) == "WB-PLAN-215"
        (alive.parent / "run.json").write_text('{"state": "finished"}')  # a moment ago
        write_job(plan_of(), path)
        (alive.parent / "run.json").write_text('{"state": "running"}')
        assert code_of(write_job, plan_of(), path) == "WB-PLAN-215"
        os.utime(alive, (time.time() - 3600,) * 2)
        write_job(plan_of(), path)

    def test_a_failure_leaves_all_as_it_was(self, tmp_path, monkeypatch):
        path = write_job(plan_of(name="a"), tmp_path / "job")
        (path / "runs").mkdir()
        before = {one.name: one.stat().st_mtime_ns for one in path.iterdir()}
        rename = Path.rename

        def full(self, target):
            if Path(target) == path and not self.name.endswith(".old"):
                raise OSError(28, "No space left on device")
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", full)
        assert code_of(write_job, plan_of(name="b"), path) == "WB-PLAN-208"
        assert {one.name: one.stat().st_mtime_ns for one in path.iterdir()} == before
        assert read_job(path).name == "a"
        assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


@pytest.mark.usefixtures("quick")
class TestReading:
    def test_what_is_no_job_folder_is_said(self, tmp_path):
        assert code_of(read_job, tmp_path) == "WB-PLAN-218"
        assert code_of(read_job, tmp_path / "gone") == "WB-PLAN-218"
        for text in ('{"state": "finished"}', "[]", "3"):
            (tmp_path / "run.json").write_text(text)
            assert code_of(read_job, tmp_path) == "WB-PLAN-218"

    def test_a_description_that_was_cut_is_said(self, tmp_path):
        path = write_job(plan_of(), tmp_path / "job")
        whole = (path / "run.json").read_bytes()
        for size in (0, 1, len(whole) // 2, len(whole) - 2):
            (path / "run.json").write_bytes(whole[:size])
            assert code_of(read_job, path) == "WB-PLAN-217"
        (path / "run.json").write_bytes(b"\xff\xfe{}")
        assert code_of(read_job, path) == "WB-PLAN-217"

    def test_a_newer_folder_is_said(self, tmp_path):
        path = write_job(plan_of(), tmp_path / "job")
        about = json.loads((path / "run.json").read_text()) | {"format": "workbench-job/2"}
        (path / "run.json").write_text(json.dumps(about))
        assert code_of(read_job, path) == "WB-PLAN-219"

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            *(("plan", value) for value in (None, 3, {}, {"recipe": {"source": 1}})),
            *(("launch", value) for value in (None, 3, {}, {"workers": 2})),
            *(("pins", value) for value in (None, 3)),
        ],
    )
    def test_a_description_of_something_else_is_said(self, key, value, tmp_path):
        path = write_job(plan_of(), tmp_path / "job")
        about = json.loads((path / "run.json").read_text()) | {key: value}
        (path / "run.json").write_text(json.dumps(about))
        assert code_of(read_job, path) == "WB-PLAN-220"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    into = tmp_path_factory.mktemp("wheel")
    return into / workbench_wheel(into)


def test_the_wheel_holds_the_package_and_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as packed:
        assert packed.testzip() is None
        names = packed.namelist()
        about = next(name for name in names if name.endswith("METADATA"))
        described = packed.read(about).decode()
    assert {"workbench/__init__.py", "workbench/export/templates/plain_torch.txt"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert "Name: distributed-workbench" in described
    assert "Requires-Dist: pyzmq" in described
    for private in (str(Path(folders.__file__).parents[2]), str(Path.home()) + "/"):
        assert private not in described


def test_the_same_package_gives_the_same_bytes(wheel, tmp_path):
    os.utime(folders.__file__)
    assert (tmp_path / workbench_wheel(tmp_path)).read_bytes() == wheel.read_bytes()


def test_pip_installs_the_wheel(wheel, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    done = subprocess.run(
        [*pip, "--disable-pip-version-check", "--target", str(tmp_path / "site"), str(wheel)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    code = "import workbench, workbench.export.script as s; print(workbench.__file__)"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, cwd=tmp_path,
        timeout=120,
    )  # fmt: skip
    assert shown.stdout.strip().startswith(str(tmp_path / "site")), shown.stderr
    assert (tmp_path / "site" / "bin" / "workbench").is_file()
