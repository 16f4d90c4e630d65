"""Ray, Kubernetes and SkyPilot, by stand-ins for their clients that speak as the real ones do."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.clients import ONE, Clients, folder_with, handed_out

from workbench.errors import ClusterError
from workbench.jobs.platforms import (
    Ticket,
    platform,
)

clients = pytest.fixture(handed_out)


def log_of(frame: str) -> str:
    """A log with a marked line."""
    return f'loading\n#wb1 {{"f":"{frame}","a":0,"d":"eA=="}}\nlast words\n'


# -- Ray -------------------------------------------------------------------------------------------

RAY_HEAD = "Job submission server address: http://127.0.0.1:8265\n"


@pytest.fixture
def ray(clients: Clients) -> Clients:
    """Hand out a Ray that takes a job."""
    clients.says("ray", "job list*", "[]\n")
    clients.says("ray", "job submit*", RAY_HEAD + "\nJob 'x' submitted successfully\n")
    clients.says("ray", "job logs*", RAY_HEAD + log_of("alive"))
    return clients


def in_ray() -> Ticket:
    return Ticket("ray", "wb-digits-1", "/job", 0.0, {"address": "http://head:8265"})


def test_a_job_of_rays_is_submitted_with_its_environment(tmp_path: Path, ray: Clients) -> None:
    one = platform("ray", address="http://head:8265")
    folder = folder_with(tmp_path, "run_ray.py", "ray-env.yaml")
    one.check(folder, ONE)
    ticket = one.submit(folder, ONE)
    assert ray.calls == [
        "ray job list --address http://head:8265",
        f"ray job submit --address http://head:8265 --no-wait --submission-id {ticket.id} "
        f"--working-dir {folder} --runtime-env {folder}/ray-env.yaml -- python run_ray.py",
    ]
    assert ticket.id.startswith("wb-digits-")
    assert one.place(ticket) == ["ray", "job", "logs", "--address", "http://head:8265",
                                 "--log-color", "false", "--follow", ticket.id]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "state", "reason"),
    [
        ("Status for job 'wb-digits-1': PENDING\nStatus message: Job has not started yet. It may "
         "be waiting for resources.\n", "pending",
         "PENDING: Job has not started yet. It may be waiting for resources."),
        ("Status for job 'wb-digits-1': RUNNING\nStatus message: Job is currently running.\n",
         "running", "RUNNING: Job is currently running."),
        ("\n---\nJob 'wb-digits-1' succeeded\n---\n", "finished", "SUCCEEDED"),
        ("Job 'wb-digits-1' was stopped\n", "cancelled", "STOPPED"),
        ("\n---\nJob 'wb-digits-1' failed\n---\nStatus message: Job entrypoint command failed with "
         "exit code 1\n", "failed", "FAILED: Job entrypoint command failed with exit code 1"),
    ],
)  # fmt: skip
def test_rays_status_is_read(said: str, state: str, reason: str, ray: Clients) -> None:
    ray.says("ray", "job status*", RAY_HEAD + said)
    now = platform("ray").state(in_ray())
    assert (now.state, now.reason) == (state, reason)
    assert now.stepped is (False if state == "failed" else None)


def test_rays_log_has_its_lines_alone(ray: Clients) -> None:
    assert platform("ray").logs(in_ray()) == "loading\nlast words"


def test_a_job_that_ray_does_not_know_is_gone_and_a_ray_that_is_down_is_not(ray: Clients) -> None:
    one = platform("ray")
    unknown = (
        'Traceback (most recent call last):\n  File "x", line 1\nRuntimeError: Request failed with '
        "status code 404: Job wb-digits-1 does not exist.\n"
    )
    ray.says("ray", "job status*", RAY_HEAD, unknown, 1)
    ray.says("ray", "job stop*", RAY_HEAD, unknown, 1)
    now = one.state(in_ray())
    assert now.gone
    assert "not exist" in now.reason
    one.cancel(in_ray())
    down = "ConnectionError: Failed to connect to Ray at address: http://head:8265.\n"
    ray.says("ray", "job st*", "", down, 1)
    for call in (one.state, one.cancel):
        with pytest.raises(ClusterError) as told:
            call(in_ray())
        assert told.value.code == "WB-CLUSTER-093"


# -- Kubernetes ------------------------------------------------------------------------------------


def in_kubernetes() -> Ticket:
    return Ticket("kubernetes", "digits", "/job", 0.0, {"context": "", "namespace": "ml"})


def conditions(*kinds: str) -> str:
    """A TrainJob as kubectl prints it."""
    found = [
        {"type": kind, "status": "True", "reason": f"Because{kind}", "message": "in words"}
        for kind in kinds
    ]
    return json.dumps({"kind": "TrainJob", "status": {"conditions": found, "jobsStatus": []}})


def pods(*states: dict[str, Any]) -> str:
    return json.dumps({"items": [{"status": one} for one in states]})


@pytest.fixture
def kubectl(clients: Clients) -> Clients:
    """Hand out a Kubernetes."""
    clients.says("kubectl", "*logs*", log_of("records-rank0.bin"))
    clients.says("kubectl", "*get pods*-o json", pods())
    clients.says("kubectl", "*get pods*-o name", "pod/digits-node-0-0-abcde\n")
    return clients


def test_a_train_job_is_looked_at_by_the_cluster_then_made(
    tmp_path: Path, kubectl: Clients
) -> None:
    kubectl.says(
        "kubectl", "*create*", "configmap/digits-files\ntrainjob.trainer.kubeflow.org/digits\n"
    )
    one, ml = platform("kubernetes", context="lab"), replace(ONE, namespace="ml")
    folder = folder_with(tmp_path, "trainjob.yaml")
    one.check(folder, ml)
    ticket = one.submit(folder, ml)
    assert ticket.id == "digits"
    base = "kubectl --context lab -n ml create -f trainjob.yaml -o name"
    assert kubectl.calls == [f"{base} --dry-run=server", base]
    assert one.place(ticket) == [
        "kubectl", "logs", "-f", "pod/digits-node-0-0-abcde", "--context", "lab", "-n", "ml",
        "-c", "node", "--tail=-1",
    ]  # fmt: skip


def test_what_kubernetes_refuses_is_said_in_its_words(tmp_path: Path, kubectl: Clients) -> None:
    words = (
        'Error from server (AlreadyExists): error when creating "trainjob.yaml": '
        'trainjobs.trainer.kubeflow.org "digits" already exists\n'
    )
    kubectl.says("kubectl", "*create*", err=words, code=1)
    with pytest.raises(ClusterError) as told:
        platform("kubernetes").check(folder_with(tmp_path, "trainjob.yaml"), ONE)
    assert told.value.code == "WB-CLUSTER-084"
    assert "already exists" in str(told.value)


@pytest.mark.parametrize(
    ("job", "of_pods", "state", "reason"),
    [
        (conditions("Complete"), pods(), "finished", "Complete (BecauseComplete): in words"),
        (conditions("Failed"), pods(), "failed", "Failed (BecauseFailed): in words"),
        (conditions("Suspended"), pods(), "pending", "Suspended (BecauseSuspended): in words"),
        (conditions(), pods(), "pending", "Pending"),
        ('{"kind": "TrainJob"}', pods(), "pending", "Pending"),
        (conditions(), pods({"phase": "Running"}, {"phase": "Running"}), "running", "Running"),
        (conditions(), pods({"phase": "Running"}, {"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
             "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}]}),
         "pending", "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
        (conditions(), pods({"phase": "Pending", "containerStatuses": [
            {"state": {"waiting": {"reason": "ImagePullBackOff"}}}]}),
         "pending", "ImagePullBackOff"),
    ],
)  # fmt: skip
def test_conditions_and_pods_are_read(
    job: str, of_pods: str, state: str, reason: str, kubectl: Clients
) -> None:
    kubectl.says("kubectl", "-n ml get trainjob digits -o json", job)
    kubectl.says("kubectl", "-n ml get pods*-o json", of_pods)
    now = platform("kubernetes").state(in_kubernetes())
    assert (now.state, now.reason) == (state, reason)
    assert now.stepped is (True if state == "failed" else None)


def test_a_train_job_that_is_deleted_is_gone(kubectl: Clients) -> None:
    one = platform("kubernetes")
    kubectl.says("kubectl", "*get trainjob*", err='Error from server (NotFound): trainjobs.trainer.'
                 'kubeflow.org "digits" not found\n', code=1)  # fmt: skip
    assert one.state(in_kubernetes()).gone
    kubectl.says("kubectl", "*delete trainjob digits*", "")
    one.cancel(in_kubernetes())
    assert one.logs(in_kubernetes()) == "loading\nlast words"
    down = "The connection to the server 10.0.0.1:6443 was refused\n"
    kubectl.says("kubectl", "*", err=down, code=1)
    for call in (one.state, one.cancel):
        with pytest.raises(ClusterError) as told:
            call(in_kubernetes())
        assert told.value.code == "WB-CLUSTER-093"


# -- SkyPilot --------------------------------------------------------------------------------------


def in_sky(submitted_s: float = 0.0) -> Ticket:
    return Ticket("skypilot", "wb-digits-1", "/job", submitted_s)


def queue(*jobs: tuple[int, str]) -> str:
    found = [{"job_id": number, "status": status, "start_at": 5.0} for number, status in jobs]
    return "Fetching job queue for: wb-digits-1\n" + json.dumps({"wb-digits-1": found}, indent=2)


def test_sky_launches_a_cluster_of_the_jobs_own(tmp_path: Path, clients: Clients) -> None:
    clients.says("sky", "--version", "skypilot, version 0.14.1\n")
    clients.says("sky", "launch*", "Submitted sky.launch request: 0123\n")
    one, folder = platform("skypilot"), folder_with(tmp_path, "sky.yaml")
    asked = replace(ONE, secrets=("HF_TOKEN",))
    one.check(folder, asked)
    ticket = one.submit(folder, asked)
    assert clients.calls[-1] == (
        f"sky launch -y -d --async -c {ticket.id} --secret HF_TOKEN sky.yaml"
    )
    assert one.place(ticket) == ["sky", "logs", "--tail", "0", ticket.id]
    clients.says("sky", "down -y --async wb-digits-*", "")
    one.cancel(ticket)


@pytest.mark.parametrize(
    ("jobs", "state", "reason"),
    [
        (queue((1, "RUNNING")), "running", "RUNNING"),
        (queue((1, "FAILED"), (2, "SUCCEEDED")), "finished", "SUCCEEDED"),
        (queue((1, "FAILED_SETUP")), "failed", "FAILED_SETUP"),
        (queue((1, "SETTING_UP")), "pending", "SETTING_UP"),
        (queue((1, "CANCELLED")), "cancelled", "CANCELLED"),
        ("Failed to get the job queue for cluster 'wb-digits-1'.\n{}", "pending", "cluster INIT"),
    ],
)
def test_skys_queue_is_read(jobs: str, state: str, reason: str, clients: Clients) -> None:
    clients.says("sky", "queue wb-digits-1 -o json", jobs)
    clients.says("sky", "status wb-digits-1 -o json", '[{"name": "x", "status": "INIT"}]')
    clients.says("sky", "logs*", log_of("alive"))
    now = platform("skypilot").state(in_sky())
    assert (now.state, now.reason) == (state, reason)


def test_a_cluster_that_is_not_there_yet_waits_and_one_that_is_no_more_is_gone(
    clients: Clients,
) -> None:
    clients.says("sky", "queue*", "{}")
    clients.says("sky", "status*", "[]")
    one = platform("skypilot")
    assert one.state(in_sky(time.time())).state == "pending"
    assert one.state(in_sky()).gone
    clients.says("sky", "*", err="Could not connect to SkyPilot API server\n", code=1)
    with pytest.raises(ClusterError) as told:
        one.state(in_sky())
    assert told.value.code == "WB-CLUSTER-093"
    with pytest.raises(ClusterError) as told:
        one.cancel(in_sky())
    assert told.value.code == "WB-CLUSTER-084"
