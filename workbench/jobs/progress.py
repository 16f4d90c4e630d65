"""Reports a job's progress to Kubeflow Trainer, as in KEP-2779: `kubectl get trainjob` shows it.

https://github.com/kubeflow/trainer/tree/master/docs/proposals/2779-trainjob-progress. If the
feature gate TrainJobStatus is on, Trainer sets three variables in a TrainJob's pods: the address
for reports, a file with the pod's token, and a file with the server's certificate. Both files
change while a job runs, so they are read for each report. An error adds a note but does not end the
run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from ..errors import RunError, WorkbenchError
from ..history.analysis.series import metrics_of
from ..shared.events import OVER

if TYPE_CHECKING:
    from ..history.snapshot import Snapshot

URL, TOKEN, CA = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "TOKEN", "CA_CERT"))
PAUSE_S = 5.0
"""Shortest time between two reports, as Kubeflow's guide asks."""
LONGEST_PAUSE_S = 80.0
"""Each failed report doubles the pause, up to this limit."""
ANSWER_S = 5.0
LAST_TRIES = 2
METRICS = 256
"""Limits of Trainer 2.3's TrainJob: number of metrics, and letters of a name or value."""
LETTERS = 64
_INT32 = 2**31 - 1
_ANSWER_BYTES = 1 << 16

log = logging.getLogger("workbench.jobs")


class Followed(Protocol):
    """The methods of a run that reports use."""

    over: threading.Event

    def snapshot(self) -> Snapshot:
        """Return the run at this moment."""

    def note(self, text: str) -> None:
        """Add a note for the user."""


@dataclass(frozen=True)
class Since:
    """The start of a rate's measurement; a resumed run does not begin at step 0."""

    step: int = 0
    elapsed_s: float = 0.0


def status_of(
    snapshot: Snapshot, since: Since = Since(), now: datetime | None = None
) -> dict[str, Any]:
    """Return the body of a report about a run to Kubeflow.

    Args:
        since: An earlier moment of the run, for the estimate of the remaining time.
        now: The time of the snapshot; by default now.
    """
    status: dict[str, Any] = {}
    step, total, over = snapshot.step, snapshot.total_steps, snapshot.state in OVER
    if snapshot.state == "finished":
        status["progressPercentage"] = 100
    elif total:
        status["progressPercentage"] = min(100, max(0, 100 * step // total))
    if over:
        status["estimatedRemainingSeconds"] = 0
    elif total and step > since.step and math.isfinite(snapshot.elapsed_s):
        step_s = max(0.0, snapshot.elapsed_s - since.elapsed_s) / (step - since.step)
        status["estimatedRemainingSeconds"] = min(_INT32, round(step_s * max(0, total - step)))
    metrics = [
        {"name": name[:LETTERS], "value": value[:LETTERS]} for name, value in _metrics(snapshot)
    ]
    if metrics:
        status["metrics"] = metrics[:METRICS]
    moment = now or datetime.now(timezone.utc)
    status["lastUpdatedTime"] = moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"trainerStatus": status}


def _metrics(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield names and values, each name once; values that were not measured are left out."""
    numbers: dict[str, float] = {
        "loss": snapshot.loss,
        "samples_per_s": snapshot.samples_per_s,
        "compute_share": snapshot.compute_share,
    }
    for name, value in metrics_of(snapshot.evals[-1]) if snapshot.evals else ():
        numbers[f"eval_{name}"] = value
    for name, curve in snapshot.logged.items():
        if len(curve):
            numbers[f"log_{name}"] = float(curve.mean[-1])
    counts = {"currentStep": snapshot.step, "currentEpoch": snapshot.epoch}
    if snapshot.total_steps:
        counts["totalSteps"] = snapshot.total_steps
    yield "state", snapshot.state
    for name, count in counts.items():
        yield name, str(count)
    for name, number in numbers.items():
        if math.isfinite(number):
            yield name, f"{number:.6g}"


class KubeflowProgress:
    """Reports a run to Kubeflow Trainer on a separate thread.

    Args:
        url: Address of the TrainJob's status at Trainer's server; https.
        token: A file with the token, or the token.
        ca: A file with the certificate authority of the server.
    """

    def __init__(self, url: str, token: str, ca: str, *, pause_s: float = PAUSE_S) -> None:
        self._url, self._token, self._ca, self._pause_s = url, token, ca, pause_s
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None
        self._told: tuple[int, str] | None = None  # step and state of the latest report
        self._since: Since | None = None
        self._noted = False

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None
    ) -> KubeflowProgress | None:
        """Return a reporter in a TrainJob's pod; None elsewhere."""
        found = os.environ if environment is None else environment
        url, token, ca = (found.get(name, "").strip() for name in (URL, TOKEN, CA))
        return cls(url, token, ca) if url and token and ca else None

    def follow(self, run: Followed) -> None:
        """Report one run until it is over; returns at once."""
        self._thread = threading.Thread(
            target=self._main, args=(run,), name="workbench-kubeflow", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Send the last report and end; the run can be over or not."""
        self._leave.set()
        if self._thread is not None:
            self._thread.join((LAST_TRIES + 1) * ANSWER_S)

    def _main(self, run: Followed) -> None:
        pause_s = self._pause_s
        while not self._is_time_to_end(run, pause_s):
            sent = self._report(run)
            pause_s = self._pause_s if sent else min(2 * pause_s, LONGEST_PAUSE_S)
        for _ in range(LAST_TRIES):
            if self._report(run):
                break

    def _is_time_to_end(self, run: Followed, pause_s: float) -> bool:
        # One wait for two events: the reporter is rarely ended before the run.
        return any(self._leave.is_set() or run.over.wait(pause_s / 10) for _ in range(10))

    def _report(self, run: Followed) -> bool:
        """Report a run if something is new; return whether the server has the report."""
        try:
            snapshot = run.snapshot()
            found = (snapshot.step, snapshot.state)
            if found != self._told:
                self._post(status_of(snapshot, self._since or Since(snapshot.step)))
                self._told = found
            if self._since is not None and snapshot.step < self._since.step:
                self._since = None  # the run went back
            if self._since is None and snapshot.step and math.isfinite(snapshot.elapsed_s):
                self._since = Since(snapshot.step, snapshot.elapsed_s)
        except Exception as error:  # whatever the error is, the run continues
            self._note(run, error)
            return False
        return True

    def _post(self, status: dict[str, Any]) -> None:
        if urlsplit(self._url).scheme != "https":
            raise RunError(
                f"The address in the variable {URL} is not an https address, so Workbench does "
                "not send the secret token to it.",
                code="WB-RUN-123",
            )
        request = urllib.request.Request(
            self._url,
            data=json.dumps(status, separators=(",", ":")).encode(),
            headers={
                "Authorization": f"Bearer {self._read_token()}",
                "Content-Type": "application/json",
            },
        )
        context = ssl.create_default_context(cafile=self._ca)
        # No proxy, because the server is a service of the cluster. No redirect, so that no other
        # server gets the token.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=context),
            _Straight(),
        )
        try:
            with opener.open(request, timeout=ANSWER_S) as answer:
                answer.read(_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                words = _message(error.read(_ANSWER_BYTES)) or error.reason
            raise RunError(
                f"Kubeflow's server answers {error.code}: {words}", code="WB-RUN-124"
            ) from None

    def _read_token(self) -> str:
        """Return the current token; the kubelet writes new tokens to its file."""
        if "/" not in self._token and not Path(self._token).is_file():
            return self._token
        token = Path(self._token).read_text().strip()
        if not token or not token.isprintable():
            raise RunError(f"The token file {self._token} is empty or damaged.", code="WB-RUN-125")
        return token

    def _note(self, run: Followed, error: Exception) -> None:
        """Add one note that reports do not work."""
        if self._noted:
            return
        self._noted = True
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        said = error.what if isinstance(error, WorkbenchError) else str(reason)
        words = (
            f"This run's progress is not reported to Kubeflow: {said[:300] or type(error).__name__}"
        )
        try:
            run.note(words)
        except Exception:  # a full disk must not end the thread either
            log.exception("%s", words)


class _Straight(urllib.request.HTTPRedirectHandler):
    """Follows no redirect."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return None, so that the redirect becomes an error."""


def _message(answer: bytes) -> str:
    """Return the message of a Kubernetes `Status`; empty for another body."""
    try:
        return str(json.loads(answer)["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return ""
