"""Jobs in clusters whose client takes a folder or a file: Ray, Kubernetes, SkyPilot."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ClusterError
from ...export.envelopes import legal_name
from ...export.folder import read_job
from .client import (
    COPY_S,
    JobState,
    Said,
    Ticket,
    Word,
    checked_id,
    last_lines,
    must,
    needed,
    parsed,
    plain,
    say,
    stepped_in,
)

if TYPE_CHECKING:
    from ...export.envelopes import Resources

# -- Ray -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ray:
    """`ray job submit`; Ray sends the folder to its nodes.

    Attributes:
        address: Address of the cluster's dashboard; empty: the value of RAY_ADDRESS.
    """

    name = envelope = "ray"
    address: str = ""

    def check(self, folder: Path, resources: Resources) -> None:
        """Raise ClusterError if no cluster answers."""
        read_job(folder)
        needed(folder, "run_ray.py", self.name)
        needed(folder, "ray-env.yaml", self.name)
        must(self._words(self.address, "list"), "Ray's cluster does not answer.",
             "start Ray (`ray start --head`). Or give the address of its head node, with "
             "address='http://HEAD:8265' or in the environment variable RAY_ADDRESS")  # fmt: skip

    def submit(self, folder: Path, resources: Resources) -> Ticket:
        """Submit the job under a name that Workbench chooses."""
        folder = folder.resolve()
        job = f"wb-{legal_name(read_job(folder).name)}-{secrets.token_hex(3)}"
        options = ["--no-wait", "--submission-id", job, "--working-dir", str(folder),
                   "--runtime-env", str(folder / "ray-env.yaml")]  # fmt: skip
        must([*self._words(self.address, "submit"), *options, "--", "python", "run_ray.py"],
             "Ray refused the job.", "solve the problem that Ray reports, then submit again",
             cwd=folder, timeout_s=COPY_S)  # fmt: skip
        return Ticket(self.name, job, str(folder), time.time(), {"address": self.address})

    def _words(self, address: str, what: str) -> list[str]:
        return ["ray", "job", what, *(["--address", address] if address else [])]

    def _ask(self, ticket: Ticket, what: str, *more: str) -> Said:
        words = self._words(ticket.extra.get("address", ""), what)
        return say([*words, "--log-color", "false", *more, ticket.id])

    def state(self, ticket: Ticket) -> JobState:
        """Read `ray job status`."""
        said = self._ask(ticket, "status")
        text = plain(f"{said.out}\n{said.err}")
        status = re.search(r"Status for job '[^']*': (?:JobStatus\.)?(\w+)", text)
        message = re.search(r"Status message: (.*)", text)
        words = f": {message[1][:500]}" if message else ""
        job = re.escape(ticket.id)
        if re.search(rf"Job '{job}' succeeded", text):
            return JobState("finished", "SUCCEEDED")
        if re.search(rf"Job '{job}' was stopped", text):
            return JobState("cancelled", "STOPPED")
        if re.search(rf"Job '{job}' failed", text):
            log = self._ask(ticket, "logs").out
            return JobState("failed", f"FAILED{words}", stepped=stepped_in(log))
        if status:
            state: Word = "running" if status[1] == "RUNNING" else "pending"
            return JobState(state, f"{status[1]}{words}")
        return _lost("Ray", said, gone="does not exist" in text)

    def logs(self, ticket: Ticket, last: int = 200) -> str:
        """Return the output of the driver, which includes the workers' output."""
        log = self._ask(ticket, "logs").out
        return last_lines(re.sub(r"\AJob submission server address: .*\n", "", plain(log)), last)

    def cancel(self, ticket: Ticket) -> None:
        """Stop the job."""
        said = self._ask(ticket, "stop", "--no-wait")
        if said.code and "does not exist" not in said.err + said.out:
            _lost("Ray", said, "did not cancel the job")

    def place(self, ticket: Ticket) -> list[str]:
        """Return the command that prints the job's log line by line."""
        words = self._words(ticket.extra.get("address", ""), "logs")
        return [*words, "--log-color", "false", "--follow", ticket.id]


_LISTS = {"Ray": "ray job list", "Kubernetes": "kubectl get trainjobs", "SkyPilot": "sky status"}


def _lost(
    platform: str, said: Said, what: str = "does not report the job's state", *, gone: bool = False
) -> JobState:
    """Return that the platform does not know the job; ClusterError if the client failed."""
    if gone:
        return JobState("unknown", said.words.splitlines()[-1], gone=True)
    raise ClusterError(
        f"{platform} {what}.",
        seen=said.words,
        next_step=f"make sure that `{_LISTS[platform]}` works in a terminal, then try again",
        code="WB-CLUSTER-093",
    )


# -- Kubernetes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kubernetes:
    """A TrainJob of Kubeflow: `kubectl create -f trainjob.yaml`.

    Attributes:
        context: A context of kubectl's configuration; empty: the current context.
    """

    name, envelope = "kubernetes", "trainjob"
    context: str = ""

    def check(self, folder: Path, resources: Resources) -> None:
        """Let the cluster validate the objects without creating them."""
        read_job(folder)
        needed(folder, "trainjob.yaml", self.name)
        self._create(folder, resources.namespace, "--dry-run=server")

    def _create(self, folder: Path, namespace: str, *more: str) -> str:
        return must(
            [*_kubectl(self.context, namespace), "create", "-f", "trainjob.yaml", "-o", "name",
             *more],
            "Kubernetes refused the job.",
            "if Kubernetes already has a job with this name, give your job another name "
            "(name=...). Or delete the old job: run `kubectl delete -f trainjob.yaml` in the job "
            "folder. If Kubernetes does not know the kind TrainJob, install Kubeflow Trainer",
            cwd=folder,
        )  # fmt: skip

    def submit(self, folder: Path, resources: Resources) -> Ticket:
        """Create the job's objects."""
        folder = folder.resolve()
        needed(folder, "trainjob.yaml", self.name)
        said = self._create(folder, resources.namespace)
        made = re.search(r"^trainjob\.[^/\s]*/(\S+)", said, re.MULTILINE)
        job = checked_id(made[1] if made else "", said)
        extra = {"context": self.context, "namespace": resources.namespace}
        return Ticket(self.name, job, str(folder), time.time(), extra)

    def _ask(self, ticket: Ticket, *words: str) -> Said:
        return say([*_kubectl(ticket.extra["context"], ticket.extra["namespace"]), *words])

    def state(self, ticket: Ticket) -> JobState:
        """Read the job's conditions; if the job waits, read the conditions of its pods."""
        said = self._ask(ticket, "get", "trainjob", ticket.id, "-o", "json")
        found = parsed(said.out)
        if said.code or not isinstance(found, dict):
            return _lost("Kubernetes", said, gone="NotFound" in said.err)
        status = found.get("status") or {}
        told = {
            one.get("type"): f"{one.get('type')} ({one.get('reason')}): {one.get('message', '')}"
            for one in status.get("conditions") or [] if one.get("status") == "True"
        }  # fmt: skip
        if "Complete" in told:
            return JobState("finished", told["Complete"])
        if "Failed" in told:
            log = self._log(ticket, 2000)
            return JobState("failed", told["Failed"], stepped=stepped_in(log))
        if "Suspended" in told:
            return JobState("pending", told["Suspended"])
        pods = self._pods(ticket)
        phases = [str(pod.get("status", {}).get("phase", "")) for pod in pods]
        if pods and all(phase in ("Running", "Succeeded") for phase in phases):
            return JobState("running", "Running")
        return JobState("pending", next(filter(None, map(_waits, pods)), "Pending"))

    def _pods(self, ticket: Ticket) -> list[dict[str, Any]]:
        found = parsed(self._ask(ticket, "get", "pods", "-l", _pods_of(ticket), "-o", "json").out)
        return list(found.get("items") or []) if isinstance(found, dict) else []

    def _log(self, ticket: Ticket, lines: int) -> str:
        return self._ask(ticket, "logs", "-l", _pods_of(ticket, first=True), "-c", "node",
                         f"--tail={lines}").out  # fmt: skip

    def logs(self, ticket: Ticket, last: int = 200) -> str:
        """Return the output of rank 0's pod."""
        return last_lines(self._log(ticket, max(2000, 10 * last)), last)

    def cancel(self, ticket: Ticket) -> None:
        """Delete the TrainJob, which deletes its pods."""
        said = self._ask(ticket, "delete", "trainjob", ticket.id, "--wait=false",
                         "--ignore-not-found")  # fmt: skip
        if said.code:
            _lost("Kubernetes", said, "did not cancel the job")

    def place(self, ticket: Ticket) -> list[str]:
        """Return the command for rank 0's log; it names the pod if the pod exists."""
        said = self._ask(ticket, "get", "pods", "-l", _pods_of(ticket, first=True), "-o", "name")
        pod = said.out.split()[:1] or ["-l", _pods_of(ticket, first=True)]
        words = _kubectl(ticket.extra["context"], ticket.extra["namespace"])
        return [words[0], "logs", "-f", *pod, *words[1:], "-c", "node", "--tail=-1"]


def _kubectl(context: str, namespace: str) -> list[str]:
    return ["kubectl", *(["--context", context] if context else []),
            *(["-n", namespace] if namespace else [])]  # fmt: skip


def _pods_of(ticket: Ticket, *, first: bool = False) -> str:
    """Return the selector of a TrainJob's pods, or of rank 0's pod alone."""
    own = f"jobset.sigs.k8s.io/jobset-name={ticket.id},jobset.sigs.k8s.io/replicatedjob-name=node"
    return own + (",batch.kubernetes.io/job-completion-index=0" if first else "")


def _waits(pod: dict[str, Any]) -> str:
    """Return why a pod does not run, in Kubernetes' words."""
    status = pod.get("status") or {}
    for one in status.get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return f"{one.get('reason')}: {one.get('message', '')}"
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".removesuffix(": ")
    return ""


# -- SkyPilot --------------------------------------------------------------------------------------


_SKY: dict[str, Word] = {
    "SUCCEEDED": "finished", "CANCELLED": "cancelled", "RUNNING": "running",
}  # fmt: skip


@dataclass(frozen=True)
class SkyPilot:
    """A new cluster that `sky launch` starts for the job; Cancel takes it down."""

    name = envelope = "skypilot"

    def check(self, folder: Path, resources: Resources) -> None:
        """Check that the client is there; SkyPilot itself checks what a cloud offers."""
        read_job(folder)
        needed(folder, "sky.yaml", self.name)
        must(
            ["sky", "--version"],
            "SkyPilot's client does not work.",
            "run `sky check` in a terminal",
        )

    def submit(self, folder: Path, resources: Resources) -> Ticket:
        """Request the cluster; the machines start later."""
        folder = folder.resolve()
        job = f"wb-{legal_name(read_job(folder).name)[:20]}-{secrets.token_hex(3)}"
        secret = [word for name in resources.secrets for word in ("--secret", name)]
        must(["sky", "launch", "-y", "-d", "--async", "-c", job, *secret, "sky.yaml"],
             "SkyPilot refused the job.",
             "solve the problem that SkyPilot reports; `sky check` shows which clouds work",
             cwd=folder, timeout_s=COPY_S)  # fmt: skip
        return Ticket(self.name, job, str(folder), time.time())

    def state(self, ticket: Ticket) -> JobState:
        """Read the cluster's queue; before the queue exists, read the cluster's state."""
        queue = _records(say(["sky", "queue", ticket.id, "-o", "json"]).out)
        jobs = queue.get(ticket.id) if isinstance(queue, dict) else None
        if jobs:
            one = max(jobs, key=lambda job: int(job.get("job_id", 0)))
            word, began = str(one.get("status", "")), one.get("start_at")
            state: Word = {
                "SUCCEEDED": "finished",
                "CANCELLED": "cancelled",
                "RUNNING": "running",
            }.get(word, "failed" if word.startswith("FAILED") else "pending")  # type: ignore[assignment]
            log = self._log(ticket, 2000) if state == "failed" else ""
            stepped = stepped_in(log) if state == "failed" else None
            return JobState(state, word, began, stepped=stepped)
        said = say(["sky", "status", ticket.id, "-o", "json"])
        clusters = _records(said.out)
        if not isinstance(clusters, list):
            return _lost("SkyPilot", said)
        if not clusters:  # its request may still run
            fresh = time.time() - ticket.submitted_s < 300.0
            words = f"SkyPilot has no cluster {ticket.id}{' yet' * fresh}"
            return JobState("pending" if fresh else "unknown", words, gone=not fresh)
        return JobState("pending", f"cluster {clusters[0].get('status', '')}")

    def _log(self, ticket: Ticket, lines: int) -> str:
        return say(["sky", "logs", "--no-follow", "--tail", str(lines), ticket.id]).out

    def logs(self, ticket: Ticket, last: int = 200) -> str:
        """Return the output of the job."""
        return last_lines(self._log(ticket, max(2000, 10 * last)), last)

    def cancel(self, ticket: Ticket) -> None:
        """Stop the job's cluster, so that it costs nothing more."""
        must(["sky", "down", "-y", "--async", ticket.id], "SkyPilot did not stop the cluster.",
             f"run `sky down {ticket.id}` in a terminal: the cluster may still cost "
             "money")  # fmt: skip

    def place(self, ticket: Ticket) -> list[str]:
        """Return the command that prints the job's log line by line."""
        return ["sky", "logs", "--tail", "0", ticket.id]


def _records(text: str) -> Any:
    """Return the JSON in sky's output; None if there is no JSON."""
    begin = re.search(r"^[\[{]", text, re.MULTILINE)
    return parsed(text[begin.start() :]) if begin else None
