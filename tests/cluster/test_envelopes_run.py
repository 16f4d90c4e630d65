"""What envelopes say, done to the letter: from an empty folder, in a fresh environment.

The same job in a notebook says what the weights must be. Containers and clouds are not here: what
their machines would run is run, under the variables that they set.
"""

from __future__ import annotations

import base64
import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from envelope_jobs import (
    PACKAGE,
    RUN_S,
    SYSTEM,
    Apart,
    Node,
    bare,
    fetched,
    followed,
    fresh,
    has_ended_as,
    in_notebook,
    installed,
    layered,
    made_by,
    runs,
    short_folder,
    written,
)
from needs import need
from notebook_shell import soon

import workbench as wb
from workbench.export.envelopes import ENVELOPES
from workbench.jobs.followed import follow

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = [
    pytest.mark.cluster, pytest.mark.torch, pytest.mark.timeout(2 * RUN_S),
    pytest.mark.leaks("the environments of a file are made by its first test"),
]  # fmt: skip
need("torch")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Hand out a folder of gigabytes, of which nothing is left."""
    made = tmp_path_factory.mktemp("envelopes")
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    """Hand out a place without a network."""
    made = Apart()
    yield made
    made.close()


@pytest.fixture(scope="module")
def weights() -> Mapping[str, np.ndarray]:
    """Train the job in a notebook."""
    return in_notebook()


@pytest.fixture(scope="module")
def job(place: Path) -> Path:
    """Write a job that torchrun starts on this machine."""
    return written(place / "torchrun", "torchrun")


@pytest.fixture(scope="module")
def wheels(job: Path, place: Path) -> Path:
    """Fetch what the job needs."""
    return fetched(job, place / "wheels")


@pytest.fixture(scope="module")
def venv(job: Path, wheels: Path, apart: Apart, place: Path) -> Path:
    """Run the job by its envelope, which makes the environment that others make as well."""
    apart.run(["bash", "start.sh"], job, env=bare(place / "home", wheels))
    return job / ".venv"


def with_the_same_environment(folder: Path, venv: Path) -> Path:
    """Have a job find the environment that it would make from its requirements."""
    assert (folder / "requirements.txt").read_text() == (venv / "made-from.txt").read_text()
    (folder / ".venv").symlink_to(venv)
    return folder


def document(folder: Path, name: str) -> Any:
    """Return the last document of a file, which is the job's."""
    return list(yaml.safe_load_all((folder / name).read_text()))[-1]


def test_torchrun_trains_the_job_in_an_environment_of_its_own(job, venv, weights):
    has_ended_as(wb.load(runs(job)), weights)
    made_by((runs(job) / "log-rank0.txt").read_text(), venv)


# -- Kubeflow --------------------------------------------------------------------------------------


def mounted(file: Path, at: Path) -> Path:
    """Lay out ConfigMaps as a kubelet does: links to a folder that it can exchange."""
    data = at / "..data"
    data.mkdir(parents=True)
    for one in list(yaml.safe_load_all(file.read_text()))[:-1]:
        texts = {name: text.encode() for name, text in one.get("data", {}).items()}
        parts = {name: base64.b64decode(text) for name, text in one.get("binaryData", {}).items()}
        for name, content in {**texts, **parts}.items():
            (data / name).write_bytes(content)
            (at / name).symlink_to(Path("..data") / name)
    return at


def test_pods_of_a_trainjob_train_it_and_are_followed_by_their_lines(
    place, venv, wheels, apart, weights
):
    folder = written(place / "trainjob", "trainjob", nodes=2)
    trainer = document(folder, "trainjob.yaml")["spec"]["trainer"]
    files = mounted(folder / "trainjob.yaml", place / "mounted")
    runtime = {  # what Kubeflow's runtime `torch-distributed` says to a node
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": "29400",
        "WORKBENCH_FILES": str(files),
    }
    pods = []
    for node in range(2):
        home = place / f"pod-{node}"
        image = layered(
            home / "image", venv, without=PACKAGE
        )  # PyTorch's: all but Workbench is there
        told = {one["name"]: one["value"] for one in trainer["env"]} | runtime
        env = bare(home, wheels, **told, PET_NODE_RANK=str(node))
        env["PATH"] = f"{image}/bin:{SYSTEM}"
        command = [*trainer["command"], *trainer["args"]]
        pods.append(Node(command, Path("/"), env, home / "log"))
    with apart.nodes(pods) as processes:
        run = followed(pods[0].log, processes[0]).wait(RUN_S)
    has_ended_as(run, weights)
    for node, pod in enumerate(pods):
        made_by(pod.log.read_text(), place / f"pod-{node}" / "image")


# -- SkyPilot --------------------------------------------------------------------------------------


def test_nodes_of_skypilot_train_the_job_and_are_followed_by_their_lines(
    place, venv, wheels, apart, weights
):
    folder = written(place / "skypilot", "skypilot", nodes=2)
    task = document(folder, "sky.yaml")
    assert task["workdir"] == "."
    nodes = []
    for node in range(task["num_nodes"]):
        home = place / f"sky-{node}"
        work = home / "sky_workdir"  # SkyPilot sends the folder there
        shutil.copytree(folder, work)
        with_the_same_environment(work, venv)
        cluster = {
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": str(node),
        }  # fmt: skip
        env = bare(home, wheels, **task["envs"], **cluster)
        script = f"set -e\n({task['setup']})\n{task['run']}"
        nodes.append(Node(["bash", "-c", script], work, env, home / "log"))
    with apart.nodes(nodes) as processes:
        run = followed(nodes[0].log, processes[0]).wait(RUN_S)
    has_ended_as(run, weights)
    made_by(nodes[1].log.read_text(), venv)


# -- Ray -------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]


def extra(name: str) -> list[str]:
    """Return what an extra of Workbench brings."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(about["project"]["optional-dependencies"][name])


def test_ray_trains_the_job_in_the_environment_that_it_makes_for_it(place, job, weights):
    folder = written(place / "ray", "ray")
    pins = ["-c", str(ROOT / "constraints.txt")]
    wheels = fetched(job, place / "wheels", *extra("ray"), *pins)
    ray = installed(fresh(place / "ray-venv"), wheels, *extra("ray"), *pins)
    with short_folder() as own, contextlib.closing(Apart()) as apart:
        env = bare(place / "ray-home", wheels, RAY_TMPDIR=str(own))
        env["PATH"] = f"{ray}/bin:{SYSTEM}"
        head = ["ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1",
                "--dashboard-host=127.0.0.1", "--num-cpus=4", "--disable-usage-stats",
                "--object-store-memory=100000000"]  # fmt: skip
        with (place / "head.log").open("w") as log:
            daemon = apart.start(head, own, env=env, stdout=log, stderr=log)
        env["RAY_ADDRESS"] = "http://127.0.0.1:8265"
        here = ["env", "-i", *(f"{name}={value}" for name, value in env.items())]
        known = apart.command([*here, "ray", "job", "list"], own)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        assert soon(lambda: subprocess.run(known, **quiet).returncode == 0, RUN_S)
        said = place / "ray.log"
        submit = ["ray", "job", "submit", "--working-dir", ".", "--runtime-env", "ray-env.yaml",
                  "--", "python", "run_ray.py"]  # fmt: skip
        assert " ".join(submit) == ENVELOPES["ray"].start
        with apart.nodes([Node(submit, folder, env, said)]):
            assert soon(lambda: re.search(r"raysubmit_\w+", said.read_text()), RUN_S)
            number = re.search(r"raysubmit_\w+", said.read_text())[0]
            lines = apart.command([*here, "ray", "job", "logs", "-f", number], own)
            run = follow(lines, wait_s=RUN_S).wait(RUN_S)
        has_ended_as(run, weights)
        made_by(said.read_text(), own)
    daemon.wait()


# -- what is on one machine ------------------------------------------------------------------------


def test_workers_of_monarch_train_the_job(place, job, venv, apart, weights):
    folder = written(place / "monarch", "monarch")
    package = "torchmonarch[torchx]==0.7.0"
    wheels = fetched(job, place / "wheels", package)
    monarch = installed(layered(place / "monarch-venv", venv), wheels, package)
    env = bare(place / "home", wheels) | {"PATH": f"{monarch}/bin:{SYSTEM}"}
    apart.run(["python", "run_monarch.py"], folder, env=env)
    has_ended_as(wb.load(runs(folder)), weights)
    made_by((runs(folder) / "log-rank0.txt").read_text(), monarch)


@pytest.mark.skipif(not shutil.which("java"), reason="Spark needs Java")
def test_executors_of_a_local_cluster_of_spark_train_the_job(place, job, venv, apart, weights):
    folder = written(place / "spark", "spark")
    package = "pyspark[ml,sql]==4.3.0"
    wheels = fetched(job, place / "wheels", package)
    spark = installed(layered(place / "spark-venv", venv), wheels, package)
    env = bare(place / "home", wheels, SPARK_LOCAL_IP="127.0.0.1")
    env["PATH"] = f"{spark}/bin:{SYSTEM}"
    master = ["--master", "local-cluster[2,1,1024]"]
    apart.run(["spark-submit", *master, "run_spark.py"], folder, env=env)
    has_ended_as(wb.load(runs(folder)), weights)
    made_by((runs(folder) / "log-rank0.txt").read_text(), spark)
