"""What a job's script calls: this process joins the run that `run.json` describes.

Torchrun, a scheduler or the user has started the processes; the environment says which of them this
is. Rank 0 starts one process more, the conductor, which is to the job what a notebook's kernel is
to its engines: it hands out the parts, keeps the records, and agrees on a Stop.

    rank 0 ── starts ──> conductor ── parts for all ──> rank 0
       ^                     ^                            │
       │ who, where          │ records, outcomes          │ each rank's part
    rank 1, 2, ... ──────────┴────────────────────────────┘

The ranks meet in the store of torchrun's agent, or, where TF_CONFIG is set, at the first address in
it, before TensorFlow listens there. From then on everything is as on an engine of a notebook.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import json
import linecache
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

import psutil

from ..devices.discovery import survey
from ..devices.leases import cpu_count
from ..errors import ClusterError, PlanError, RunError, WorkbenchError
from ..shared import cluster_env
from ..shared.messages import Asked, CellEnded, CellOutcome
from .debugging.marks import machinery
from .interrupt import InterruptWatch
from .runtime import Engine, run_cell, support
from .telemetry.control_link import ControlLink

machinery(__name__)
FORMAT = "workbench-job/1"
DESCRIPTION = "run.json"
KEY = "WORKBENCH_JOB_KEY"
"""Proves, where TF_CONFIG is set, that processes belong to the same job; equal in all of them."""
CONDUCTOR = "workbench.jobs.conductor"
MEET_S = 300.0
"""How long processes wait for each other: some still install or import."""
CONDUCT_S = 60.0
SETTLE_S = 30.0
"""How long rank 0 waits at the end for the conductor, which waits for the other ranks."""
MOST_LOG_BYTES = 16 << 20

About = dict[str, Any]
"""What a process says of itself, and what it is answered: plain data."""


@dataclass(frozen=True)
class Surroundings:
    """Which process of a job this is, as its environment says.

    Attributes:
        rank, world_size: Among all processes of the job, servers included.
        store: Host and port of the store in which PyTorch's processes meet; None: there is none.
        has_agent: Whether torchrun's agent hosts it; else rank 0 does.
        attempt: How often torchrun has begun again.
        addresses: Of TF_CONFIG, in the order of the ranks; empty without it.
    """

    rank: int = 0
    world_size: int = 1
    store: tuple[str, int] | None = None
    has_agent: bool = False
    attempt: int = 0
    addresses: tuple[str, ...] = ()

    @staticmethod
    def found(environ: Mapping[str, str] = os.environ) -> Surroundings:
        """Return what the environment says.

        Raises:
            PlanError: It contradicts itself, or is not whole.
        """
        if environ.get("TF_CONFIG"):
            return _of_tensorflow(environ["TF_CONFIG"])
        if "RANK" not in environ:
            return Surroundings()
        try:
            rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
            store = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
            attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
            if not 0 <= rank < world_size:
                raise ValueError(f"RANK={rank} of WORLD_SIZE={world_size}")
        except (KeyError, ValueError) as error:
            raise PlanError(
                "The environment names a rank, but not the whole of torchrun's variables.",
                seen=str(error),
                allowed="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them",
                next_step="start it with torchrun, or unset RANK to run it in one process",
                code="WB-PLAN-800",
            ) from None
        has_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Surroundings(rank, world_size, store, has_agent, attempt)


def _of_tensorflow(text: str) -> Surroundings:
    """Return what TF_CONFIG says: the chief first, then workers, then parameter servers."""
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        order = [
            (kind, i)
            for kind in ("chief", "worker", "ps")
            for i in range(len(cluster.get(kind, ())))
        ]
        rank = order.index((task["type"], int(task["index"])))
        addresses = tuple(str(cluster[kind][i]) for kind, i in order)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(
            "TF_CONFIG was not understood.",
            seen=f"{text[:200]} ({type(error).__name__}: {error})",
            allowed='{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", '
            '"index": 0}}',
            next_step="unset TF_CONFIG to run in one process",
            code="WB-PLAN-801",
        ) from None
    return Surroundings(rank, len(addresses), addresses=addresses)


# -- how the processes meet ------------------------------------------------------------------------


class Meeting(Protocol):
    """Where the processes of a job meet once: all speak, rank 0 answers each."""

    def gather(self, about: About) -> list[About]:
        """On rank 0: what every process says of itself, in the order of the ranks."""

    def hand_out(self, answers: Sequence[About]) -> None:
        """On rank 0: answer each of them."""

    def ask(self, about: About) -> About:
        """On the others: say it, and return the answer."""


class Alone:
    """A job of one process."""

    def gather(self, about: About) -> list[About]:
        """Return this process's words alone."""
        return [about]

    def hand_out(self, answers: Sequence[About]) -> None:
        """Do nothing: nobody else is there."""

    def ask(self, about: About) -> About:
        """Never called: a single process is rank 0."""
        raise AssertionError("a single process asks nobody")


class InStore:
    """PyTorch's processes meet in the store that torchrun's agent hosts, or rank 0.

    torch is imported by name; rank 0's own store lives as long as this object.
    """

    def __init__(self, where: Surroundings) -> None:
        assert where.store is not None
        dist = importlib.import_module("torch.distributed")
        host, port = where.store
        self._where = where
        hosts_it = where.rank == 0 and not where.has_agent
        listening = {}
        if hosts_it and _is_loopback(host):  # torch's own would listen on every interface
            listening["master_listen_fd"] = cluster_env.listening(host, (port, port)).detach()
        try:
            self._store = dist.TCPStore(
                host, port, is_master=hosts_it, wait_for_workers=False,
                timeout=timedelta(seconds=MEET_S), **listening,
            )  # fmt: skip
        except (OSError, RuntimeError, ValueError) as error:
            raise _no_meeting(f"{host}:{port}: {error}") from error
        self._ours = dist.PrefixStore(f"workbench/{where.attempt}/", self._store)

    def gather(self, about: About) -> list[About]:
        """Return what every process says of itself."""
        self._ours.set("about/0", json.dumps(about))
        return [self._read(f"about/{rank}") for rank in range(self._where.world_size)]

    def hand_out(self, answers: Sequence[About]) -> None:
        """Answer each process."""
        for rank, answer in enumerate(answers):
            self._ours.set(f"answer/{rank}", json.dumps(answer))

    def ask(self, about: About) -> About:
        """Say it, and wait for the answer."""
        self._ours.set(f"about/{self._where.rank}", json.dumps(about))
        return self._read(f"answer/{self._where.rank}")

    def _read(self, key: str) -> About:
        try:
            found: About = json.loads(self._ours.get(key))
        except RuntimeError as error:
            who = f"rank {key.rpartition('/')[2]}" if key.startswith("about") else "rank 0"
            raise _no_meeting(f"nothing from {who} within {MEET_S:g} s ({error})") from error
        return found


class AtFirstAddress:
    """Processes of TF_CONFIG meet at the first address in it, before TensorFlow listens there.

    Each message is a line of JSON and its HMAC under the job's key, so nobody else is listened to.
    """

    def __init__(self, where: Surroundings, key: bytes) -> None:
        self._where, self._key = where, key
        host, _, port = where.addresses[0].rpartition(":")
        self._place = host, int(port)
        self._connections: dict[int, socket.socket] = {}

    def gather(self, about: About) -> list[About]:
        """Return what every process says of itself."""
        found = {0: about}
        host, port = self._place
        with cluster_env.listening(socket.gethostbyname(host), (port, port)) as listener:
            end = time.monotonic() + MEET_S
            while len(found) < self._where.world_size:
                missing = sorted(set(range(self._where.world_size)) - set(found))
                listener.settimeout(max(0.01, end - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    raise _no_meeting(f"nothing from ranks {missing}") from None
                connection.settimeout(10.0)
                said = self._receive(connection)
                rank = -1 if said is None else int(said.get("rank", -1))
                if said is None or rank not in missing:  # not one of ours
                    connection.close()
                    continue
                found[rank], self._connections[rank] = said, connection
        return [found[rank] for rank in range(self._where.world_size)]

    def hand_out(self, answers: Sequence[About]) -> None:
        """Answer each process, and let go of it."""
        for rank, connection in self._connections.items():
            with connection, contextlib.suppress(OSError):
                connection.settimeout(10.0)
                connection.sendall(self._packed(answers[rank]))
                connection.recv(1)  # they close first, so that the port is free for TensorFlow
        self._connections.clear()

    def ask(self, about: About) -> About:
        """Say it, and wait for the answer."""
        end, why = time.monotonic() + MEET_S, ""
        while time.monotonic() < end:
            try:
                with socket.create_connection(self._place, 5.0) as connection:
                    connection.settimeout(MEET_S)
                    connection.sendall(self._packed(about))
                    answer = self._receive(connection)
                if answer is not None:
                    return answer
                why = f"its answer is not signed with {KEY}"
            except OSError as error:
                why = str(error)
            time.sleep(0.1)
        raise _no_meeting(f"{self._where.addresses[0]}: {why}")

    def _packed(self, content: About) -> bytes:
        line = json.dumps(content).encode()
        return hmac.digest(self._key, line, "sha256").hex().encode() + b" " + line + b"\n"

    def _receive(self, connection: socket.socket) -> About | None:
        """Return what somebody sent; None where it is not signed with our key."""
        received = bytearray()
        with contextlib.suppress(OSError):
            while not received.endswith(b"\n") and len(received) < 8 << 20:
                part = connection.recv(1 << 16)
                if not part:
                    break
                received += part
        proof, _, line = bytes(received).rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(proof, hmac.digest(self._key, line, "sha256").hex().encode()):
            return None
        found: About = json.loads(line)
        return found


def _meeting(where: Surroundings) -> Meeting:
    if where.world_size == 1:
        return Alone()
    if not where.addresses:
        return InStore(where)
    key = os.environ.get(KEY, "")
    if len(key) < 16:
        raise PlanError(
            f"Several TensorFlow processes meet over the network, and {KEY} is not set: it proves "
            "that they belong to one job.",
            seen=f"{len(key)} characters" if key else "nothing",
            allowed="the same 16 characters or more in each process",
            next_step=f"export {KEY}=$(python -c 'import secrets; print(secrets.token_hex(16))') "
            "once, and hand it to all of them; `workbench run DIR` does so by itself",
            code="WB-PLAN-802",
        )
    return AtFirstAddress(where, key.encode())


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _no_meeting(seen: str) -> ClusterError:
    return ClusterError(
        "The job's processes did not find each other.",
        seen=seen,
        allowed=f"all processes of the job within {MEET_S:g} s",
        next_step="look at the logs of the other processes: one of them may have failed before; "
        "between hosts, the port must be open",
        code="WB-CLUSTER-800",
    )


# -- the conductor ---------------------------------------------------------------------------------


class Conductor:
    """The process beside rank 0 that keeps the job's records; it ends when the job has ended."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._file = ours.makefile("rwb")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", CONDUCTOR, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # what ends the ranks must leave it time to say so
            )

    def conduct(self, job: About, abouts: Sequence[About]) -> list[About]:
        """Have it begin; return what each process is told.

        Raises:
            WorkbenchError: The job cannot begin; the conductor's own words.
        """
        self._socket.settimeout(CONDUCT_S)
        answer: About = {}
        with contextlib.suppress(OSError, ValueError):
            self._file.write(json.dumps({**job, "processes": list(abouts)}).encode() + b"\n")
            self._file.flush()
            answer = json.loads(self._file.readline() or b"{}")
        self._socket.settimeout(None)
        if "error" in answer:
            raise PlanError(str(answer["error"]), code="WB-PLAN-803")
        if "parts" not in answer:
            status = self._process.poll()
            raise ClusterError(
                "The process that keeps the job's records did not start.",
                seen=f"exit status {status}" if status is not None else f"no word in {CONDUCT_S} s",
                next_step="its own words are above; is the installation whole there?",
                code="WB-CLUSTER-801",
            )
        parts: list[About] = answer["parts"]
        return parts

    def settle(self) -> None:
        """Wait until it has written how the job ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SETTLE_S)
        self._file.close()
        self._socket.close()


# -- this process ----------------------------------------------------------------------------------


_OURS = str(Path(__file__).parents[1]) + os.sep


class Script:
    """The job's script as the shell that runs the cell (`runtime.Shell`).

    Attributes:
        namespace: That of `__main__`, so that what the script defines can be pickled.
    """

    def __init__(self, path: str) -> None:
        self.namespace: dict[str, Any] = vars(sys.modules["__main__"])
        self._path = path

    def execute(self, source: str, number: int) -> BaseException | None:
        """Run the script; what it raises is printed from the script's own lines on."""
        lines = source.splitlines(keepends=True)
        linecache.cache[self._path] = (len(source), None, lines, self._path)
        try:
            exec(compile(source, self._path, "exec"), self.namespace)
        except SystemExit as left:
            if left.code in (None, 0):
                return None
            return RunError(f"The script ended by sys.exit({left.code!r}).", code="WB-RUN-800")
        except BaseException as error:
            if type(error).__name__ != "RunStopped":
                self._print(error)
            return error
        return None

    def _print(self, error: BaseException) -> None:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != self._path:
            trace = trace.tb_next
        told = traceback.TracebackException(type(error), error, trace or error.__traceback__)
        told.stack = traceback.StackSummary.from_list(
            [frame for frame in told.stack if not frame.filename.startswith(_OURS)]
        )
        sys.stderr.write("".join(told.format()))
        sys.stderr.flush()


class _Tee:
    """Writes what is printed also into the run's log, up to a limit."""

    def __init__(self, stream: IO[str], file: IO[str]) -> None:
        self._stream, self._file, self._left = stream, file, MOST_LOG_BYTES

    def write(self, text: str) -> int:
        if self._left > 0:
            self._left -= len(text)
            with contextlib.suppress(OSError, ValueError):  # a full disk
                self._file.write(text if self._left > 0 else f"{text}\n[the log ends here]\n")
                self._file.flush()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _logged(path: Path | None) -> Iterator[None]:
    """Keep what this rank prints in a file of the run."""
    if path is None:
        yield
        return
    before = sys.stdout, sys.stderr
    try:
        file = path.open("a", encoding="utf-8", errors="backslashreplace")
    except OSError:
        yield
        return
    with file:
        sys.stdout, sys.stderr = _Tee(before[0], file), _Tee(before[1], file)  # type: ignore[assignment]
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


_running = False


def run_job(script: str | os.PathLike[str]) -> None:
    """Join the run that `run.json` beside the script describes, and end with it.

    The script calls this first. It is then executed once more, as the cell of the run, by which
    time this call returns at once; when it has ended, so does this process.

    Args:
        script: `__file__`.

    Raises:
        PlanError: There is no `run.json`, it is none of ours, or the processes are not as many as
            it asks for.
        SystemExit: Always at the end: 0 where all went well, else 1.
    """
    if _running:
        return
    path = Path(script).resolve()
    _end(_guarded(lambda: _take_part(path, _described(path.parent))))


def record_script(script: str | os.PathLike[str], args: Sequence[str], out: str = "") -> NoReturn:
    """Run any training script and record its steps, with no change of its code.

    Args:
        args: The script's arguments.
        out: Folder for the records; by default `workbench-runs/NAME` below the working directory.
    """
    path = Path(script).resolve()
    sys.argv = [str(script), *args]
    sys.path[0] = str(path.parent)
    vars(sys.modules["__main__"])["__file__"] = str(path)
    where = Path(out or Path("workbench-runs") / path.stem).absolute()
    _end(_guarded(lambda: _take_part(path, {"script": path.name, "out": str(where)})))


def _guarded(run: Callable[[], bool]) -> bool:
    try:
        return run()
    except WorkbenchError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return False


def _end(well: bool) -> NoReturn:
    """Leave: what a framework still holds must not keep the process, or change how it ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(0 if well else 1)


def _described(folder: Path) -> About:
    """Return what a job's `run.json` says.

    Raises:
        PlanError: It is not there, or not a job's.
    """
    path = folder / DESCRIPTION
    try:
        found = json.loads(path.read_text())
        version = found["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"There is no job beside the script: {DESCRIPTION} cannot be read.",
            seen=f"{path}: {type(error).__name__}: {error}",
            allowed="the folder as run.to_job(DIR) wrote it",
            next_step="write it anew: run.to_job(DIR)",
            code="WB-PLAN-804",
        ) from error
    if version != FORMAT:
        raise PlanError(
            "The job was written by another version of Workbench.",
            seen=version,
            allowed=FORMAT,
            next_step="install the wheel that lies in the job's folder",
            code="WB-PLAN-805",
        )
    return {"folder": str(folder), **found}


def _take_part(path: Path, job: About) -> bool:
    """Be one process of the job, from the meeting to its end; return whether all went well."""
    global _running
    where = Surroundings.found()
    os.environ.pop("TF_CONFIG", None)  # TensorFlow is told by the strategy, for the time of the run
    if (wanted := job.get("launch", {}).get("processes", where.world_size)) != where.world_size:
        raise PlanError(
            "The job needs another number of processes.",
            seen=f"{where.world_size} processes",
            allowed=f"{wanted}: {_launch_words(job['launch'])}",
            next_step=f"torchrun --standalone --nproc-per-node {wanted} {path.name}",
            code="WB-PLAN-806",
        )
    conductor = Conductor() if where.rank == 0 else None
    part = _meet(where, job, conductor)
    if "error" in part:
        raise PlanError(str(part["error"]), code="WB-PLAN-807")
    source = path.read_text(encoding="utf-8")
    request = {**part["request"], "source": source}
    spec = request["spec"]
    _running = True
    watch = InterruptWatch(lambda harder: support(engine.framework).break_collectives(store=harder))
    link = ControlLink(
        where.rank, part["url"], bytes.fromhex(part["key"]), part["about"],
        kernel_key=part["curve"],
    )  # fmt: skip
    engine = Engine(where.rank, link, watch, framework=spec["framework"])
    watch.on_terminate = lambda: link.say(Asked(engine=where.rank, why="SIGTERM"))
    # An interrupt is meant for the cell; what comes before or after it finds nothing to end.
    before = signal.signal(signal.SIGTERM, _heard), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        folder = Path(part["run_dir"])
        is_shared = _is_there(folder, part["token"])
        spec["run_dir"] = str(folder) if is_shared else ""
        with _logged(folder / f"log-rank{where.rank}.txt" if is_shared else None):
            outcome = run_cell(engine, _shell(path, part), request)
            _tell(outcome)
        link.say(CellEnded(engine=where.rank, outcome=outcome))
        link.flush(10.0)
        if conductor is not None:
            conductor.settle()
        return outcome.is_well
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
        link.close()
        watch.close()


def _shell(path: Path, part: About) -> Script:
    if part["watches"]:
        return importlib.import_module(f"{__package__}.torch.scripts").WatchedScript(str(path))
    return Script(str(path))


def _tell(outcome: CellOutcome) -> None:
    """Print how the cell ended where its own traceback does not say it."""
    if outcome.status == "error" and outcome.traceback:
        sys.stderr.write(f"{outcome.words}\n")
    if outcome.advice and not outcome.is_well:
        sys.stderr.write(f"  next: {outcome.advice}\n")


def _meet(where: Surroundings, job: About, conductor: Conductor | None) -> About:
    """Return this process's part in the job."""
    meeting = _meeting(where)
    about = _about(where, job)
    if conductor is None:
        return meeting.ask(about)
    abouts = meeting.gather(about)
    store = where.store
    if store is None and where.world_size == 1:
        store = _own_store(job)
    try:
        parts = conductor.conduct(
            {"job": job, "store": store, "attempt": where.attempt, "key": os.environ.get(KEY, "")},
            abouts,
        )
    except WorkbenchError as error:
        meeting.hand_out([{"error": str(error)}] * where.world_size)
        raise
    meeting.hand_out(parts)
    _kept.append(meeting)  # rank 0 may host the store in which the run's groups meet
    return parts[0]


_kept: list[Any] = []


def _own_store(job: About) -> tuple[str, int] | None:
    """Host a store for a single process of PyTorch, on loopback; None for other frameworks."""
    if job.get("framework", "torch") != "torch":
        return None
    listener = cluster_env.listening("127.0.0.1")
    host, port = listener.getsockname()[:2]
    dist = importlib.import_module("torch.distributed")
    _kept.append(
        dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    )
    return str(host), int(port)


def _about(where: Surroundings, job: About) -> About:
    """Return what the conductor must know of this process."""
    me, facts = psutil.Process(), survey(str(job.get("framework", "torch")))
    store, address, port = where.store, "", 0
    if where.addresses:
        host, _, port_text = where.addresses[where.rank].rpartition(":")
        address, port = socket.gethostbyname(host), int(port_text)
    elif store is not None and where.world_size > 1:
        address = cluster_env.own_address(socket.gethostbyname(store[0]))
    return {
        "rank": where.rank,
        "host": socket.gethostname(),
        "place": cluster_env.host_token(),
        "address": address,
        "port": port,
        "cores": cpu_count(),
        "pid": me.pid,
        "began": me.create_time(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "devices": [asdict(one) for one in facts.devices],
        "notes": list(facts.notes),
    }


def _is_there(folder: Path, token: str) -> bool:
    """Whether this process sees the run's folder: other hosts may not share the disk."""
    try:
        return secrets.compare_digest((folder / "token").read_text(), token)
    except OSError:
        return False


def _launch_words(launch: Mapping[str, Any]) -> str:
    servers = int(launch.get("servers", 0))
    words = f"{launch.get('workers', 1)} workers"
    return f"{words} and {servers} server{'s' if servers > 1 else ''}" if servers else words


def _heard(number: int, frame: object) -> None:
    """Do nothing: the watchdog of interrupts reads of the signal, and asks for a Stop."""
