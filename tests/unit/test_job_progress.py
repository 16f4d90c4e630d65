"""What Kubeflow is told of a job, by a server of the test's own behind a certificate of its own."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fake_run import empty_snapshot, fake_snapshot

from workbench.jobs import progress
from workbench.jobs.progress import CA, TOKEN, URL, KubeflowProgress, Since, status_of

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/me/trainjobs/mine/status"
START = Since()
NOW = datetime(2026, 1, 23, 11, 30, 45, tzinfo=timezone(timedelta(hours=1)))


# -- what is said ----------------------------------------------------------------------------------


def told(snapshot, since=START):
    """Return the status, checked against what the TrainJob's schema of Trainer 2.3 allows."""
    body = status_of(snapshot, since, NOW)
    assert set(body) == {"trainerStatus"}
    status = body["trainerStatus"]
    assert set(status) <= {
        "progressPercentage", "estimatedRemainingSeconds", "metrics", "lastUpdatedTime",
    }  # fmt: skip
    assert status["lastUpdatedTime"] == "2026-01-23T10:30:45Z", "without it all is refused"
    for name in ("progressPercentage", "estimatedRemainingSeconds"):
        if name in status:
            assert type(status[name]) is int
            assert 0 <= status[name] < 2**31
    assert len(status["metrics"]) <= 256
    for metric in status["metrics"]:
        assert set(metric) == {"name", "value"}
        assert all(isinstance(text, str) and 1 <= len(text) <= 64 for text in metric.values())
    return status


def values(status):
    return {one["name"]: one["value"] for one in status["metrics"]}


def test_a_run_under_way_is_told_in_kubeflows_words():
    shot = replace(fake_snapshot(step=90, logged=True), total_steps=200, elapsed_s=45.0, loss=0.25)
    status = told(shot)
    assert status["progressPercentage"] == 45
    assert status["estimatedRemainingSeconds"] == 55
    found = values(status)
    assert found["loss"] == "0.25"
    assert (found["currentStep"], found["totalSteps"], found["state"]) == ("90", "200", "running")
    assert float(found["eval_accuracy"]) == pytest.approx(shot.evals[-1]["accuracy"], rel=1e-5)
    assert "log_lr" in found


def test_a_resumed_runs_time_is_that_of_its_own_steps():
    shot = replace(fake_snapshot(step=150), total_steps=200, elapsed_s=20.0)
    assert told(shot, Since(100, 10.0))["estimatedRemainingSeconds"] == 10
    assert "estimatedRemainingSeconds" not in told(shot, Since(150, 20.0))


def test_what_is_not_known_is_left_out():
    status = told(empty_snapshot())
    assert set(status) == {"metrics", "lastUpdatedTime"}
    assert values(status) == {"state": "starting", "currentStep": "0", "currentEpoch": "0"}


@pytest.mark.parametrize(("state", "percent"), [("finished", 100), ("stopped", 45), ("failed", 45)])
def test_a_run_that_is_over_has_no_time_left(state, percent):
    status = told(replace(fake_snapshot(step=90, state=state), total_steps=200))
    assert status["progressPercentage"] == percent
    assert status["estimatedRemainingSeconds"] == 0


def test_nothing_is_larger_than_a_trainjob_holds():
    shot = fake_snapshot(step=90, logged=True)
    curve = shot.logged["lr"]
    shot = replace(
        shot, total_steps=2**40, elapsed_s=1e9, evals=[],
        logged={f"{i} {'x' * 90}": curve for i in range(400)},
    )  # fmt: skip
    status = told(shot)
    assert len(status["metrics"]) == 256
    assert status["estimatedRemainingSeconds"] == 2**31 - 1


# -- how it is said --------------------------------------------------------------------------------


class Server:
    """Kubeflow Trainer's status server, as far as a job sees it."""

    def __init__(self, key, certificate):
        self.reports, self.tokens, self.paths = [], [], []
        self.answers = []
        """Statuses of coming answers; 200 when there is none."""
        self.heard = threading.Condition()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with outer.heard:
                    outer.paths.append(self.path)
                    outer.tokens.append(self.headers["Authorization"])
                    outer.reports.append(json.loads(body)["trainerStatus"])
                    assert self.headers["Content-Type"] == "application/json"
                    code = outer.answers.pop(0) if outer.answers else 200
                    outer.heard.notify_all()
                words = {"kind": "Status", "message": "Forbidden", "code": code}
                answer = body if code == 200 else json.dumps(words).encode()
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", outer.url)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # a client that does not trust it hangs up
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://localhost:{self.server.server_address[1]}{PATH}"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self.thread.start()

    def wait(self, count):
        """Wait until so many reports have come."""
        with self.heard:
            assert self.heard.wait_for(lambda: len(self.reports) >= count, 30)

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A key with its certificate, and the certificate of somebody else."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "other"):
        _certify(folder, name)
    return folder


def _certify(folder, name):
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        if shutil.which("openssl") is None:
            pytest.skip("neither cryptography nor openssl is installed")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
             "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
             "-keyout", f"{name}.key", "-out", f"{name}.crt"],
            cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
        return
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    today = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - timedelta(days=1))
        .not_valid_after(today + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(pem))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(pem, plain, serialization.NoEncryption())
    )


@pytest.fixture
def server(keys):
    server = Server(keys / "ours.key", keys / "ours.crt")
    yield server
    server.close()


class FakeRun:
    """A run that is where the test says."""

    def __init__(self):
        self.over, self.notes, self.breaks = threading.Event(), [], None
        self.shot = replace(fake_snapshot(step=10), total_steps=100)
        self.noted = threading.Event()

    def snapshot(self):
        if self.breaks is not None:
            raise self.breaks
        return self.shot

    def note(self, text):
        self.notes.append(text)
        self.noted.set()

    def go(self, step):
        self.shot = replace(fake_snapshot(step=step), total_steps=100)

    def finish(self):
        self.shot = replace(fake_snapshot(step=100, state="finished"), total_steps=100)
        self.over.set()


@pytest.fixture
def run():
    return FakeRun()


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_text("first\n")
    return path


@pytest.fixture
def begin(run, token, keys):
    """Start to follow the run; ended after the test."""
    begun = []

    def begin(url, token=token, ca=keys / "ours.crt"):
        one = KubeflowProgress(url, str(token), str(ca), pause_s=0.02)
        begun.append(one)
        one.follow(run)
        return one

    yield begin
    for one in begun:
        one.close()


def percents(server):
    return [one["progressPercentage"] for one in server.reports]


def test_a_run_is_told_to_its_end(server, run, begin):
    follower = begin(server.url)
    server.wait(1)
    run.go(50)
    server.wait(2)
    run.finish()
    follower.close()
    assert percents(server) == [10, 50, 100]
    assert values(server.reports[-1])["state"] == "finished"
    assert set(server.tokens) == {"Bearer first"}
    assert set(server.paths) == {PATH}
    assert run.notes == []


def test_what_is_not_new_is_not_told_again(server, run, begin):
    asked = threading.Semaphore(0)
    snapshot = run.snapshot
    run.snapshot = lambda: (asked.release(), snapshot())[1]
    begin(server.url)
    for _ in range(5):
        assert asked.acquire(timeout=30)
    assert percents(server) == [10]


def test_reports_come_no_more_often_than_kubeflow_asks_for():
    found = KubeflowProgress.from_environment({URL: "https://a", TOKEN: "/t", CA: "/c"})
    assert found._pause_s == progress.PAUSE_S == 5.0


def test_a_token_that_changes_is_read_again(server, run, begin, token):
    begin(server.url)
    server.wait(1)
    token.write_text("second")
    run.go(50)
    server.wait(2)
    assert server.tokens == ["Bearer first", "Bearer second"]


def test_a_token_may_be_given_itself(server, begin):
    begin(server.url, token="it.self")
    server.wait(1)
    assert server.tokens == ["Bearer it.self"]


def test_a_refusal_costs_one_note_and_is_tried_again(server, run, begin):
    server.answers = [401, 403, 500]
    follower = begin(server.url)
    server.wait(4)
    run.finish()
    follower.close()
    (note,) = run.notes
    assert "401" in note
    assert "Forbidden" in note, "what the server says"
    assert "first" not in note, "the token"
    assert percents(server) == [10, 10, 10, 10, 100]


def test_the_last_report_is_tried_twice(server, run, begin):
    follower = begin(server.url)
    server.wait(1)
    server.answers = [500]
    run.finish()
    follower.close()
    assert percents(server) == [10, 100, 100]


def test_a_redirect_is_not_followed(server, run, begin):
    server.answers = [302]
    begin(server.url)
    assert run.noted.wait(30)
    assert "302" in run.notes[0]


def test_a_server_that_another_authority_signed_gets_no_token(server, run, begin, keys):
    follower = begin(server.url, ca=keys / "other.crt")
    assert run.noted.wait(30)
    run.finish()
    follower.close()
    (note,) = run.notes
    assert "certificate" in note.lower()
    assert server.tokens == []


def test_an_address_without_tls_gets_no_token(run, begin, server):
    begin(server.url.replace("https:", "http:"))
    assert run.noted.wait(30)
    assert "https" in run.notes[0]
    assert server.tokens == []


def test_a_server_that_is_away_does_not_hold_up_the_end(run, begin, keys):
    gone = Server(keys / "ours.key", keys / "ours.crt")
    gone.close()
    follower = begin(gone.url)
    assert run.noted.wait(30)
    run.finish()
    follower.close()
    assert not follower._thread.is_alive()
    assert len(run.notes) == 1


@pytest.mark.parametrize("what", ["token", "ca"])
def test_files_that_are_missing_or_empty_cost_a_note(server, run, begin, tmp_path, what):
    (tmp_path / "empty").touch()
    given = {"token": tmp_path / "empty"} if what == "token" else {"ca": tmp_path / "none"}
    begin(server.url, **given)
    assert run.noted.wait(30)
    assert server.reports == []


def test_a_run_that_cannot_be_looked_at_goes_on(server, run, begin):
    run.breaks = RuntimeError("broken")
    begin(server.url)
    assert run.noted.wait(30)
    run.breaks = None
    server.wait(1)
    assert percents(server) == [10]


def test_only_a_trainjobs_pod_reports(monkeypatch):
    whole = {URL: "https://a", TOKEN: "/t", CA: "/c"}
    assert KubeflowProgress.from_environment(whole) is not None
    for name in whole:
        assert KubeflowProgress.from_environment({**whole, name: ""}) is None
        monkeypatch.delenv(name, raising=False)
    assert KubeflowProgress.from_environment() is None
